"""A whole fleet in one event loop, with the synchronizer that ships: the same every time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch
from torch import nn

from decoupled_diloco.settings import RunSettings
from learner_client import Learner, Runtime
from learner_client.transport import InMemoryTransport
from synchronizer_server.assembly import Outside, assemble
from synchronizer_server.core import events as ev
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.runner import InlineRunner
from synchronizer_server.service.synchronizer import SynchronizerService
from synchronizer_server.store.memory import MemoryStore

STEP_S = 0.1
TURNS = 300
"""Turns of the loop after which everything that one step set off has happened, by far."""


def make_model(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Embedding(16, 8)]
    for _ in range(4):
        layers += [nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 16)).to(dtype)


class Trainee:
    """A learner with its own data; every ``period`` ticks it completes a step."""

    def __init__(self, service, index: int, period: int, dtype: torch.dtype) -> None:
        self.model = make_model(index, dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.data = torch.Generator().manual_seed(index)
        self.period = period
        self.losses: list[float] = []
        self.learner = Learner(
            self.model,
            learner_id=f"learner-{index}",
            transport=lambda: InMemoryTransport(service),
            runtime=Runtime.scripted(index),
        )

    def step(self) -> None:
        tokens = torch.randint(0, 16, (32,), generator=self.data)
        logits = self.model(tokens).float()
        loss = nn.functional.cross_entropy(logits, (tokens * 3 + 1) % 16)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.learner.step(num_tokens=32, loss=loss.item())


async def fleet(dtype: torch.dtype, periods: tuple[int, ...], num_ticks: int):
    now = [0.0]
    settings = RunSettings(num_learners=len(periods), num_fragments=5, sync_interval=5, overlap=2)
    outside = Outside(
        store=MemoryStore(),
        membership=MemoryMembership(lambda: now[0]),
        tensors_runner=InlineRunner(),
        store_runner=InlineRunner(),
        clock=lambda: now[0],
    )
    assembled = await assemble(settings, outside, max_staged_bytes=1 << 24)
    engine = assembled.engine
    service = SynchronizerService(engine, assembled.joins)
    trainees = [Trainee(service, i, period, dtype) for i, period in enumerate(periods)]
    async with contextlib.AsyncExitStack() as stack:
        for trainee in trainees:
            await stack.enter_async_context(trainee.learner)
        for tick in range(1, num_ticks + 1):
            now[0] += STEP_S
            for trainee in trainees:
                if tick % trainee.period == 0:
                    trainee.step()
            for _ in range(TURNS):
                await asyncio.sleep(0)
            # The last moment before the next tick: whatever waits for time, gets it.
            engine.handle(ev.Tick())
            for _ in range(TURNS):
                await asyncio.sleep(0)
        for trainee in trainees:
            trainee.step()
        held = [
            {p: v.digest for p, v in trainee.learner._exchange.core.versions.items()}
            for trainee in trainees
        ]
        published = {p: v.digest for p, v in enumerate(engine.updates.versions())}
        statuses = [trainee.learner.status for trainee in trainees]
    return published, held, statuses, [t.losses for t in trainees], engine


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_fleet_learns_and_every_learner_holds_what_is_published(dtype):
    published, held, statuses, losses, engine = await fleet(dtype, (1, 1, 2), 150)
    assert engine.core.state.committed > 20
    assert held == [published] * 3
    for status in statuses:
        assert status.num_digest_mismatches == 0
        assert status.pushes["ACCEPTED"] > 5
    assert all(sum(own[-10:]) < 0.5 * sum(own[:10]) for own in losses)


@pytest.mark.asyncio
async def test_two_fleets_with_one_seed_and_one_schedule_are_the_same_bit_for_bit():
    first = await fleet(torch.float32, (1, 1, 3), 60)
    second = await fleet(torch.float32, (1, 1, 3), 60)
    assert first[:2] == second[:2]
    assert first[3] == second[3]
    assert first[4].core.state.committed == second[4].core.state.committed > 10
