"""Asks a synchronizer what it sees: once, or about every second in the background."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Final

import grpc

from decoupled_diloco.channel import channel_options, parse_address, require_secure
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import PROTOCOL_VERSION
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc

INTERVAL_S: Final = 1.0
_DEADLINE_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Size of the model and of its layout.

    Attributes:
        num_parameters: trainable parameters, tied ones once.
        num_fragments: fragments, P.
    """

    num_parameters: int
    num_fragments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the poller knows.

    Attributes:
        status: the newest answer; None before the first.
        away_s: how long the synchronizer has not answered; 0 while it does.
        layout: known once the first learner has joined.
    """

    status: admin_pb2.GetStatusResponse | None
    away_s: float
    layout: Layout | None


class StatusClient:
    """The admin service of one synchronizer, for people who look.

    Args:
        address: host:port.
        insecure: True where plaintext to another machine was asked for.

    Raises:
        UsageError: CONFIG_INVALID for no address, CONFIG_CONFLICT for plaintext to elsewhere.
    """

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        self._address = parse_address(address)
        require_secure(self._address, insecure=insecure)
        self._channel = grpc.insecure_channel(
            str(self._address), options=channel_options(self._address, "status")
        )
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def status(self) -> admin_pb2.GetStatusResponse:
        """Returns the status.

        Raises:
            DilocoError: UNAVAILABLE.
        """
        try:
            return self._stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_DEADLINE_S)
        except grpc.RpcError as error:
            raise self._unavailable(error) from error

    def layout(self) -> Layout | None:
        """Returns the layout; None before the first learner has joined.

        Raises:
            DilocoError: UNAVAILABLE.
        """
        request = admin_pb2.GetRunRequest(protocol_version=PROTOCOL_VERSION)
        try:
            run = self._stub.GetRun(request, timeout=_DEADLINE_S)
        except grpc.RpcError as error:
            raise self._unavailable(error) from error
        if not run.tensors:
            return None
        return Layout(
            num_parameters=sum(math.prod(tensor.shape) for tensor in run.tensors),
            num_fragments=run.settings.num_fragments,
        )

    def _unavailable(self, error: grpc.RpcError) -> DilocoError:
        # The errors of a channel are calls, too, which the types cannot say.
        code = error.code().name if hasattr(error, "code") else "UNKNOWN"
        return DilocoError(
            Reason.UNAVAILABLE,
            f"no synchronizer answers at {self._address} ({code}); check the address, and that "
            "the fleet is running",
            address=self._address,
        )


class StatusPoller:
    """Polls a synchronizer from a thread of its own; that it is away is a fact, not an error.

    Use as a context manager.

    Args:
        address: host:port.
        insecure: True where plaintext to another machine was asked for.
    """

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        self._client = StatusClient(address, insecure=insecure)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="status-poller", daemon=True)
        self._lock = threading.Lock()
        self._status: admin_pb2.GetStatusResponse | None = None
        self._layout: Layout | None = None
        self._answered = time.monotonic()
        self._answering = True

    def __enter__(self) -> StatusPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._client.close()
        self._thread.join(timeout=2 * _DEADLINE_S)

    def snapshot(self) -> Snapshot:
        """Returns what is known now; never waits."""
        with self._lock:
            away_s = 0.0 if self._answering else time.monotonic() - self._answered
            return Snapshot(status=self._status, away_s=away_s, layout=self._layout)

    def _poll(self) -> None:
        while not self._stop.is_set():
            self._ask()
            self._stop.wait(INTERVAL_S)

    def _ask(self) -> None:
        status, layout = None, self._layout
        try:
            status = self._client.status()
            layout = layout or self._client.layout()
        except (DilocoError, ValueError):
            # A closed channel raises ValueError: the poller is being stopped.
            pass
        with self._lock:
            self._answering = status is not None
            if status is not None:
                self._status, self._layout = status, layout
                self._answered = time.monotonic()
