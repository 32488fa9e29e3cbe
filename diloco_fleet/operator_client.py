"""Asks a running fleet for something on an operator's word."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import grpc

from decoupled_diloco.channel import (
    MAX_LISTING_MESSAGE_BYTES,
    Address,
    channel_options,
    error_from_rpc,
    parse_address,
    require_secure,
)
from decoupled_diloco.errors import EXIT_USAGE, DilocoError, Reason, UsageError
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc
from diloco_fleet.run_files import RUNS_FOLDER, RunFiles, find_run, read_fleet
from diloco_fleet.status import StatusClient, who_leads
from diloco_fleet.view import wait_text

_DEADLINE_S: Final = 5.0
_SHORTEST_DEADLINE_S: Final = 1.0
_NEWS_S: Final = 1.0
"""What waits for less is the ordinary course of a round."""
_NO_SUCH: Final = frozenset({Reason.UNKNOWN_LEARNER, Reason.UNKNOWN_FRAGMENT})

M = TypeVar("M")
F = TypeVar("F", bound=Callable[..., Any])


def fleet_options(command: F) -> F:
    """Adds the options that say which fleet is meant, as ``diloco status`` has them."""
    options = (
        click.option(
            "--run-dir",
            type=click.Path(path_type=Path),
            help="run directory [default: the newest running fleet below runs/]",
        ),
        click.option(
            "--address",
            help="host:port of a synchronizer, instead of a run directory; several: with commas",
        ),
        click.option("--insecure", is_flag=True, help="allow plaintext to another machine"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def fleet_address(run_dir: Path | None, address: str | None) -> str:
    """Returns the address of the synchronizer that is meant; of several, separated by commas.

    Raises:
        UsageError: CONFIG_CONFLICT where both are given, RUN_NOT_FOUND where no fleet is found.
    """
    if run_dir is not None and address is not None:
        raise UsageError(Reason.CONFIG_CONFLICT, "give --run-dir or --address, not both")
    if address is not None:
        return address
    files = RunFiles(run_dir) if run_dir else find_run(RUNS_FOLDER, running=True)
    return read_fleet(files.fleet).address


class OperatorClient:
    """The admin service of who leads, for operators. Use as a context manager.

    It stays with that one: another leader would not know what was asked for already.

    Args:
        address: host:port; of several synchronizers, separated by commas.
        insecure: True where plaintext to another machine was asked for.

    Raises:
        UsageError: CONFIG_INVALID for no address, CONFIG_CONFLICT for plaintext to elsewhere.
        DilocoError: UNAVAILABLE where none of several leads.
    """

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        self._address = _leader_of(address, insecure=insecure)
        require_secure(self._address, insecure=insecure)
        self._channel = grpc.insecure_channel(
            str(self._address),
            options=channel_options(
                self._address, "operator", receive_bytes=MAX_LISTING_MESSAGE_BYTES
            ),
        )
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def status(self) -> admin_pb2.GetStatusResponse:
        """Returns the status.

        Raises:
            DilocoError: UNAVAILABLE.
        """
        return self._ask(self._stub.GetStatus, admin_pb2.GetStatusRequest())

    def set_quorum(self, quorum: int) -> int:
        """Sets the minimum quorum; returns the one in force.

        Raises:
            DilocoError: what the synchronizer says.
        """
        request = admin_pb2.SetQuorumRequest(request_id=uuid.uuid4().hex, quorum=quorum)
        return int(self._ask(self._stub.SetQuorum, request).quorum)

    def drain(self, learner_id: str, reason: str) -> bool:
        """Asks a learner to finish its step and leave; returns False where it is drained already.

        Raises:
            DilocoError: what the synchronizer says.
        """
        request = admin_pb2.DrainLearnerRequest(
            request_id=uuid.uuid4().hex, learner_id=learner_id, reason=reason
        )
        return not self._ask(self._stub.DrainLearner, request).already_drained

    def roll_back(
        self, fragment: int, reason: str, *, timeout_s: float, say: Callable[[str], None]
    ) -> admin_pb2.RollBackFragmentResponse:
        """Puts a fragment back; returns once that is published.

        Args:
            fragment: the fragment.
            reason: why, for the record.
            timeout_s: longest wait for the round that does it.
            say: takes a line about what is waited for.

        Raises:
            DilocoError: what the synchronizer says; UNAVAILABLE where the wait was too long: the
                fragment is put back all the same once its round comes.
        """
        request = admin_pb2.RollBackFragmentRequest(
            request_id=uuid.uuid4().hex, fragment=fragment, reason=reason
        )
        waiting = Patience(
            self, timeout_s, say, f"waiting for the next round of fragment {fragment}"
        )
        while True:
            try:
                return self._ask(self._stub.RollBackFragment, request, waiting.deadline_s())
            except _NotYetError:
                waiting.go_on(
                    f"no round of fragment {fragment} was published within {timeout_s:g} s; "
                    "it is put back with its next round all the same: see `diloco status`"
                )

    def take_snapshot(self, *, timeout_s: float, say: Callable[[str], None]) -> str:
        """Takes a snapshot of the whole fleet; returns its name once it has begun.

        Args:
            timeout_s: longest wait for the round that becomes the cut.
            say: takes a line about what is waited for.

        Raises:
            DilocoError: what the synchronizer says; UNAVAILABLE where the wait was too long: the
                snapshot is taken all the same once its round comes.
        """
        request = admin_pb2.TakeSnapshotRequest(request_id=uuid.uuid4().hex)
        waiting = Patience(
            self, timeout_s, say, "waiting for the next round, which becomes the cut"
        )
        while True:
            try:
                answer = self._ask(self._stub.TakeSnapshot, request, waiting.deadline_s())
                return str(answer.snapshot_id)
            except _NotYetError:
                waiting.go_on(
                    f"no round was committed within {timeout_s:g} s; the next one becomes the cut "
                    "all the same: see `diloco status`"
                )

    def _ask(self, call: Callable[..., M], request: object, deadline_s: float = _DEADLINE_S) -> M:
        try:
            return call(request, timeout=deadline_s)
        except grpc.RpcError as error:
            # The errors of a channel are calls, too, which the types cannot say.
            code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _NotYetError(self._address, deadline_s) from error
            told = error_from_rpc(error)  # type: ignore[arg-type]
            if told.reason in _NO_SUCH:
                raise _NoSuchError(told.reason, told.message) from error
            if "status" not in told.details:
                raise told from error
            raise DilocoError(
                Reason.UNAVAILABLE,
                f"no synchronizer answers at {self._address} ({code.name}); check the address, and "
                "that the fleet is running",
                address=self._address,
            ) from error


class Patience:
    """The wait of one command: what the fleet waits for meanwhile, and when it is too long.

    Args:
        client: asks what waits.
        timeout_s: when to give up, from now, seconds.
        say: takes a line about what is waited for.
        first: the line that is said first.
        subject: how the waits that matter begin; empty for all of them.
    """

    def __init__(
        self,
        client: OperatorClient,
        timeout_s: float,
        say: Callable[[str], None],
        first: str,
        *,
        subject: str = "",
    ) -> None:
        self._client = client
        self._give_up_at = time.monotonic() + timeout_s
        self._say = say
        self._first = first
        self._subject = subject
        self._said: frozenset[tuple[str, str, str]] = frozenset()
        self._reasons = ""

    def deadline_s(self) -> float:
        """How long one answer may take: no longer than what is left."""
        left_s = self._give_up_at - time.monotonic()
        return min(max(left_s, _SHORTEST_DEADLINE_S), _DEADLINE_S)

    def go_on(self, too_late: str, status: admin_pb2.GetStatusResponse | None = None) -> None:
        """Says what is waited for, where that has changed.

        Args:
            too_late: what it means that the time is over.
            status: of just now; asked for where it is not given.

        Raises:
            DilocoError: UNAVAILABLE where the time is over, or nobody answers any more.
        """
        if self._first:
            self._say(self._first)
            self._first = ""
        with suppress(_NotYetError):
            self._look(status or self._client.status())
        if time.monotonic() >= self._give_up_at:
            why = f" ({self._reasons})" if self._reasons else ""
            raise DilocoError(Reason.UNAVAILABLE, too_late + why)

    def _look(self, status: admin_pb2.GetStatusResponse) -> None:
        waits = [
            x for x in status.waits
            if x.seconds >= _NEWS_S and x.subject.startswith(self._subject)
        ]  # fmt: skip
        self._reasons = "; ".join(map(wait_text, waits))
        keys = frozenset((x.subject, x.reason, x.detail) for x in waits)
        if keys - self._said:
            self._say(self._reasons)
        self._said = keys


def _leader_of(address: str, *, insecure: bool) -> Address:
    """Returns the one that is named, or who leads of several.

    Raises:
        UsageError: CONFIG_INVALID for no address, CONFIG_CONFLICT for plaintext to elsewhere.
        DilocoError: UNAVAILABLE.
    """
    if "," not in address:
        return parse_address(address)
    with closing(StatusClient(address, insecure=insecure)) as client:
        leading = who_leads(client.look())
    if leading is None:
        raise DilocoError(
            Reason.UNAVAILABLE,
            f"no synchronizer of {address} leads now; try again once one does: see `diloco status`",
            address=address,
        )
    return parse_address(leading.address)


class _NoSuchError(UsageError):
    """An operator named what is not there: trying again cannot help."""

    @property
    def exit_code(self) -> int:
        return EXIT_USAGE


class _NotYetError(DilocoError):
    """The synchronizer is there and has not answered in time."""

    def __init__(self, address: object, deadline_s: float) -> None:
        super().__init__(
            Reason.UNAVAILABLE,
            f"the synchronizer at {address} does not answer within {deadline_s:g} s; try again",
        )
