"""The core under random event orders keeps what must never happen (design section 7).

``DILOCO_WORLDS=500 pytest tests/synchronizer/test_core_world.py`` runs more worlds.
"""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
from core_models import Faults, small_settings
from core_world import World

NUM_WORLDS = int(os.environ.get("DILOCO_WORLDS", "30"))


def random_world(seed: int) -> World:
    """A fleet, its settings and its faults, all from one seed."""
    rng = random.Random(seed)
    settings = small_settings(
        num_learners=rng.choice([1, 2, 3, 4, 5]),
        overlap=rng.choice([1, 2, 3]),
        grace=rng.random() < 0.8,
        sync_interval=rng.choice([2, 4, 8]),
        total_global_steps=rng.choice([0, 60, 150]),
    )
    quorum = rng.randint(1, settings.num_learners) if rng.random() < 0.5 else 1
    settings = dataclasses.replace(settings, quorum=quorum)
    level = rng.choice([0.002, 0.01, 0.03])

    def often(factor: float) -> float:
        return level * factor if rng.random() < 0.7 else 0.0

    faults = Faults(
        kill=often(0.5), cut=often(1), freeze=often(1), lose_push=often(5), slow_push=often(5),
        duplicate=often(10), slow_watch=often(10), persist=often(10), restart=often(0.03),
        garbage=often(5), same_digest=often(2), diverge=often(0.5), roll_back=often(1),
    )  # fmt: skip
    step_s = {f"l{i}": rng.choice([0.1, 0.1, 0.2, 1.0]) for i in range(settings.num_learners)}
    return World(settings, seed=seed, step_s=step_s, faults=faults)


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_a_random_world_keeps_the_invariants_and_recovers(seed):
    world = random_world(seed)
    world.run(until=25.0)
    world.heal()
    before, healed_at = world.published, world.now
    world.run(
        until=healed_at + 60.0,
        done=lambda: world.core.state.complete or world.published >= before + 6,
    )
    assert world.core.state.complete or world.published >= before + 6, world.core.waits(world.now)
    if world.core.state.complete:
        world.run(until=world.now + 5.0)
        assert world.published == world.settings.total_global_steps
        assert world.stops == world.completed == 1 or world.term > 1
        for model in world.models.values():
            assert model.base == dict(enumerate(world.core.state.lineage.vector()))


def test_the_random_worlds_reach_every_outcome():
    """A world in which nothing goes wrong would prove nothing."""
    outcomes: set[str] = set()
    seeds = iter(range(1000, 1200))
    wanted = {
        "accepted", "accepted:DUPLICATE", "refused:ALREADY_MERGED", "refused:FENCED",
        "refused:STALE_TERM", "refused:UNKNOWN_LEARNER", "refused:NOT_ASKED", "refused:CORRUPT",
        "refused:MALFORMED", "refused:UNKNOWN_FRAGMENT", "dropped:TOO_LATE", "dropped:NO_PROGRESS",
        "dropped:LEARNER_GONE", "dropped:FENCED", "dropped:NOT_READY", "dropped:TRUNCATED",
        "dropped:STALE_BASE", "dropped:QUARANTINED", "dropped:ROLLED_BACK", "refused:NON_FINITE",
    }  # fmt: skip
    while not wanted <= outcomes:
        seed = next(seeds, None)
        assert seed is not None, f"never seen: {wanted - outcomes}"
        world = random_world(seed)
        world.run(until=15.0)
        outcomes |= set(world.outcomes)


def test_the_same_seed_gives_the_same_world():
    def fingerprint() -> tuple[object, ...]:
        world = random_world(7)
        world.run(until=15.0)
        return tuple(world.records), world.num_events, world.outcomes

    assert fingerprint() == fingerprint()


def mean_participation(world: World) -> float:
    return sum(a / b for a, b in world.participation) / len(world.participation)


def test_undisturbed_at_equal_speeds_all_take_part_and_h_is_as_set():
    world = World(small_settings(sync_interval=24, num_fragments=24), seed=3)
    world.run(until=40.0)
    assert world.published > 300
    assert mean_participation(world) > 0.95
    assert sorted(world.measured_h)[len(world.measured_h) // 2] == pytest.approx(24, rel=0.1)
    assert world.told == []
    assert world.outcomes["accepted"] > 0.98 * sum(world.outcomes.values())


@pytest.mark.parametrize(("slowness", "share"), [(2, 0.4), (20, 0.03)])
def test_a_slow_learner_holds_nobody_and_still_contributes(slowness, share):
    """Slower than 1/H it could not: every fragment would be overwritten within each step."""
    settings = small_settings(sync_interval=24, num_fragments=24)
    step_s = {"l0": 0.1, "l1": 0.1, "l2": 0.1}
    alone = World(settings, seed=5, step_s=step_s)
    alone.run(until=40.0)
    world = World(settings, seed=5, step_s=step_s | {"l3": 0.1 * slowness})
    world.run(until=40.0)
    assert world.published > 0.8 * alone.published
    assert world.contributions["l3"] > share * world.published
    assert world.contributions["l0"] > 0.9 * world.published


def test_the_death_of_all_but_one_does_not_stop_the_fleet():
    world = World(small_settings(), seed=6)
    world.run(until=10.0)
    for name in ("l1", "l2", "l3"):
        model = world.models[name]
        model.alive, model.epoch, model.stream = False, model.epoch + 1, None  # without a goodbye
    before = world.published
    world.run(until=20.0)
    assert world.published > before + 20
    assert not [e for e in world.told if "l3" in e.detail]
    gaps = [b - a for a, b in zip(world.commit_times, world.commit_times[1:], strict=False)]
    assert max(gaps[5:]) < world.settings.push_timeout_s
