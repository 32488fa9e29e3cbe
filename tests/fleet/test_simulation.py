"""Simulated fleets of many seeds: nothing of design section 7 ever happens. First half."""

from __future__ import annotations

import pytest
from simulation_seeds import NUM_BLOCKS, ONCE_BROKEN, check_block

from diloco_fleet.simulation.faults import Profile
from diloco_fleet.simulation.world import World, run_world


@pytest.mark.parametrize("block", range(0, NUM_BLOCKS, 2))
def test_no_invariant_is_broken_in_any_world(block: int) -> None:
    check_block(block)


@pytest.mark.parametrize("seed", ONCE_BROKEN)
def test_worlds_that_were_broken_once_hold(seed: int) -> None:
    run_world(seed)


def test_a_seed_decides_everything() -> None:
    assert run_world(12) == run_world(12)


def test_a_calm_world_loses_nothing_and_has_one_term() -> None:
    seeds = [s for s in range(200) if World(s).profile is Profile.CALM]
    assert seeds
    for outcome in map(run_world, seeds):
        assert (outcome.num_terms, outcome.rounds_lost) == (1, 0)
        assert outcome.participation >= 0.7
