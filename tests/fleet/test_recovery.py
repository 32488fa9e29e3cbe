"""Learners that come back with a peer's inner state: real cores and learners, virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from decoupled_diloco.settings import RunSettings
from diloco_fleet.scripted import ScriptedFleet, scripted_fleet
from diloco_fleet.scripted_data import (
    Advance,
    Join,
    Kill,
    StartSynchronizer,
    Step,
    StopSynchronizer,
)
from diloco_fleet.scripted_learner import FleetSpec, ScriptedLearner
from diloco_fleet.scripted_world import run_in_virtual_time
from learner_client import Learner, State
from learner_client.training_state import TrainingState


def spec(**settings) -> FleetSpec:
    defaults = {"num_learners": 3, "num_fragments": 6, "sync_interval": 6, "startup_wait_s": 1.0}
    return FleetSpec(seed=5, settings=RunSettings(**(defaults | settings)), recover="peer")


def play(story: Callable[[ScriptedFleet], Awaitable[None]], of: FleetSpec | None = None) -> None:
    async def main() -> None:
        async with scripted_fleet(of or spec()) as fleet:
            await story(fleet)

    run_in_virtual_time(main())


async def train(fleet: ScriptedFleet, count: int, *learners: int) -> None:
    for _ in range(count):
        for index in learners:
            await fleet.apply(Step(learner=index))
        await fleet.apply(Advance(seconds=1.0))


async def begin(fleet: ScriptedFleet, *learners: int) -> None:
    """They join and train until some rounds are merged."""
    for index in learners:
        await fleet.apply(Join(learner=index))
    await train(fleet, 8, *learners)
    assert fleet.synchronizer.engine.core.state.committed > 0


def moments(scripted: ScriptedLearner) -> dict[str, torch.Tensor]:
    return scripted.inner_state.capture()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def joining(fleet: ScriptedFleet, index: int) -> ScriptedLearner:
    return fleet._joining[index][0]


def test_a_recovered_learner_has_the_moments_that_its_donor_had_when_it_copied():
    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1)
        await fleet.apply(Join(learner=2))
        assert 2 not in fleet.learners
        status = joining(fleet, 2).learner.status
        assert (status.state, status.reason) == (State.SYNCING, "recovering")
        assert "attempt 1 of 3" in status.detail
        (wait,) = [
            w for w, _ in fleet.synchronizer.engine.core.waits(0.0) if "recovery" in w.subject
        ]
        assert wait.detail == "learner-0 copies its inner state at its next inner step"
        await fleet.apply(Step(learner=0))
        new, donor = fleet.learners[2], fleet.learners[0]
        assert moments(new)
        assert same(moments(new), moments(donor))
        assert new.learner.status.state is State.TRAINING
        await fleet.apply(Step(learner=0))
        assert not same(moments(new), moments(donor))

    play(story)


def test_its_first_contributions_have_small_weight_and_its_parameters_are_the_published_ones():
    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1)
        await fleet.apply(Join(learner=2))
        await fleet.apply(Step(learner=0))
        learner = fleet.learners[2].learner
        counters = learner._exchange.core.counters
        assert [counters.of(p).num_steps for p in range(6)] == [0] * 6
        layout, bases = learner._exchange.layout, learner._exchange.bases
        for fragment in layout.fragments:
            out = torch.empty(fragment.num_elements)
            learner._parameters.read_fragment(fragment, out)
            assert torch.equal(out, bases[fragment.index])
        before = len(fleet.store.records)
        await train(fleet, 4, 0, 1, 2)
        records = [r for r in fleet.store.records[before:] if len(r.contributions) == 3]
        weights = {c.learner_id: c.weight for c in records[0].contributions}
        assert weights["learner-2"] < min(weights["learner-0"], weights["learner-1"])

    play(story)


def test_in_a_fresh_fleet_nobody_is_asked_and_it_is_said_once(caplog):
    caplog.set_level(logging.INFO, "learner_client")

    async def story(fleet: ScriptedFleet) -> None:
        for index in range(3):
            await fleet.apply(Join(learner=index))
        assert sorted(fleet.learners) == [0, 1, 2]

    play(story)
    lines = [r for r in caplog.records if "published parameters alone" in r.getMessage()]
    # The first seeds the run, and has nobody to ask.
    assert [r.levelname for r in lines] == ["INFO", "INFO"]
    assert all("NO_DONOR" in r.getMessage() for r in lines)


def test_a_donor_that_dies_is_replaced_and_with_no_donor_left_it_begins_without(caplog):
    caplog.set_level(logging.INFO, "learner_client")

    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1)
        await fleet.apply(Join(learner=2))
        await fleet.apply(Kill(learner=0))
        assert 2 not in fleet.learners
        await fleet.apply(Step(learner=1))
        assert same(moments(fleet.learners[2]), moments(fleet.learners[1]))
        await fleet.apply(Join(learner=0))
        await fleet.apply(Kill(learner=1))
        await fleet.apply(Kill(learner=2))
        await fleet.apply(Advance(seconds=1.0))
        assert moments(fleet.learners[0]) == {}

    play(story)
    assert "begins with the published parameters alone: NO_DONOR" in caplog.text


def test_donors_that_never_step_are_not_waited_for_without_end(caplog):
    caplog.set_level(logging.INFO, "learner_client")

    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1)
        await fleet.apply(Join(learner=2))
        await fleet.apply(Advance(seconds=100.0))
        assert moments(fleet.learners[2]) == {}
        await train(fleet, 2, 0, 1, 2)

    play(story)
    assert "begins with the published parameters alone" in caplog.text


def test_a_state_that_does_not_fit_is_tried_again_and_then_given_up(caplog):
    caplog.set_level(logging.INFO, "learner_client")

    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1)
        for index in (0, 1):
            inner = fleet.learners[index].learner._inner._inner_state
            inner._optimizer.state[next(iter(inner._optimizer.state))]["exp_avg"].fill_(
                float("nan")
            )
        await fleet.apply(Join(learner=2))
        for _ in range(4):
            for index in (0, 1):
                fleet.learners[index].learner.step(num_tokens=1)
                await fleet.apply(Advance(seconds=0.0))
        assert moments(fleet.learners[2]) == {}

    play(story)
    assert caplog.text.count("recovery failed: NON_FINITE") == 3
    assert "begins with the published parameters alone: NON_FINITE" in caplog.text


def test_a_donor_whose_copy_fails_trains_on_and_the_next_is_asked(caplog):
    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1)

        def fail() -> dict[str, torch.Tensor]:
            raise RuntimeError("no memory")

        fleet.learners[0].inner_state.capture = fail
        await fleet.apply(Join(learner=2))
        await fleet.apply(Step(learner=0))
        await fleet.apply(Step(learner=1))
        assert same(moments(fleet.learners[2]), moments(fleet.learners[1]))
        await train(fleet, 1, 0, 1, 2)

    play(story)
    assert "learner-0: the inner state could not be copied" in caplog.text


def test_two_learners_recover_at_once():
    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1)
        await fleet.apply(Join(learner=2))
        await fleet.apply(Join(learner=3))
        await fleet.apply(Step(learner=0))
        await fleet.apply(Step(learner=1))
        assert same(moments(fleet.learners[2]), moments(fleet.learners[0]))
        assert same(moments(fleet.learners[3]), moments(fleet.learners[1]))

    play(story, spec(num_learners=4, startup_wait_s=1.0))


PHASES = ["joining", "syncing", "recovering", "training"]


@pytest.mark.parametrize("mode", ["params", "peer", "checkpoint"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_learner_killed_in_any_phase_comes_back_in_any_mode(phase, mode, monkeypatch):
    """A checkpoint here is what the learner captured after its last step, as a file would hold."""
    saved: list[TrainingState] = []

    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1, 2)
        scripted = fleet.learners[2]
        saved.append(
            TrainingState.capture(scripted.model, scripted.inner_state, scripted.learner, {})
        )
        last_step = scripted.learner.local_step
        await fleet.apply(Kill(learner=2))
        await train(fleet, 2, 0, 1)
        with monkeypatch.context() as patch:
            _stop_at(patch, phase)
            await fleet.apply(Join(learner=2))
            if phase == "training":
                await train(fleet, 2, 0, 1)
            else:
                expected = State.JOINING if phase == "joining" else State.SYNCING
                assert _learner(fleet, 2).status.state is expected
        await fleet.apply(Kill(learner=2))
        await train(fleet, 2, 0, 1)
        fleet.spec = dataclasses.replace(fleet.spec, recover=mode)
        with monkeypatch.context() as patch:
            if mode == "checkpoint":
                _load_first(patch, saved[0])
            await fleet.apply(Join(learner=2))
            await fleet.apply(Step(learner=0))
            await fleet.apply(Step(learner=1))
        back = fleet.learners[2]
        if mode == "params":
            assert moments(back) == {}
        elif mode == "checkpoint":
            assert same(moments(back), saved[0].inner)
        else:
            assert any(same(moments(back), moments(fleet.learners[i])) for i in (0, 1))
        assert back.learner.local_step >= last_step
        await train(fleet, 6, 0, 1, 2)
        latest = fleet.store.records[-1]
        assert {c.learner_id for c in latest.contributions} == {f"learner-{i}" for i in range(3)}

    play(story)


def _learner(fleet: ScriptedFleet, index: int) -> Learner:
    joining_ones = {i: scripted for i, (scripted, _) in fleet._joining.items()}
    return (joining_ones | fleet.learners)[index].learner


def _stop_at(patch: pytest.MonkeyPatch, phase: str) -> None:
    """The connection of whoever joins lets nothing through from this phase on."""
    original = ScriptedLearner.join

    async def join(self: ScriptedLearner, part: Path | None = None) -> None:
        if phase == "joining":
            await self.line.cut()
        elif phase == "syncing":
            self.line.watch = lambda _request: _silence()
        elif phase == "recovering":
            self.line.recover = lambda _requests: _silence()
        await original(self, part)

    patch.setattr(ScriptedLearner, "join", join)


def _load_first(patch: pytest.MonkeyPatch, state: TrainingState) -> None:
    """Whoever joins goes on from this state."""
    original = ScriptedLearner.join

    async def join(self: ScriptedLearner, part: Path | None = None) -> None:
        state.restore(self.model, self.inner_state, self.learner)
        await original(self, part)

    patch.setattr(ScriptedLearner, "join", join)


async def _silence():
    """A stream of updates on which nothing comes."""
    await asyncio.Event().wait()
    yield


def test_a_synchronizer_that_restarts_in_the_middle_does_not_strand_the_learner():
    async def story(fleet: ScriptedFleet) -> None:
        await begin(fleet, 0, 1)
        await fleet.apply(Join(learner=2))
        await fleet.apply(StopSynchronizer())
        await train(fleet, 1, 0, 1)
        await fleet.apply(StartSynchronizer())
        await fleet.apply(Advance(seconds=10.0))
        await train(fleet, 4, 0, 1)
        assert 2 in fleet.learners
        await train(fleet, 2, 0, 1, 2)

    play(story)
