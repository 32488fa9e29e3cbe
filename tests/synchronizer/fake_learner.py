"""A synchronizer served on loopback in this process, and hand-made learners and watchers for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import torch

from decoupled_diloco.channel import add_port, error_from_rpc, open_channel, server_options
from decoupled_diloco.codecs import get_codec, payload_digest
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.layout import Layout, Role, Strategy, TensorSpec, build_layout
from decoupled_diloco.settings import PROTOCOL_VERSION, RunSettings
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc, synchronizer_pb2_grpc, types_pb2
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.versions import Version, digest_of
from decoupled_diloco.wire import tensors_to, version_to
from synchronizer_server.assembly import Outside, assemble
from synchronizer_server.core import events as ev
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.runner import Runner, ThreadRunner
from synchronizer_server.service.admin import AdminService
from synchronizer_server.service.decoding import INTERCEPTORS
from synchronizer_server.service.synchronizer import SynchronizerService
from synchronizer_server.store.memory import MemoryStore

ACCEPTED = pb.PUSH_OUTCOME_ACCEPTED
DROPPED = pb.PUSH_OUTCOME_DROPPED
REFUSED = pb.PUSH_OUTCOME_REFUSED
RESUME = pb.PUSH_OUTCOME_RESUME
PATIENCE_S = 20.0

TENSORS = [
    TensorSpec(name="embed.weight", shape=(8, 4), dtype="float32", role=Role.EMBEDDING),
    TensorSpec(name="a.weight", shape=(6, 4), dtype="float32"),
    TensorSpec(name="b.weight", shape=(5, 4), dtype="float32"),
    TensorSpec(name="c.bias", shape=(3,), dtype="float32"),
]


def make_settings(**changes: object) -> RunSettings:
    """Nothing is late and nobody goes silent unless a test wants it."""
    values: dict[str, object] = {
        "num_learners": 3, "num_fragments": 4, "sync_interval": 1, "overlap": 2,
        "startup_wait_s": 60.0, "push_floor_s": 30.0, "heartbeat_timeout_s": 60.0,
        "outer_learning_rate": 1.0, "outer_momentum": 0.0,
    }  # fmt: skip
    return RunSettings(**(values | changes))


def layout_of(settings: RunSettings) -> Layout:
    return build_layout(
        TENSORS,
        strategy=Strategy(settings.strategy),
        num_fragments=settings.num_fragments,
        overlap=settings.overlap,
    )


def vector_for(fragment: int, num_elements: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + fragment)
    return torch.randn(num_elements, generator=generator)


def digest_of_vector(vector: torch.Tensor) -> bytes:
    return digest_of(vector.contiguous().numpy().tobytes())


async def until(condition: Callable[[], object]) -> None:
    """Polls; fails a test that waits for what never comes."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - any state of the engine, not an event
            await asyncio.sleep(0.002)


