"""Simulated fleets of many seeds, second half: a file is one worker's, and there are two."""

from __future__ import annotations

import pytest
from simulation_seeds import NUM_BLOCKS, check_block


@pytest.mark.parametrize("block", range(1, NUM_BLOCKS, 2))
def test_no_invariant_is_broken_in_any_world(block: int) -> None:
    check_block(block)
