"""The standby's side of replication: persists what the leader sends, then acknowledges it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from decoupled_diloco.channel import (
    ADMIN_DEADLINE_S,
    MAX_LISTING_MESSAGE_BYTES,
    error_from_rpc,
    open_channel,
)
from decoupled_diloco.claims import Claim, claim_from
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, reach
from decoupled_diloco.layout import Layout
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.v1 import replication_pb2_grpc as rpc
from decoupled_diloco.wire import held_to, malformed
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.strict_json import canonical_json
from synchronizer_server.proofs import Handshake, new_nonce
from synchronizer_server.replication.messages import (
    RecordStager,
    Transfer,
    check_settings,
    description_from,
)
from synchronizer_server.replication.outbox import MAX_RECORDS
from synchronizer_server.run_layout import layout_from
from synchronizer_server.runner import Runner
from synchronizer_server.store.base import RoundStore, RunDescription

logger = logging.getLogger(__name__)

FIRST_MESSAGE_TIMEOUT_S: Final = ADMIN_DEADLINE_S

Call = grpc.aio.StreamStreamCall[Any, Any]


class Follower:
    """Keeps a store equal to the leader's.

    Args:
        store: what is written; nobody else uses it meanwhile.
        runner: runs the store.
        settings: settings of the run; the leader's must be the same.
        standby_id: id of this store.
        heard: takes the leader's claim; returns whether it is signed with our key and of this run.
        key: both sides of a stream prove that they hold it.
        insecure: True where plaintext to another machine was asked for.
        on_change: called after every change of what is exposed here.

    Attributes:
        streaming: True while a leader's stream is open and has said which run it leads.
        in_sync: what the leader last said; it stays when the leader is lost (then it decides
            whether this store may take over), and is False again once a stream is open.
        claim: claim of the leader that was last followed.
        description: description of the run, as kept.
        record: the newest record that is persisted here.
    """

    def __init__(
        self,
        store: RoundStore,
        runner: Runner,
        settings: RunSettings,
        *,
        standby_id: str,
        heard: Callable[[Claim], bool],
        key: bytes,
        insecure: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._runner = runner
        self._settings = settings
        self._standby_id = standby_id
        self._heard = heard
        self._key = key
        self._insecure = insecure
        self._on_change = on_change
        self._loaded = False
        self._highest_term = 0
        self._layout: Layout | None = None
        self._stager: RecordStager | None = None
        self.streaming = False
        self.in_sync = False
        self.claim: Claim | None = None
        self.description: RunDescription | None = None
        self.record: RoundRecord | None = None

    @property
    def highest_term(self) -> int:
        """The highest term that ever began in this store, as far as it is read; 0 if none."""
        return self._highest_term

    @property
    def persisted(self) -> tuple[int, int] | None:
        """Term and global step of the newest record here; None in an empty store."""
        return None if self.record is None else (self.record.term, self.record.global_step)

    async def load(self) -> None:
        """Reads what the store holds; `follow` does so by itself.

        Raises:
            DilocoError: as `RoundStore.load`.
        """
        await self._runner.submit(self._load)
        self._on_change()

    def _load(self) -> None:
        """In the runner: a record that was still being written when a stream ended is there now."""
        if self._loaded:
            return
        loaded = self._store.load()
        self.record = loaded[0] if loaded is not None else None
        self.description = self._store.read_run()
        self._highest_term = self._store.highest_term()
        self._loaded = True

    async def follow(self, address: str, highest: Claim | None = None) -> None:
        """Follows the leader at an address; returns never.

        Args:
            address: ``host:port``.
            highest: highest claim of leadership that was heard and believed.

        Raises:
            DilocoError: what ended it: UNAVAILABLE, NOT_LEADING and the like where trying again
                helps; BAD_CLAIM, STALE_TERM; RUN_MISMATCH, CONFIG_CONFLICT; what a message or the
                store was refused for.
        """
        await self.load()
        channel = open_channel(
            address,
            "replication",
            insecure=self._insecure,
            receive_bytes=MAX_LISTING_MESSAGE_BYTES,
        )
        try:
            call = rpc.ReplicationServiceStub(channel).Replicate()
            await self._stream(call, highest)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            self.streaming, self._stager = False, None
            await channel.close()
            self._on_change()

    async def _stream(self, call: Call, highest: Claim | None) -> None:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
                handshake = self._challenged(await self._read(call))
                await _write(call, pb.ReplicateRequest(hello=self._hello(handshake, highest)))
                first = await self._read(call)
        except TimeoutError:
            raise DilocoError(Reason.UNAVAILABLE, "the leader does not answer") from None
        if first.WhichOneof("kind") != "run":
            raise malformed("a hello that is not answered with the run")
        await self._begin(first.run, handshake, highest)
        due: asyncio.Queue[Transfer] = asyncio.Queue(MAX_RECORDS)
        # A slow disk must not make the leader's word of where we stand come late.
        work = [
            asyncio.ensure_future(job) for job in (self._receive(call, due), self._keep(call, due))
        ]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _receive(self, call: Call, due: asyncio.Queue[Transfer]) -> None:
        while True:
            if (transfer := await self._take(await self._read(call))) is not None:
                await due.put(transfer)

    async def _keep(self, call: Call, due: asyncio.Queue[Transfer]) -> None:
        while True:
            await self._persist(call, await due.get())

    async def _read(self, call: Call) -> pb.ReplicateResponse:
        response = await call.read()
        if not isinstance(response, pb.ReplicateResponse):  # the end of the stream
            raise DilocoError(Reason.UNAVAILABLE, "the leader ended the stream")
        return response

    def _challenged(self, first: pb.ReplicateResponse) -> Handshake:
        """Takes the leader's claim; only for one that is signed anything is signed in turn."""
        if first.WhichOneof("kind") != "challenge":
            raise malformed("a replication stream that does not begin with a challenge")
        claim = claim_from(first.challenge.claim)
        if claim.run_id != self._settings.run_id:
            raise DilocoError(
                Reason.RUN_MISMATCH,
                f"run {claim.run_id[:80]!r} is led there, not {self._settings.run_id!r}; check the "
                "addresses of the other synchronizers",
            )
        if not claim.term or not self._heard(claim):
            raise DilocoError(
                Reason.BAD_CLAIM,
                "its claim of leadership is not signed with the key of this run; give all "
                "synchronizers the same key file",
            )
        return Handshake(
            claim=claim,
            standby_id=self._standby_id,
            leader_nonce=first.challenge.nonce,
            standby_nonce=new_nonce(),
        )

    def _hello(self, handshake: Handshake, highest: Claim | None) -> pb.ReplicateHello:
        """Said to the leader of an earlier term, too: it must hear of the later one."""
        return pb.ReplicateHello(
            run_id=self._settings.run_id,
            standby_id=self._standby_id,
            held=held_to(dict(enumerate(self.record.versions)) if self.record else {}),
            claim=highest.to_proto() if highest is not None else None,
            nonce=handshake.standby_nonce,
            proof=handshake.standby_proof(self._key),
        )

    async def _begin(
        self, run: pb.ReplicateRun, handshake: Handshake, highest: Claim | None
    ) -> None:
        claim = handshake.claim
        if not handshake.proves_leader(run.proof, self._key):
            raise DilocoError(
                Reason.BAD_CLAIM,
                f"it repeats the claim of {claim.leader_id}, but does not prove that it holds the "
                "key of this run; look who listens at that address",
            )
        known = max(self._highest_term, highest.term if highest is not None else 0)
        if claim.term < known:
            raise DilocoError(
                Reason.STALE_TERM,
                f"it leads in term {claim.term}, but term {known} has begun; look for its leader",
                term=claim.term,
            )
        if highest is not None and (claim.term, claim.run_id) == (highest.term, highest.run_id):
            _check_same_leader(claim, highest)
        check_settings(run.settings_json, self._settings)
        self.claim, self.streaming, self.in_sync = claim, True, False
        logger.info("follows %s, term %d", claim.leader_id, claim.term)
        await self._describe(run)

    async def _describe(self, run: pb.ReplicateRun) -> None:
        """Takes the description of the run, once it is known."""
        assert self.claim is not None, "following"
        if claim_from(run.claim) != self.claim:
            raise DilocoError(Reason.BAD_CLAIM, "the claim of leadership changed in the stream")
        description = description_from(run.description_json)
        if description is not None:
            self._layout = await self._runner.submit(lambda: self._open_run(description))
            self._stager = RecordStager(self._layout, self.claim)
        self._on_change()

    def _open_run(self, description: RunDescription) -> Layout:
        try:
            layout = layout_from(description, self._settings)
        except DilocoError as error:
            raise malformed(f"a description of the run: {error.message}") from error
        kept = self._store.open_run(description)
        if canonical_json(kept) != canonical_json(description):
            raise DilocoError(
                Reason.RUN_MISMATCH,
                "the store of this standby describes another run; give it an empty directory",
            )
        self.description = kept
        return layout

    async def _take(self, response: pb.ReplicateResponse) -> Transfer | None:
        """Takes a message; returns the record that it completes."""
        stager = self._stager
        match response.WhichOneof("kind"):
            case "state":
                self.in_sync = response.state.in_sync
                self._on_change()
                return None
            case "run":
                if stager is not None and not stager.idle:
                    raise malformed("the run is described in the middle of a record")
                await self._describe(response.run)
                return None
            case None:
                raise malformed("a message of a kind that is not known here")
        if stager is None:
            raise malformed("a record before the description of the run")
        match response.WhichOneof("kind"):
            case "record":
                return stager.record(response.record)
            case "tensor":
                stager.tensor(response.tensor)
            case "chunk":
                if stager.chunk(response.chunk):
                    return await asyncio.to_thread(stager.decode)  # never behind the store
        return None

    async def _persist(self, call: Call, transfer: Transfer) -> None:
        reach(FaultPoint.MID_REPLICATE)
        await self._runner.submit(lambda: self._install(transfer))
        reach(FaultPoint.BEFORE_ACKNOWLEDGE)
        record = transfer.record
        ack = pb.ReplicateAck(term=record.term, global_step=record.global_step)
        await _write(call, pb.ReplicateRequest(ack=ack))
        self._on_change()

    def _install(self, transfer: Transfer) -> None:
        """In the runner, with what is exposed: a stream that is cut off here changes nothing."""
        self._store.install(transfer.record, transfer.fragments)
        held = self.persisted
        if held is None or held < (transfer.record.term, transfer.record.global_step):
            self.record = transfer.record
        self._highest_term = max(self._highest_term, transfer.record.term)


def _check_same_leader(claim: Claim, highest: Claim) -> None:
    if claim.leader_id != highest.leader_id:
        raise DilocoError(
            Reason.BAD_CLAIM,
            f"{claim.leader_id} and {highest.leader_id} both claim term {claim.term}; none is "
            "followed before one of them leads in a higher term",
            term=claim.term,
        )


async def _write(call: Call, request: pb.ReplicateRequest) -> None:
    """Writes; a call that has ended meanwhile says why at the next read."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(request)
