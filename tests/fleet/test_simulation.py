"""Simulated fleets of many seeds: nothing of design section 7 ever happens. First half."""

from __future__ import annotations

import pytest
from simulation_seeds import NUM_BLOCKS, check_block

from diloco_fleet.simulation.faults import Profile
from diloco_fleet.simulation.world import World, run_world

FOUND = {
    155: "two processes were granted one term by a keeper that was emptied in between",
    195: "a leader of a lower term led on, since nobody told it of the later one",
    1065: "a grant of the keeper came into being after the leader had granted by itself",
    1168: "a seed was marked that was never published, and the standby could not lead",
    2383: "the same, with a single crash",
    2714: "the same, with a single crash",
    2715: "a round that a take-over lost hid from learners what they were asked for",
    4306: "a term was granted, never begun and forgotten; who was granted it followed nobody",
}


@pytest.mark.parametrize("block", range(0, NUM_BLOCKS, 2))
def test_no_invariant_is_broken_in_any_world(block: int) -> None:
    check_block(block)


@pytest.mark.parametrize("seed", FOUND)
def test_worlds_in_which_faults_were_found(seed: int) -> None:
    run_world(seed)


def test_a_seed_decides_everything() -> None:
    assert run_world(12) == run_world(12)


def test_a_calm_world_loses_nothing_and_has_one_term() -> None:
    seeds = [s for s in range(200) if World(s).profile is Profile.CALM]
    assert seeds
    for outcome in map(run_world, seeds):
        assert (outcome.num_terms, outcome.rounds_lost) == (1, 0)
        assert outcome.participation >= 0.7
