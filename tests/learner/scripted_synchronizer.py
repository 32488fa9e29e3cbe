"""A small synchronizer that does what a test tells it: real messages, no merging of its own."""

# ruff: noqa: N802 - method names are those of the protos
from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import torch

from decoupled_diloco.channel import abort
from decoupled_diloco.codecs import Stager, get_codec, iter_chunks, payload_digest
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout, Role, Strategy, TensorSpec, build_layout
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.settings_proto import settings_to_proto
from decoupled_diloco.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    synchronizer_pb2,
    synchronizer_pb2_grpc,
    types_pb2,
)
from decoupled_diloco.versions import Version, digest_of

RESUME = synchronizer_pb2.PUSH_OUTCOME_RESUME
ACCEPTED = synchronizer_pb2.PUSH_OUTCOME_ACCEPTED


def sha(vector: torch.Tensor) -> bytes:
    return digest_of(vector.numpy().tobytes())


@dataclass
class Pushed:
    header: synchronizer_pb2.PushHeader
    vector: torch.Tensor


@dataclass
class ScriptedSynchronizer(
    synchronizer_pb2_grpc.SynchronizerServiceServicer, admin_pb2_grpc.AdminServiceServicer
):
    settings: RunSettings
    term: int = 1
    layout: Layout | None = None
    is_away: bool = False
    refuse_join: DilocoError | None = None
    refuse_watch: DilocoError | None = None
    refuses: dict[str, DilocoError] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    asked: int = 0
    is_frozen: bool = False
    cut_push_at: int | None = None
    hold_pushes: bool = False
    answer_pushes_with: Reason | None = None
    snapshot: int = 0
    published: dict[int, tuple[Version, torch.Tensor]] = field(default_factory=dict)
    joins: list[synchronizer_pb2.JoinRequest] = field(default_factory=list)
    watches: list[synchronizer_pb2.WatchRequest] = field(default_factory=list)
    leaves: list[synchronizer_pb2.LeaveRequest] = field(default_factory=list)
    steps: list[synchronizer_pb2.InnerStep] = field(default_factory=list)
    heartbeats: int = 0
    declined: list[synchronizer_pb2.PullDeclined] = field(default_factory=list)
    parts_missing: list[synchronizer_pb2.PartMissing] = field(default_factory=list)
    pushes: list[Pushed] = field(default_factory=list)
    push_offsets: list[int] = field(default_factory=list)
    wires: list[str] = field(default_factory=list)
    _seeds: dict[int, torch.Tensor] = field(default_factory=dict)
    _stagers: dict[tuple[int, int], Stager] = field(default_factory=dict)
    _down: dict[str, asyncio.Queue] = field(default_factory=dict)
    _watchers: list[asyncio.Queue] = field(default_factory=list)
    _handlers: set[asyncio.Task] = field(default_factory=set)

    # -- what a test does ----------------------------------------------------------------

    def say(self, learner_id: str, **kind: object) -> None:
        self._down[learner_id].put_nowait(synchronizer_pb2.ReportResponse(**kind))

    def clock(self) -> types_pb2.Clock:
        return types_pb2.Clock(term=self.term, snapshot=self.snapshot)

    def pull(self, learner_id: str, global_step: int, fragment: int, group: int = 0) -> None:
        pull = synchronizer_pb2.Pull(
            term=self.term, group=group, global_step=global_step, fragment=fragment
        )
        self.say(learner_id, pull=pull)

    def publish(
        self, fragment: int, global_step: int, delta: torch.Tensor, *, spoil: str = ""
    ) -> torch.Tensor:
        """Publishes ``decode(encode(delta))`` on top of what was published."""
        base, held = self.published[fragment]
        codec = get_codec(self.settings.codec_down)
        payload = codec.encode(delta)
        vector = held + codec.decode(payload, held.numel())
        result = Version(self.term, global_step, sha(vector))
        self.published[fragment] = (result, vector)
        messages = self._update(fragment, base, result, self.settings.codec_down, payload)
        if spoil == "base":
            messages[0].header.base.digest = bytes(32)
        elif spoil == "result":
            messages[0].header.result.digest = bytes(32)
        elif spoil == "fragment":
            messages[0].header.fragment = 99
        elif spoil == "payload":
            data = bytearray(messages[1].chunk.data)
            data[0] ^= 1
            messages[1].chunk.data = bytes(data)
        elif spoil == "elements":
            messages[0].header.encoding.num_elements += 1
        else:
            assert not spoil, spoil
        for queue in self._watchers:
            for message in messages:
                queue.put_nowait(message)
        return vector

    def go_away(self) -> None:
        """Cuts every connection and refuses new ones."""
        self.is_away = True
        for handler in list(self._handlers):
            handler.cancel()

    def come_back(self) -> None:
        self.is_away = False

    def restart(self) -> None:
        """A new term: what is published stays, incarnations are granted anew."""
        self.term += 1
        self._stagers.clear()
        self.go_away()
        self.come_back()

    # -- servicer ------------------------------------------------------------------------

    async def GetRun(self, request, context):
        self.asked += 1
        await self._check(context, "GetRun")
        return admin_pb2.GetRunResponse(
            settings=settings_to_proto(self.settings), claim=self.claim()
        )

    def claim(self) -> types_pb2.LeadershipClaim:
        return types_pb2.LeadershipClaim(
            run_id=self.settings.run_id, term=self.term, signature=b"as the test says"
        )

    async def Join(self, request, context):
        await self._check(context, "Join")
        if self.refuse_join is not None:
            await abort(context, self.refuse_join)
        self.joins.append(request)
        tensors = [
            TensorSpec(
                name=t.name,
                shape=tuple(t.shape),
                dtype=t.dtype,
                role=Role.EMBEDDING if t.role == types_pb2.TENSOR_ROLE_EMBEDDING else Role.BODY,
                aliases=tuple(t.aliases),
            )
            for t in request.tensors
        ]
        self.layout = self.layout or build_layout(
            tensors,
            strategy=Strategy(self.settings.strategy),
            num_fragments=self.settings.num_fragments,
            overlap=self.settings.overlap,
        )
        return synchronizer_pb2.JoinResponse(
            claim=self.claim(),
            addresses=self.addresses,
            incarnation=types_pb2.Incarnation(term=self.term, number=1),
            settings=settings_to_proto(self.settings),
            layout_fingerprint=self.layout.fingerprint,
            seed=not self.published and len(self._seeds) == 0,
            shard=0,
            local_step=request.clock.own_step,
            clock=self.clock(),
        )

    async def Report(self, request_iterator, context):
        first = await anext(request_iterator)
        await self._check(context, "Report", first.hello.incarnation)
        down: asyncio.Queue = asyncio.Queue()
        with self._running(context, "report"):
            reader = asyncio.create_task(self._read_reports(request_iterator))
            self._down[first.hello.learner_id] = down
            try:
                while True:
                    yield await down.get()
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _read_reports(self, requests) -> None:
        async for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "inner_step":
                self.steps.append(request.inner_step)
            elif kind == "heartbeat":
                self.heartbeats += 1
            elif kind == "part_missing":
                self.parts_missing.append(request.part_missing)
            else:
                self.declined.append(request.pull_declined)

    async def Push(self, request_iterator, context):
        await self._check(context, "Push")
        with self._running(context, "push"):
            return await self._take_push(request_iterator, context)

    async def _take_push(self, requests, context):
        header, stager = None, None
        async for request in requests:
            if request.WhichOneof("kind") == "header":
                header = request.header
                self.push_offsets.append(header.offset_bytes)
                key = (header.global_step, header.fragment)
                encoding = header.encoding
                stager = self._stagers.setdefault(
                    key, Stager(encoding.payload_bytes, encoding.digest, 1 << 30)
                )
                if header.offset_bytes != stager.num_bytes:
                    return synchronizer_pb2.PushResponse(
                        outcome=RESUME, staged_bytes=stager.num_bytes
                    )
                continue
            stager.add(request.chunk.offset_bytes, request.chunk.data)
            if self.cut_push_at is not None and stager.num_bytes >= self.cut_push_at:
                self.cut_push_at = None
                await abort(context, DilocoError(Reason.UNAVAILABLE, "cut"))
        if self.hold_pushes:
            await asyncio.Event().wait()
        return self._answer(header, stager)

    def _answer(self, header, stager):
        if self.answer_pushes_with is not None:
            return synchronizer_pb2.PushResponse(
                outcome=synchronizer_pb2.PUSH_OUTCOME_REFUSED,
                reason=self.answer_pushes_with,
                message="as the test says",
            )
        encoding = header.encoding
        vector = get_codec(encoding.codec).decode(stager.finish(), encoding.num_elements)
        if header.kind == synchronizer_pb2.PUSH_KIND_SEED:
            self._seeds[header.fragment] = vector
            if len(self._seeds) == self.layout.num_fragments:
                for p in range(self.layout.num_fragments):
                    self.seed(p, self._seeds[p])
        else:
            self.pushes.append(Pushed(header, vector))
        return synchronizer_pb2.PushResponse(outcome=ACCEPTED, clock=self.clock())

    def seed(self, fragment: int, vector: torch.Tensor) -> None:
        self.published[fragment] = (Version(self.term, 0, sha(vector)), vector)

    async def Watch(self, request, context):
        is_learner = request.HasField("incarnation")
        await self._check(context, "Watch", request.incarnation if is_learner else None)
        if self.refuse_watch is not None:
            error, self.refuse_watch = self.refuse_watch, None
            await abort(context, error)
        self.watches.append(request)
        queue: asyncio.Queue = asyncio.Queue()
        with self._running(context, "watch"):
            held = {item.fragment: item.version.digest for item in request.held}
            for p, (version, vector) in list(self.published.items()):
                if held.get(p) != version.digest:
                    payload = get_codec("fp32").encode(vector)
                    for message in self._update(p, None, version, "fp32", payload):
                        queue.put_nowait(message)
            queue.put_nowait(synchronizer_pb2.WatchResponse(caught_up=synchronizer_pb2.CaughtUp()))
            self._watchers.append(queue)
            try:
                while True:
                    yield await queue.get()
            finally:
                self._watchers.remove(queue)

    async def Leave(self, request, context):
        await self._check(context, "Leave")
        self.leaves.append(request)
        return synchronizer_pb2.LeaveResponse()

    async def Recover(self, request_iterator, context):
        raise NotImplementedError

    GetStatus = SetQuorum = DrainLearner = TakeSnapshot = RollBackFragment = Promote = Recover

    # -- inside --------------------------------------------------------------------------

    def _update(self, fragment, base, result, codec, payload):
        def proto(version):
            return types_pb2.Version(
                term=version.term, global_step=version.global_step, digest=version.digest
            )

        header = synchronizer_pb2.UpdateHeader(
            kind=(
                synchronizer_pb2.UPDATE_KIND_FULL
                if base is None
                else synchronizer_pb2.UPDATE_KIND_DELTA
            ),
            fragment=fragment,
            base=None if base is None else proto(base),
            result=proto(result),
            encoding=types_pb2.Encoding(
                codec=codec,
                num_elements=self.layout.fragments[fragment].num_elements,
                payload_bytes=len(payload),
                digest=payload_digest(payload),
            ),
            clock=self.clock(),
        )
        messages = [synchronizer_pb2.WatchResponse(header=header)]
        offset = 0
        for chunk in iter_chunks(payload):
            messages.append(
                synchronizer_pb2.WatchResponse(
                    chunk=types_pb2.Chunk(offset_bytes=offset, data=bytes(chunk))
                )
            )
            offset += len(chunk)
        return messages

    @contextlib.contextmanager
    def _running(self, context, kind: str):
        self.wires.append(f"{kind} {context.peer()}")
        task = asyncio.current_task()
        self._handlers.add(task)
        try:
            yield
        finally:
            self._handlers.discard(task)

    async def _check(self, context, rpc: str, incarnation=None) -> None:
        if self.is_frozen:
            await asyncio.Event().wait()
        if self.is_away:
            await abort(context, DilocoError(Reason.UNAVAILABLE, "away"))
        if rpc in self.refuses:
            await abort(context, self.refuses[rpc])
        if incarnation is not None and incarnation.term != self.term:
            await abort(context, DilocoError(Reason.STALE_TERM, "join again"))


async def until(condition, timeout_s: float = 20.0) -> None:
    """Lets the loop run until ``condition`` holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.001)
