"""Runs a share of the seeds of continuous integration; each file beside it is one worker's."""

from __future__ import annotations

from diloco_fleet.simulation.world import Outcome, run_world

NUM_SEEDS = 2000
NUM_BLOCKS = 20
ONCE_BROKEN = (1006007, 1012802, 1044396, 1095101, 1099758)
"""Seeds beyond them in which an invariant was broken before."""


def run_block(block: int) -> list[Outcome]:
    """Runs one block of seeds; a world that fails says its seed and how to see it again."""
    size = NUM_SEEDS // NUM_BLOCKS
    return [run_world(seed) for seed in range(block * size, (block + 1) * size)]


def check_block(block: int) -> None:
    """No invariant was broken, and the faults were there: a fleet left alone proves nothing."""
    outcomes = run_block(block)
    assert len(outcomes) == NUM_SEEDS // NUM_BLOCKS
    assert sum(x.num_rounds for x in outcomes) > 5 * len(outcomes)
    assert sum(x.num_terms for x in outcomes) > len(outcomes), "hardly a take-over"
    faults = sum(n for x in outcomes for k, n in x.tally.items() if "_at_" in k or "fault" in k)
    assert faults > len(outcomes), "hardly a fault"
