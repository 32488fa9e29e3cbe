"""A whole scripted fleet: what a schedule decides, it decides bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.layout import Layout
from decoupled_diloco.settings import RunSettings
from diloco_fleet.scripted import run_fleet, scripted_fleet
from diloco_fleet.scripted_data import (
    Advance,
    FleetResult,
    Join,
    Kill,
    Leave,
    StartSynchronizer,
    Step,
    StopSynchronizer,
    rough_schedule,
    steady_schedule,
)
from diloco_fleet.scripted_learner import FleetSpec, token_batch
from diloco_fleet.scripted_world import run_in_virtual_time
from learner_client import ModuleParameters

ROOT = Path(__file__).resolve().parents[2]


def fleet_of(num_learners: int, seed: int = 5, **settings) -> FleetSpec:
    defaults = {"num_learners": num_learners, "num_fragments": 6, "sync_interval": 6}
    return FleetSpec(seed=seed, settings=RunSettings(**(defaults | settings)))


SPEC = fleet_of(3)
TICK = (Advance(seconds=1.0),)


def ticks(count: int, *learners: int) -> tuple[Step | Advance, ...]:
    return (*(Step(learner=i) for i in learners), *TICK) * count


ROUGH = (
    *(Join(learner=i) for i in range(3)),
    *ticks(5, 0, 1, 2),
    Kill(learner=1),
    *ticks(4, 2, 0),
    StopSynchronizer(),
    *ticks(3, 0, 2),
    StartSynchronizer(),
    *ticks(4, 0, 2),
    Join(learner=1),
    *ticks(3, 1, 2, 0),
    StopSynchronizer(drain=True),
    StartSynchronizer(),
    *ticks(8, 0, 1, 2),
)
"""A death, a return, a kill and a drain of the synchronizer."""


@pytest.fixture(scope="module")
def rough() -> FleetResult:
    return run_fleet(SPEC, ROUGH)


def check_lineage(result: FleetResult) -> None:
    """No round twice, none left out, and everybody there holds the published copy."""
    assert [x.global_step for x in result.rounds] == list(range(1, len(result.rounds) + 1))
    assert all(a.term <= b.term for a, b in pairwise(result.rounds))
    for number, version in enumerate(result.versions):
        newest = [x for x in result.rounds if x.fragment == number]
        if newest:
            assert version == f"{newest[-1].term}.{newest[-1].global_step}"
            assert result.published_sha256[number] == newest[-1].result_sha256


def test_an_undisturbed_fleet_has_everybody_in_every_round_and_h_as_set():
    result = run_fleet(fleet_of(4), steady_schedule(4, 24))
    names = tuple(f"learner-{i}" for i in range(4))
    assert result.participation == 1.0
    assert result.measured_h == pytest.approx(6.0)
    assert {x.contributors for x in result.rounds} == {names}
    assert len(result.rounds) == 24
    for x in result.rounds:
        assert x.dropped == {}
        assert x.weights == tuple(n * n / s for n, s in zip(x.num_tokens, x.num_steps, strict=True))
    check_lineage(result)
    for learner in result.learners:
        assert learner.published_sha256 == result.published_sha256
        assert learner.pushes == {"ACCEPTED": 24}
    assert len({x.model_sha256 for x in result.learners}) == 4, "learners train on their own data"


def test_the_same_seed_and_schedule_give_the_same_bits_through_deaths_and_restarts(rough):
    again = run_fleet(SPEC, ROUGH)
    assert again == rough
    assert again.sha256 == rough.sha256


def test_what_a_rough_schedule_must_keep(rough):
    result = rough
    check_lineage(result)
    assert [x.term for x in result.rounds][-1] == 3
    assert {x.term for x in result.rounds} == {1, 2, 3}
    for x in result.rounds:
        assert x.weights == tuple(n * n / s for n, s in zip(x.num_tokens, x.num_steps, strict=True))
    dead, *alive = result.learners
    assert [x.is_present for x in result.learners] == [False, True, True, True]
    assert (dead.learner_id, dead.incarnation) == ("learner-1", "1.1")
    assert dead.local_step == 5
    back = alive[1]
    assert back.learner_id == "learner-1"
    assert back.incarnation > dead.incarnation
    assert back.local_step == 5 + 3 + 8 + 1, "its data goes on where it was"
    for learner in alive:
        assert learner.published_sha256 == result.published_sha256
    assert alive[0].changes[-1].endswith("training online")
    assert sum("offline DRAINING" in x for x in alive[0].changes) == 1
    assert sum("offline UNAVAILABLE" in x for x in alive[0].changes) == 1
    while_dead = [x for x in result.rounds if "learner-1" not in x.contributors]
    assert while_dead, "the others went on without it"
    assert "learner-1" in result.rounds[-1].contributors
    assert set(result.rounds[-1].contributors) == {"learner-0", "learner-1", "learner-2"}


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param((replace(SPEC, seed=6), ROUGH), id="seed"),
        pytest.param((replace(SPEC, learning_rate=3.1e-3), ROUGH), id="learning-rate"),
        pytest.param((SPEC, (*ROUGH[:3], *TICK, ROUGH[3], *ROUGH[4:6], *ROUGH[6:])), id="order"),
        pytest.param((SPEC, (*ROUGH, Step(learner=0))), id="one-more-step"),
    ],
)
def test_another_seed_or_another_schedule_gives_another_result(changed, rough):
    assert run_fleet(*changed).sha256 != rough.sha256


def test_a_straggler_contributes_with_its_own_weight_and_holds_nobody():
    result = run_fleet(SPEC, steady_schedule(3, 36, every=(1, 1, 2)))
    slow = [
        (x.weights[i], x.num_tokens[i], x.num_steps[i])
        for x in result.rounds
        for i, name in enumerate(x.contributors)
        if name == "learner-2"
    ]
    assert slow, "it still contributes"
    assert all(weight == tokens**2 / steps for weight, tokens, steps in slow)
    full = [x for x in result.rounds[12:] if len(x.contributors) == 3]
    assert full
    for x in full:
        assert x.num_steps[2] < x.num_steps[0]
        assert x.weights[2] < x.weights[0], "fewer tokens weigh less"
    # The first round of a run waits for everybody's first step: one tick more.
    assert len(result.rounds) == 35, "a round per step of the fast ones"
    assert result.learners[2].local_step == 18 + 1
    check_lineage(result)


def test_losses_fall():
    result = run_fleet(SPEC, steady_schedule(3, 60))
    for learner in result.learners:
        first, last = learner.losses[:6], learner.losses[-6:]
        assert sum(last) / 6 < sum(first) / 6 - 0.3


def test_batches_of_different_sizes_weigh_as_tokens_squared_over_steps():
    spec = replace(fleet_of(2), batch_sizes=(2, 4))
    result = run_fleet(spec, steady_schedule(2, 12))
    for x in result.rounds:
        assert x.num_tokens[1] == 2 * x.num_tokens[0]
        assert x.weights[1] == 4 * x.weights[0]


def test_a_fleet_of_one_publishes_what_its_learner_has():
    """RDA, learning rate 1, no momentum, lossless: the published copy is the local fragment."""
    spec = fleet_of(
        1,
        codec_up="fp32",
        codec_down="fp32",
        outer_learning_rate=1.0,
        outer_momentum=0.0,
    )

    async def main() -> int:
        async with scripted_fleet(spec) as fleet:
            await fleet.apply(Join(learner=0))
            model = fleet.learners[0].model
            parameters = ModuleParameters(model)
            num_seen = 0
            for _ in range(12):
                await fleet.apply(Step(learner=0))
                engine = fleet.synchronizer.engine
                layout: Layout = engine.layout
                newest = fleet.store.records[-1]
                assert newest.global_step == num_seen + 1, "one round per step"
                fragment = layout.fragments[newest.fragment]
                local = torch.empty(fragment.num_elements)
                parameters.read_fragment(fragment, local)
                published = engine.updates.published(newest.fragment)
                torch.testing.assert_close(published, local, rtol=1e-5, atol=1e-7)
                num_seen += 1
                await fleet.apply(Advance(seconds=1.0))
            return num_seen

    assert run_in_virtual_time(main()) == 12


def test_a_run_with_an_end_ends_for_everybody():
    result = run_fleet(fleet_of(3, total_global_steps=8), steady_schedule(3, 12))
    assert len(result.rounds) == 8
    for learner in result.learners:
        assert learner.published_sha256 == result.published_sha256


def test_a_goodbye_is_noticed_at_once_and_the_last_learner_may_be_any():
    schedule = (
        *(Join(learner=i) for i in range(4)),
        *ticks(4, 0, 1, 2, 3),
        Leave(learner=0),
        Kill(learner=1),
        Kill(learner=2),
        *ticks(6, 3),
        Join(learner=0),
        *ticks(6, 0, 3),
    )
    result = run_fleet(fleet_of(4), schedule)
    assert [x.contributors for x in result.rounds[4:10]] == [("learner-3",)] * 6
    assert result.rounds[-1].contributors == ("learner-0", "learner-3")
    assert result.participation == 1.0, "the dead are not counted as live"


def test_a_learner_trains_on_while_nobody_answers():
    async def main() -> None:
        async with scripted_fleet(SPEC) as fleet:
            await fleet.apply(Join(learner=0))
            await fleet.apply(StopSynchronizer())
            learner = fleet.learners[0].learner
            before = learner.local_step
            for action in ticks(20, 0):
                await fleet.apply(action)
            assert not learner.status.online
            assert learner.local_step == before + 20
            await fleet.apply(StartSynchronizer())
            await fleet.apply(Advance(seconds=60.0))
            assert learner.status.online
            assert str(learner.incarnation).startswith("2.")

    run_in_virtual_time(main())


def test_after_a_kill_nothing_of_the_dead_synchronizer_reaches_the_store():
    async def main() -> None:
        async with scripted_fleet(SPEC) as fleet:
            runner = fleet.synchronizer.engine.parts.committer.store_runner
            await fleet.apply(StopSynchronizer())
            written: list[str] = []
            done = runner.submit(lambda: written.append("late"))
            await fleet.apply(Advance(seconds=100.0))
            assert written == []
            assert not done.done()

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    ("schedule", "number", "what"),
    [
        ((Step(learner=0),), 1, "learner 0 is not there"),
        ((Join(learner=0), Join(learner=0)), 2, "is there already"),
        ((StopSynchronizer(), StopSynchronizer()), 2, "no synchronizer"),
        ((StopSynchronizer(), Join(learner=0)), 2, "no synchronizer"),
        ((StartSynchronizer(),), 1, "runs already"),
        ((Join(learner=0), Kill(learner=0), Leave(learner=0)), 3, "is not there"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_its_action(schedule, number, what):
    with pytest.raises(UsageError, match=f"action {number} .*{what}") as caught:
        run_fleet(SPEC, schedule)
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_a_learner_too_many_is_refused_with_the_reason_of_the_synchronizer():
    with pytest.raises(DilocoError) as caught:
        run_fleet(fleet_of(1), (Join(learner=0), Join(learner=1)))
    assert caught.value.reason is Reason.NO_SHARD_LEFT


def test_batches_depend_on_seed_shard_and_step_alone():
    batch = token_batch(SPEC, 1, 7)
    assert torch.equal(batch, token_batch(SPEC, 1, 7))
    for other in (
        token_batch(SPEC, 1, 8), token_batch(SPEC, 2, 7), token_batch(replace(SPEC, seed=6), 1, 7),
    ):  # fmt: skip
        assert not torch.equal(batch, other)


def test_two_processes_agree_on_every_bit():
    """Other processes have other addresses and another order of hashes."""
    schedule = rough_schedule(3, 3, 20, fault_rate=0.3)
    assert any(isinstance(x, Kill | StopSynchronizer) for x in schedule)
    ours = run_fleet(SPEC, schedule).sha256
    program = (
        "from decoupled_diloco.settings import RunSettings\n"
        "from diloco_fleet.scripted import run_fleet\n"
        "from diloco_fleet.scripted_learner import FleetSpec\n"
        "from diloco_fleet.scripted_data import rough_schedule\n"
        "settings = RunSettings(num_learners=3, num_fragments=6, sync_interval=6)\n"
        "schedule = rough_schedule(3, 3, 20, fault_rate=0.3)\n"
        "print(run_fleet(FleetSpec(seed=5, settings=settings), schedule).sha256)\n"
    )
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("protos", "."))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ours