async def refusal(call: Awaitable[object]) -> DilocoError:
    """The error that a call ends with."""
    try:
        answer = await asyncio.wait_for(call, PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    raise AssertionError(f"answered {answer}")


@dataclass
class Fleet:
    """One synchronizer at work in this process."""

    settings: RunSettings = field(default_factory=make_settings)
    store: object = field(default_factory=MemoryStore)
    membership: object = field(default_factory=MemoryMembership)
    tensors_runner: Runner | None = None
    store_runner: Runner | None = None
    max_staged_bytes: int = 1 << 20
    journal: object = None
    on_event: object = None

    async def start(self) -> Fleet:
        self._runners = [
            self.tensors_runner or ThreadRunner("tensors"),
            self.store_runner or ThreadRunner("store"),
        ]
        outside = Outside(
            store=self.store,
            membership=self.membership,
            tensors_runner=self._runners[0],
            store_runner=self._runners[1],
            clock=time.monotonic,
            journal_path=self.journal,
            on_event=self.on_event,
        )
        try:
            assembled = await assemble(
                self.settings, outside, max_staged_bytes=self.max_staged_bytes
            )
        except BaseException:
            self._close_runners()
            raise
        self.layout = layout_of(self.settings)
        self.engine, self.joins = assembled.engine, assembled.joins
        self._server = grpc.aio.server(options=server_options(), interceptors=INTERCEPTORS)
        synchronizer_pb2_grpc.add_SynchronizerServiceServicer_to_server(
            SynchronizerService(self.engine, self.joins), self._server
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminService(self.engine, self.joins), self._server
        )
        self.port = add_port(self._server, "127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        await self._server.start()
        self.engine.spawn(self.engine.run_timer())
        self.engine.handle(ev.Tick())
        self._channel = self.channel("test")
        self.stub = synchronizer_pb2_grpc.SynchronizerServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        return self

    def channel(self, purpose: str) -> grpc.aio.Channel:
        return open_channel(self.address, purpose)

    @property
    def committed(self) -> int:
        return self.engine.core.state.committed

    async def committed_is(self, global_step: int) -> None:
        await until(lambda: self.committed >= global_step or self.engine.failure)
        assert self.engine.failure is None

    def published(self) -> dict[int, tuple[Version, bytes]]:
        updates = self.engine.updates
        return {
            i: (v, updates.published(i).numpy().tobytes()) for i, v in enumerate(updates.versions())
        }

    async def status(self) -> admin_pb2.GetStatusResponse:
        return await self.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=PATIENCE_S)

    async def learner(self, learner_id: str, **changes: object) -> FakeLearner:
        """A learner that has joined and reports."""
        learner = FakeLearner(self, learner_id)
        await learner.join(**changes)
        await learner.open()
        return learner

    async def seeded(self, *learner_ids: str) -> list[FakeLearner]:
        """Learners that have joined and report, after the first of them has seeded."""
        learners = [await self.learner(x) for x in learner_ids]
        await learners[0].seed()
        await until(lambda: self.engine.core.state.seeded)
        return learners

    async def stop(self, *, drain: bool = False) -> None:
        """Ends it; without ``drain`` as a crash does: nothing is finished."""
        if drain:
            self.engine.handle(ev.DrainStarted())
            await asyncio.wait_for(self.engine.complete.wait(), PATIENCE_S)
        await self.engine.close()
        if drain:  # answers under way still arrive, as with the process
            await self._server.stop(PATIENCE_S)
        await self._channel.close()
        await self._server.stop(0)
        self._close_runners()
        self.engine.parts.journal.close()
        self.store.close()

    def _close_runners(self) -> None:
        for runner in self._runners:
            runner.close()


@contextlib.asynccontextmanager
async def serving(**changes: object) -> AsyncIterator[Fleet]:
    """A fleet that is stopped at the end, in which nothing of ours has failed."""
    fleet = await Fleet(**changes).start()
    try:
        yield fleet
        assert fleet.engine.failure is None
    finally:
        await fleet.stop()


class FakeLearner:
    """Says what a test wants said, and keeps what it is told."""

    def __init__(self, fleet: Fleet, learner_id: str) -> None:
        self.fleet = fleet
        self.learner_id = learner_id
        self.request_id = f"request-{learner_id}"
        self.local_step = 0
        self.told: asyncio.Queue[pb.ReportResponse | DilocoError | None] = asyncio.Queue()
        self.call: grpc.aio.StreamStreamCall | None = None
        self._reader: asyncio.Task[None] | None = None

    def join_request(self, **changes: object) -> pb.JoinRequest:
        values: dict[str, object] = {
            "protocol_version": PROTOCOL_VERSION,
            "learner_id": self.learner_id,
            "request_id": self.request_id,
            "tensors": tensors_to(TENSORS),
            "records_parts": True,
        }
        return pb.JoinRequest(**(values | changes))

    async def join(self, **changes: object) -> pb.JoinResponse:
        self.joined = await self.fleet.stub.Join(self.join_request(**changes), timeout=PATIENCE_S)
        self.incarnation = self.joined.incarnation
        self.term = self.joined.claim.term
        self.local_step = self.joined.local_step
        return self.joined

    # -- reports ---------------------------------------------------------------------------------

    async def open(self, *, read: bool = True) -> None:
        """Opens a report stream."""
        self.call = self.fleet.stub.Report()
        hello = pb.ReportHello(learner_id=self.learner_id, incarnation=self.incarnation)
        await self.call.write(pb.ReportRequest(hello=hello))
        if read:
            self._reader = asyncio.ensure_future(self._read(self.call, self.told))
            core = self.fleet.engine.core
            await until(lambda: (x := core.state.roster.find(self.learner_id)) and x.live)

    async def _read(
        self,
        call: grpc.aio.StreamStreamCall,
        told: asyncio.Queue[pb.ReportResponse | DilocoError | None],
    ) -> None:
        """Each stream speaks into the queue that was there when it opened."""
        try:
            async for message in call:
                told.put_nowait(message)
        except grpc.aio.AioRpcError as error:
            told.put_nowait(error_from_rpc(error))
        else:
            told.put_nowait(None)

    async def step(self, num_tokens: int = 64, *, loss: float = 2.5, **clock: object) -> None:
        self.local_step += 1
        message = pb.InnerStep(
            clock=types_pb2.Clock(**({"own_step": self.local_step} | clock)),
            num_tokens=num_tokens,
            num_steps=1,
            loss=loss,
        )
        await self.call.write(pb.ReportRequest(inner_step=message))

    async def say(self, **kind: object) -> None:
        await self.call.write(pb.ReportRequest(**kind))

    async def hear(self, kind: str) -> object:
        """The next message of a kind; others are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.told.get()
                assert isinstance(message, pb.ReportResponse), message
                if message.WhichOneof("kind") == kind:
                    return getattr(message, kind)

    async def end(self) -> DilocoError | None:
        """What the report stream ends with; None for a plain end."""
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(message := await self.told.get(), pb.ReportResponse):
                pass
        return message

    def hang_up(self) -> None:
        self.call.cancel()

    # -- pushes ----------------------------------------------------------------------------------

    def num_elements(self, fragment: int) -> int:
        return self.fleet.layout.fragments[fragment].num_elements

    def header(self, payload: bytes, **changes: object) -> pb.PushHeader:
        """A header of an outer gradient; ``encoding`` takes changes of its own."""
        codec = self.fleet.settings.codec_up
        encoding = {
            "codec": codec,
            "payload_bytes": len(payload),
            "digest": payload_digest(payload),
        }
        encoding |= changes.pop("encoding", {})
        values: dict[str, object] = {
            "kind": pb.PUSH_KIND_OUTER_GRADIENT,
            "learner_id": self.learner_id,
            "incarnation": self.incarnation,
            "term": self.term,
            "local_step": self.local_step,
            "num_tokens": 64,
            "num_steps": 1,
        }
        return pb.PushHeader(**(values | changes), encoding=types_pb2.Encoding(**encoding))

    def header_for(self, pull: pb.Pull, payload: bytes, **changes: object) -> pb.PushHeader:
        """A header that answers a pull, on the published base."""
        encoding = {"num_elements": self.num_elements(pull.fragment)}
        encoding |= changes.pop("encoding", {})
        base = version_to(self.fleet.engine.updates.version(pull.fragment))
        values = {"global_step": pull.global_step, "fragment": pull.fragment, "base": base}
        return self.header(payload, **(values | changes), encoding=encoding)

    def encode(self, vector: torch.Tensor) -> bytes:
        return bytes(get_codec(self.fleet.settings.codec_up).encode(vector))

    async def push(
        self, pull: pb.Pull, vector: torch.Tensor | None = None, **changes: object
    ) -> pb.PushResponse:
        """Answers a pull."""
        if vector is None:
            vector = vector_for(pull.fragment, self.num_elements(pull.fragment), self.local_step)
        payload = self.encode(vector)
        return await self.send(self.header_for(pull, payload, **changes), payload)

    async def send(
        self, header: pb.PushHeader | None, payload: bytes, chunk_bytes: int = 32
    ) -> pb.PushResponse:
        """Sends a push from the header's offset on."""
        messages = [] if header is None else [pb.PushRequest(header=header)]
        start = 0 if header is None else header.offset_bytes
        messages += [
            chunk_at(payload, i, chunk_bytes) for i in range(start, len(payload), chunk_bytes)
        ]
        return await self.send_all(messages)

    async def send_all(self, messages: list[pb.PushRequest]) -> pb.PushResponse:
        async def requests() -> AsyncIterator[pb.PushRequest]:
            for message in messages:
                yield message

        return await self.fleet.stub.Push(requests(), timeout=PATIENCE_S)

    async def turn(self, vector: torch.Tensor | None = None, **changes: object) -> pb.Pull:
        """A step, the pull that follows, and an accepted answer to it."""
        await self.step()
        pull = await self.hear("pull")
        answer = await self.push(pull, vector, **changes)
        assert answer.outcome == ACCEPTED, answer
        return pull

    async def seed_fragment(
        self, fragment: int, vector: torch.Tensor | None = None, **changes: object
    ) -> pb.PushResponse:
        if vector is None:
            vector = vector_for(fragment, self.num_elements(fragment), 0)
        payload = bytes(get_codec("fp32").encode(vector))
        encoding = {"codec": "fp32", "num_elements": vector.numel()} | changes.pop("encoding", {})
        values = {"kind": pb.PUSH_KIND_SEED, "fragment": fragment} | changes
        return await self.send(self.header(payload, **values, encoding=encoding), payload)

    async def seed(self) -> None:
        for fragment in range(self.fleet.layout.num_fragments):
            answer = await self.seed_fragment(fragment)
            assert answer.outcome == ACCEPTED, answer


def chunk_at(payload: bytes, offset: int, chunk_bytes: int = 32) -> pb.PushRequest:
    data = payload[offset : offset + chunk_bytes]
    return pb.PushRequest(chunk=types_pb2.Chunk(offset_bytes=offset, data=data))
