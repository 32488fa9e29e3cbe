"""Learners that misbehave in every way at once, in a random but seeded order.

Whatever they do: nothing of ours fails, nothing stays behind in memory, whoever behaves is merged,
and every watcher ends with what is published, bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import grpc.aio
import pytest
import torch

from decoupled_diloco.channel import error_from_rpc
from decoupled_diloco.errors import Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from tests.synchronizer.fake_learner import (
    ACCEPTED,
    DROPPED,
    RESUME,
    FakeLearner,
    Fleet,
    chunk_at,
    make_settings,
    serving,
    until,
    vector_for,
)
from tests.synchronizer.fake_watcher import FakeWatcher

pytestmark = pytest.mark.asyncio

NUM_ROUNDS = 40


class Chaotic(FakeLearner):
    """Answers each pull in one of many ways, most of them wrong."""

    def __init__(self, fleet: Fleet, learner_id: str, rng: random.Random) -> None:
        super().__init__(fleet, learner_id)
        self._rng = rng
        self.lives = 0

    async def run(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._live()

    async def _live(self) -> None:
        self.lives += 1
        self.told = asyncio.Queue()
        await self.join(request_id=f"life-{self.lives}" if self._rng.random() < 0.5 else "one")
        await self.open()
        while True:
            await self.step()
            message = await self.told.get()
            if not isinstance(message, pb.ReportResponse):
                return
            if message.WhichOneof("kind") == "pull":
                await self._rng.choice(self._ways())(message.pull)

    def _ways(self) -> list[Callable[[pb.Pull], Awaitable[object]]]:
        good = [self._right] * 3
        return [*good, self._twice, self._broken, self._resumed, self._bad, self._declines,
                self._hangs_up, self._leaves, self._ignores]  # fmt: skip

    def _payload(self, pull: pb.Pull) -> bytes:
        return self.encode(vector_for(pull.fragment, self.num_elements(pull.fragment), 3))

    async def _right(self, pull: pb.Pull) -> None:
        await self.push(pull)

    async def _twice(self, pull: pb.Pull) -> None:
        await asyncio.gather(*(self.push(pull) for _ in range(3)))

    async def _broken(self, pull: pb.Pull) -> None:
        payload = self._payload(pull)
        call = self.fleet.stub.Push()
        await call.write(pb.PushRequest(header=self.header_for(pull, payload)))
        await call.write(chunk_at(payload, 0, self._rng.randrange(len(payload))))
        call.cancel()

    async def _resumed(self, pull: pb.Pull) -> None:
        payload = self._payload(pull)
        header = self.header_for(pull, payload)
        answer = await self.send(header, payload[: self._rng.randrange(len(payload))], 5)
        while answer.outcome == RESUME:
            header.offset_bytes = answer.staged_bytes
            answer = await self.send(header, payload, 7)

    async def _bad(self, pull: pb.Pull) -> None:
        vector = torch.full((self.num_elements(pull.fragment),), float("nan"))
        changes = self._rng.choice([{}, {"base": None}, {"encoding": {"payload_bytes": 3}}])
        await self.push(pull, vector, **changes)

    async def _declines(self, pull: pb.Pull) -> None:
        declined = pb.PullDeclined(global_step=pull.global_step, fragment=pull.fragment)
        await self.say(pull_declined=declined)

    async def _hangs_up(self, pull: pb.Pull) -> None:
        self.hang_up()

    async def _leaves(self, pull: pb.Pull) -> None:
        leave = pb.LeaveRequest(learner_id=self.learner_id, incarnation=self.incarnation)
        await self.fleet.stub.Leave(leave)
        self.hang_up()

    async def _ignores(self, pull: pb.Pull) -> None:
        pass


async def train(fleet: Fleet, learner: FakeLearner) -> int:
    """Behaves until enough rounds are there; returns how many of its pushes were accepted."""
    num_accepted = 0
    while fleet.committed < NUM_ROUNDS:
        await learner.step()
        message = await learner.told.get()
        assert isinstance(message, pb.ReportResponse), message
        if message.WhichOneof("kind") == "pull":
            try:
                answer = await learner.push(message.pull)
            except grpc.aio.AioRpcError as error:
                assert error_from_rpc(error).reason is Reason.OUT_OF_MEMORY_BUDGET  # noqa: PT017
                continue
            num_accepted += answer.outcome == ACCEPTED
            assert answer.outcome in {ACCEPTED, DROPPED}, answer
    return num_accepted


@pytest.mark.parametrize("seed", range(3))
async def test_chaos_harms_nobody_and_leaves_nothing_behind(seed: int) -> None:
    settings = make_settings(num_learners=5, push_floor_s=0.1, grace=seed % 2 == 0)
    settings_of = {"settings": settings, "max_staged_bytes": 200}
    async with serving(**settings_of) as fleet:
        (good,) = await fleet.seeded("good")
        watcher = FakeWatcher(fleet).start()
        rng = random.Random(seed)
        crowd = [Chaotic(fleet, f"chaos-{i}", random.Random(rng.random())) for i in range(4)]
        tasks = [asyncio.ensure_future(x.run()) for x in crowd]
        num_accepted = await asyncio.wait_for(train(fleet, good), 60)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for learner in crowd:
            if learner.call is not None:
                learner.hang_up()
        assert all(t.cancelled() for t in tasks), [t for t in tasks if not t.cancelled()]
        assert num_accepted > 0
        await until(lambda: not list(fleet.engine.tickets))
        await until(lambda: set(fleet.engine.streams) == {"good"})
        await until(watcher.follows)
        assert watcher.error is None
        await watcher.stop()
        totals = (await fleet.status()).totals
        assert totals.rounds >= NUM_ROUNDS
        assert totals.contributions == sum(
            i * n for i, n in enumerate(totals.contributors_histogram)
        )
