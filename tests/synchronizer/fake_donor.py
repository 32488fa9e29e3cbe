"""Hand-made recipients and donors of inner state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from decoupled_diloco.channel import error_from_rpc
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from tests.synchronizer.fake_learner import (
    PATIENCE_S,
    FakeLearner,
    Fleet,
    make_settings,
    until,
)

STATE = bytes(range(256)) * 300


def recovering(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {"num_learners": 4, "sync_interval": 50, "startup_wait_s": 0.2}
    return {"settings": make_settings(**(values | changes))}


async def trained(fleet: Fleet, *names: str) -> list[FakeLearner]:
    """Learners that have trained, with one round merged."""
    learners = await fleet.seeded(*names)
    for learner in learners:
        await learner.step(known_global_steps=[0] * 4)
    pulls = [await learner.hear("pull") for learner in learners]
    for learner, pull in zip(learners, pulls, strict=True):
        await learner.push(pull)
    await fleet.committed_is(1)
    for learner in learners:
        await learner.step(known_global_steps=vector(fleet))
    core = fleet.engine.core
    await until(
        lambda: all(
            core.state.roster.find(n).known_global_steps == tuple(vector(fleet)) for n in names
        )
    )
    return learners


def vector(fleet: Fleet) -> list[int]:
    return [v.global_step for v in fleet.engine.updates.versions()]


def hello(learner: FakeLearner, **changes: object) -> pb.RecoverRequest:
    values: dict[str, object] = {
        "learner_id": learner.learner_id,
        "incarnation": learner.incarnation,
        "clock": types_pb2.Clock(known_global_steps=vector(learner.fleet)),
    }
    return pb.RecoverRequest(hello=pb.RecoverHello(**(values | changes)))


class Recipient:
    """Reads a recovery, as fast as a test lets it."""

    def __init__(self, learner: FakeLearner, **changes: object) -> None:
        self.headers: list[pb.RecoverHeader] = []
        self.data = b""
        self.error: DilocoError | None = None
        self.call = learner.fleet.stub.Recover(iter([hello(learner, **changes)]))
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.call:
                if message.WhichOneof("kind") == "header":
                    self.headers.append(message.header)
                    self.data = b""
                else:
                    assert message.chunk.offset_bytes == len(self.data)
                    self.data += message.chunk.data
        except grpc.aio.AioRpcError as error:
            self.error = error_from_rpc(error)

    async def end(self) -> DilocoError | None:
        await asyncio.wait_for(self.task, PATIENCE_S)
        return self.error


def offer(learner: FakeLearner, donate: pb.Donate, payload: bytes = STATE, **changes: object):
    """A donor's hello."""
    encoding = {
        "codec": "safetensors",
        "payload_bytes": len(payload),
        "digest": b"as the recipient finds it right",
    } | changes.pop("encoding", {})
    values = {"donor": True, "recovery_id": donate.recovery_id} | changes
    return hello(learner, **values, encoding=types_pb2.Encoding(**encoding))


def chunks(payload: bytes, size: int = 10_000) -> list[pb.RecoverRequest]:
    return [
        pb.RecoverRequest(chunk=types_pb2.Chunk(offset_bytes=i, data=payload[i : i + size]))
        for i in range(0, len(payload), size)
    ]


class Donor:
    """Sends what a test wants sent."""

    def __init__(self, learner: FakeLearner, *messages: pb.RecoverRequest, ends: bool = True):
        self.over = asyncio.Event()
        self._messages = messages
        self._ends = ends
        self.call = learner.fleet.stub.Recover(self._requests())
        self.task = asyncio.ensure_future(self._read())

    async def _requests(self) -> AsyncIterator[pb.RecoverRequest]:
        for message in self._messages:
            yield message
        if not self._ends:
            await self.over.wait()

    async def _read(self) -> DilocoError | None:
        try:
            async for _ in self.call:
                raise AssertionError("nothing is said to a donor")
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        return None

    async def end(self) -> DilocoError | None:
        return await asyncio.wait_for(self.task, PATIENCE_S)

    async def stop(self) -> None:
        self.over.set()
        await self.task


async def donate(learner: FakeLearner, payload: bytes = STATE) -> None:
    asked = await learner.hear("donate")
    assert await Donor(learner, offer(learner, asked, payload), *chunks(payload)).end() is None


def huge(fleet: Fleet):
    """A layout whose inner state may be large."""

    class Huge:
        num_parameters = 1 << 24
        fragments = fleet.layout.fragments
        fingerprint = fleet.layout.fingerprint

    return Huge()
