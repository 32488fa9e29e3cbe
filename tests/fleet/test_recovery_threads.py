"""Recovery over gRPC between learners with threads: the donor's training never waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from decoupled_diloco.errors import UsageError
from learner_client import Learner, OptimizerState
from learner_client.transport.calls import num_calls
from tests.synchronizer.fake_learner import Fleet, make_settings, serving

pytestmark = pytest.mark.asyncio


class Watched(OptimizerState):
    """Remembers where and what was captured."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.captured: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.restored: list[Mapping[str, torch.Tensor]] = []

    def capture(self) -> dict[str, torch.Tensor]:
        state = super().capture()
        self.captured.append((threading.get_ident(), state))
        return state

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        super().restore(state)
        self.restored.append(state)


class Trainee:
    """A learner with its own loop in a thread of its own."""

    def __init__(self, fleet: Fleet, name: str, **changes: object) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 12), nn.Linear(12, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.inner = Watched(self.model, self.optimizer)
        self.learner = Learner(
            self.model,
            address=fleet.address,
            learner_id=name,
            inner_state=self.inner,
            join_timeout_s=20.0,
            **changes,
        )
        self.stop = threading.Event()
        self.calls_in_training = -1
        self.num_steps = 0
        self.ident = 0

    def run(self, steps: int | None = None) -> None:
        self.ident = threading.get_ident()
        with self.learner:
            before = num_calls(self.ident)
            while not self.stop.is_set() and self.num_steps != steps:
                loss = self.model(torch.arange(16)).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.learner.step(num_tokens=16, loss=loss.item())
                self.num_steps += 1
                self.stop.wait(0.01)
            self.calls_in_training = num_calls(self.ident) - before


async def test_the_donor_copies_between_two_steps_and_its_training_makes_no_call() -> None:
    settings = make_settings(
        num_learners=2, num_fragments=3, sync_interval=50, overlap=1, startup_wait_s=0.1
    )
    async with serving(settings=settings) as fleet:
        donor = Trainee(fleet, "donor")
        training = asyncio.create_task(asyncio.to_thread(donor.run))
        await fleet.committed_is(3)
        new = Trainee(fleet, "new", recover="peer")
        await asyncio.to_thread(new.run, 3)
        donor.stop.set()
        await training
    ((ident, copied),) = donor.inner.captured
    assert ident == donor.ident
    (received,) = new.inner.restored
    assert received.keys() == copied.keys()
    assert all(torch.equal(received[name], copied[name]) for name in copied)
    assert int(copied["optimizer.1.weight.step"]) > 0
    # Three steps of its own on top of the donor's.
    last = new.inner.capture()["optimizer.1.weight.step"]
    assert last == copied["optimizer.1.weight.step"] + 3
    assert donor.calls_in_training == new.calls_in_training == 0
    assert num_calls() > 0


async def test_with_nobody_to_give_it_trains_all_the_same() -> None:
    settings = make_settings(
        num_learners=2, num_fragments=3, sync_interval=50, overlap=1, startup_wait_s=0.1
    )
    async with serving(settings=settings) as fleet:
        first = Trainee(fleet, "first", recover="peer")
        await asyncio.to_thread(first.run, 20)
        assert first.num_steps == 20
        second = Trainee(fleet, "second", recover="checkpoint")
        await asyncio.to_thread(second.run, 2)
        assert second.num_steps == 2
        assert second.inner.restored == []


@pytest.mark.parametrize(("recover", "inner"), [("peers", True), ("peer", False)])
async def test_a_mode_that_cannot_be_is_refused(recover: str, inner: bool) -> None:
    model = nn.Linear(2, 2)
    state = OptimizerState(model, torch.optim.SGD(model.parameters())) if inner else None
    with pytest.raises(UsageError, match="recover"):
        Learner(model, address="x:1", learner_id="a", inner_state=state, recover=recover)
