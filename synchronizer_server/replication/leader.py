"""The leader's side of replication: every record to every standby, in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Final, Protocol

from decoupled_diloco.claims import Claim, claim_from
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, reach
from decoupled_diloco.logs import ChangeLogger
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.wire import held_from, malformed
from synchronizer_server.convert import check_id
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.limits import StreamLimits
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.proofs import Handshake, new_nonce
from synchronizer_server.replication.messages import (
    Transfer,
    challenge_message,
    encode_tensor,
    record_message,
    run_message,
    state_message,
)
from synchronizer_server.replication.outbox import Outbox
from synchronizer_server.runner import Runner
from synchronizer_server.store.base import RunDescription

logger = logging.getLogger(__name__)

MAX_STANDBYS: Final = 8


class StandbyEvents(Protocol):
    """Hears of the standbys; every call returns at once."""

    def connected(self, standby_id: str) -> None:
        """A standby's stream is open; what it lacks is on its way."""

    def acked(self, standby_id: str, term: int, global_step: int) -> None:
        """A standby has persisted a record, and with it everything before."""

    def lost(self, standby_id: str) -> None:
        """A standby's stream is over."""


class ReplicationLeader:
    """Serves the standbys of one term.

    Args:
        claim: our claim of leadership, signed.
        settings: settings of the run.
        events: hears of the standbys.
        heard: takes a claim that a standby has heard; returns whether it is signed and of this run.
        key: both sides of a stream prove that they hold it.
        runner: encodes tensors; not the store's, which would be held up.
        codec: lossless codec of tensors.

    Attributes:
        num_unproven: hellos of strangers: not signed with the key for the stream they came on.
    """

    def __init__(
        self,
        claim: Claim,
        settings: RunSettings,
        *,
        events: StandbyEvents,
        heard: Callable[[Claim], bool],
        key: bytes,
        runner: Runner,
        codec: str = "fp32",
    ) -> None:
        self._claim = claim
        self._settings = settings
        self._events = events
        self._heard = heard
        self._key = key
        self._runner = runner
        self._codec = codec
        self._description: RunDescription | None = None
        self._newest: Transfer | None = None
        self._outboxes: dict[str, Outbox] = {}
        self._error: DilocoError | None = None
        self._limits = StreamLimits()
        self._says = ChangeLogger(logger)
        self.num_unproven = 0

    # -- what is said to standbys -----------------------------------------------------------------

    def describe(self, description: RunDescription) -> None:
        """The run's description is known; before the first record."""
        self._description = description
        for outbox in self._outboxes.values():
            outbox.wake()

    def send(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> None:
        """Puts a record on its way to every standby; never waits.

        Args:
            record: seed, take-over or round, persisted here.
            fragments: all for the first record, else those that it changed. States are shared, not
                copied: nobody changes their tensors.
        """
        assert self._description is not None, "describe comes before the first record"
        known = self._newest.fragments if self._newest is not None else {}
        newest = Transfer(record=record, fragments={**known, **fragments})
        assert len(newest.fragments) == len(record.versions), "the first record has all fragments"
        self._newest = newest
        for outbox in self._outboxes.values():
            outbox.offer(Transfer(record=record, fragments=fragments))

    def tell_state(self, standby_id: str, in_sync: bool) -> None:
        """Tells a standby where it stands."""
        if standby_id in self._outboxes:
            self._outboxes[standby_id].tell(in_sync=in_sync)

    def close(self, error: DilocoError) -> None:
        """Ends every stream with this error, and refuses new ones; nobody hears of it as lost."""
        self._error = error
        for outbox in self._outboxes.values():
            outbox.close(error)
        self._outboxes.clear()

    # -- one stream -------------------------------------------------------------------------------

    async def replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest]
    ) -> AsyncIterator[pb.ReplicateResponse]:
        """Serves one standby until either side ends.

        Raises:
            DilocoError: MALFORMED, RUN_MISMATCH, BAD_CLAIM, NOT_LEADING, NO_PROGRESS,
                TOO_MANY_STREAMS; FENCED where a later stream of the same standby took its place;
                what `close` was given.
        """
        nonce = new_nonce()
        yield challenge_message(self._claim, nonce)
        hello = await self._hello(requests)
        handshake = self._proven(hello, nonce)
        outbox = self._open(hello)
        reader = asyncio.ensure_future(self._read(outbox, requests))
        try:
            async with contextlib.aclosing(self._messages(outbox, handshake)) as messages:
                async for message in messages:
                    yield message
        finally:
            reader.cancel()
            outbox.close()
            if self._outboxes.get(outbox.standby_id) is outbox:
                del self._outboxes[outbox.standby_id]
                self._events.lost(outbox.standby_id)

    async def _hello(self, requests: AsyncIterator[pb.ReplicateRequest]) -> pb.ReplicateHello:
        first = await self._limits.first(requests)
        if first is None or first.WhichOneof("kind") != "hello":
            raise malformed("a replication stream does not begin with a hello")
        return first.hello

    def _proven(self, hello: pb.ReplicateHello, nonce: bytes) -> Handshake:
        """Checks that who says hello holds our key; nothing is kept of anybody else."""
        standby_id = check_id(hello.standby_id, "standby_id")
        self._check_run(hello.run_id)
        handshake = Handshake(
            claim=self._claim,
            standby_id=standby_id,
            leader_nonce=nonce,
            standby_nonce=hello.nonce,
        )
        if not handshake.proves_standby(hello.proof, self._key):
            self.num_unproven += 1
            self._says.log(
                "hello", "BAD_CLAIM",
                f"standby {standby_id} does not prove that it holds the key of this run; it is "
                "not served, nor is any other like it",
                level=logging.WARNING,
            )  # fmt: skip
            raise DilocoError(
                Reason.BAD_CLAIM,
                "the hello is not signed for this stream with the key of the run; give all "
                "synchronizers the same key file",
            )
        return handshake

    def _open(self, hello: pb.ReplicateHello) -> Outbox:
        standby_id = hello.standby_id
        self._check_claim(claim_from(hello.claim))
        if self._error is not None:
            raise self._error
        before = self._outboxes.pop(standby_id, None)
        if before is not None:
            before.close(
                DilocoError(Reason.FENCED, f"a later stream of standby {standby_id} is open")
            )
            self._events.lost(standby_id)
        elif len(self._outboxes) >= MAX_STANDBYS:
            raise DilocoError(
                Reason.TOO_MANY_STREAMS,
                f"{MAX_STANDBYS} standbys are connected, more are not served; stop one of them",
            )
        num_fragments = len(self._newest.record.versions) if self._newest is not None else 0
        held = held_from(hello.held, num_fragments)
        outbox = Outbox(standby_id, held, behind=self._newest is not None)
        self._outboxes[standby_id] = outbox
        self._events.connected(standby_id)
        return outbox

    def _check_run(self, run_id: str) -> None:
        if run_id != self._settings.run_id:
            raise DilocoError(
                Reason.RUN_MISMATCH,
                f"this synchronizer leads run {self._settings.run_id!r}, not {run_id[:80]!r}; "
                "check the address",
            )

    def _check_claim(self, claim: Claim) -> None:
        if claim.term and not self._heard(claim):
            raise DilocoError(
                Reason.BAD_CLAIM,
                "the claim of leadership in the hello is not signed with the key of this run; "
                "give all synchronizers the same key file",
            )
        if claim.term > self._claim.term:
            raise DilocoError(
                Reason.NOT_LEADING,
                f"{claim.leader_id} leads in term {claim.term}, this synchronizer led in term "
                f"{self._claim.term}; ask the others",
            )

    async def _read(self, outbox: Outbox, requests: AsyncIterator[pb.ReplicateRequest]) -> None:
        try:
            async for request in requests:
                if request.WhichOneof("kind") != "ack":
                    raise malformed("something else than an acknowledgement")
                if outbox.closed:
                    return
                outbox.acked(request.ack)
                self._events.acked(outbox.standby_id, request.ack.term, request.ack.global_step)
        except Exception as error:
            outbox.close(error)
        else:
            outbox.close()

    async def _messages(
        self, outbox: Outbox, handshake: Handshake
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        proof, described = handshake.leader_proof(self._key), self._description
        yield run_message(self._claim, described, self._settings, proof=proof)
        while not outbox.closed:
            if described is not self._description:
                described = self._description
                yield run_message(self._claim, described, self._settings, proof=proof)
            if (in_sync := outbox.take_state()) is not None:
                yield state_message(in_sync=in_sync)
            transfer = outbox.take(self._newest)
            if transfer is None:
                await outbox.changed()
                continue
            async with contextlib.aclosing(self._transfer(outbox, transfer)) as messages:
                async for message in messages:
                    yield message

    async def _transfer(
        self, outbox: Outbox, transfer: Transfer
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """A record with its tensors; one of them is encoded at a time."""
        yield record_message(self._claim, transfer)
        reach(FaultPoint.MID_REPLICATE)
        for fragment, state in sorted(transfer.fragments.items()):
            for name, tensor in state.named().items():
                job = functools.partial(encode_tensor, fragment, name, tensor, self._codec)
                encoded = await self._runner.submit(job)
                for message in encoded.messages():
                    if outbox.closed:
                        return
                    yield message
                    if (in_sync := outbox.take_state()) is not None:
                        yield state_message(in_sync=in_sync)
