"""Asks the synchronizers what they see: once, or about every second in the background."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from decoupled_diloco.channel import (
    MAX_LISTING_MESSAGE_BYTES,
    channel_options,
    parse_address,
    require_secure,
)
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import PROTOCOL_VERSION
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc

INTERVAL_S: Final = 1.0
_DEADLINE_S: Final = 3.0

LEADING: Final = "leading"
"""Role of a synchronizer that leads."""


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
class Seen:
    """A synchronizer as it answered.

    Attributes:
        address: where it listens, host:port.
        status: its answer; None where it gave none.
    """

    address: str
    status: admin_pb2.GetStatusResponse | None

    @property
    def role(self) -> str:
        """``leading``, ``following``, ``waiting``, or ``away`` where it does not answer."""
        return "away" if self.status is None else (self.status.role or LEADING)

    @property
    def term(self) -> int:
        """The term that it knows; 0 where it does not answer."""
        return self.status.claim.term if self.status is not None else 0


def who_leads(seen: Sequence[Seen]) -> Seen | None:
    """Returns who leads, by the highest term where several claim to; None where nobody does."""
    leading = [entry for entry in seen if entry.role == LEADING]
    return max(leading, key=lambda entry: entry.term, default=None)


def newest(seen: Sequence[Seen]) -> admin_pb2.GetStatusResponse | None:
    """Returns the answer of who leads, else of who knows the highest term; None without any."""
    best = who_leads(seen) or max(seen, key=lambda entry: entry.term, default=None)
    return best.status if best is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the poller knows.

    Attributes:
        status: the newest answer of who leads; None before the first.
        away_s: how long nobody who leads has answered; 0 while one does.
        layout: known once the first learner has joined.
        synchronizers: every synchronizer as it last answered; empty before the first look.
    """

    status: admin_pb2.GetStatusResponse | None
    away_s: float
    layout: Layout | None
    synchronizers: tuple[Seen, ...] = ()

    @property
    def leader(self) -> str | None:
        """Address of who leads now; None where nobody is known to."""
        leading = who_leads(self.synchronizers)
        return leading.address if leading is not None else None


class _Link:
    """The admin service of one synchronizer."""

    def __init__(self, address: str, *, insecure: bool) -> None:
        self.address = parse_address(address)
        require_secure(self.address, insecure=insecure)
        self.channel = grpc.insecure_channel(
            str(self.address),
            options=channel_options(
                self.address, "status", receive_bytes=MAX_LISTING_MESSAGE_BYTES
            ),
        )
        self.stub = admin_pb2_grpc.AdminServiceStub(self.channel)


class StatusClient:
    """The admin services of a run's synchronizers, for people who look.

    Args:
        address: host:port; of several synchronizers, separated by commas.
        insecure: True where plaintext to another machine was asked for.

    Raises:
        UsageError: CONFIG_INVALID for no address, CONFIG_CONFLICT for plaintext to elsewhere.
    """

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        self._links = [_Link(part.strip(), insecure=insecure) for part in address.split(",")]

    def close(self) -> None:
        """Closes the connections."""
        for link in self._links:
            link.channel.close()

    def look(self) -> tuple[Seen, ...]:
        """Asks every synchronizer, all at once.

        Raises:
            DilocoError: UNAVAILABLE where nobody answers.
        """
        request = admin_pb2.GetStatusRequest()
        calls = [link.stub.GetStatus.future(request, timeout=_DEADLINE_S) for link in self._links]
        seen, why = [], ""
        for link, call in zip(self._links, calls, strict=True):
            status = None
            try:
                status = call.result()
            except grpc.RpcError as error:
                why = _code(error)
            seen.append(Seen(address=str(link.address), status=status))
        if all(entry.status is None for entry in seen):
            raise self._unavailable(why)
        return tuple(seen)

    def status(self) -> admin_pb2.GetStatusResponse:
        """Returns the status of who leads; where nobody does, of who knows the highest term.

        Raises:
            DilocoError: UNAVAILABLE where nobody answers.
        """
        best = newest(self.look())
        assert best is not None, "somebody answered"
        return best

    def layout(self) -> Layout | None:
        """Returns the layout as the first synchronizer that answers has it; None before it is.

        Raises:
            DilocoError: UNAVAILABLE.
        """
        request = admin_pb2.GetRunRequest(protocol_version=PROTOCOL_VERSION)
        why = ""
        for link in self._links:
            try:
                run = link.stub.GetRun(request, timeout=_DEADLINE_S)
            except grpc.RpcError as error:
                why = _code(error)
                continue
            if run.tensors:
                return Layout(
                    num_parameters=sum(math.prod(tensor.shape) for tensor in run.tensors),
                    num_fragments=run.settings.num_fragments,
                )
            why = ""
        if why:
            raise self._unavailable(why)
        return None

    def _unavailable(self, why: str) -> DilocoError:
        addresses = ", ".join(str(link.address) for link in self._links)
        return DilocoError(
            Reason.UNAVAILABLE,
            f"no synchronizer answers at {addresses} ({why}); check the address, and that the "
            "fleet is running",
            address=addresses,
        )


def _code(error: grpc.RpcError) -> str:
    # The errors of a channel are calls, too, which the types cannot say.
    return str(error.code().name) if hasattr(error, "code") else "UNKNOWN"


class StatusPoller:
    """Polls synchronizers from a thread of its own; that they are away is a fact, not an error.

    Use as a context manager.

    Args:
        address: host:port; of several synchronizers, separated by commas.
        insecure: True where plaintext to another machine was asked for.
    """

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        self._client = StatusClient(address, insecure=insecure)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="status-poller", daemon=True)
        self._lock = threading.Lock()
        self._status: admin_pb2.GetStatusResponse | None = None
        self._layout: Layout | None = None
        self._seen: tuple[Seen, ...] = ()
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
            return Snapshot(
                status=self._status,
                away_s=away_s,
                layout=self._layout,
                synchronizers=self._seen,
            )

    def _poll(self) -> None:
        while not self._stop.is_set():
            self._ask()
            self._stop.wait(INTERVAL_S)

    def _ask(self) -> None:
        seen: tuple[Seen, ...] = ()
        leading, layout = None, self._layout
        try:
            seen = self._client.look()
            leading = who_leads(seen)
            if leading is not None:
                layout = layout or self._client.layout()
        except (DilocoError, ValueError, grpc.FutureCancelledError):
            # A closed channel raises ValueError or cancels: the poller is being stopped.
            pass
        with self._lock:
            self._answering = leading is not None
            self._seen = seen
            if leading is not None:
                self._status, self._layout = leading.status, layout
                self._answered = time.monotonic()
