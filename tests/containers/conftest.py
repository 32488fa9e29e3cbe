"""The fleet that all container tests share, in the order of the tests."""

from __future__ import annotations

import pytest

from tests.containers.compose_fleet import ComposeFleet

SETTINGS = {
    "DILOCO_NUM_LEARNERS": 3,
    "DILOCO_TOTAL_GLOBAL_STEPS": 0,
    "DILOCO_BATCH_SIZE": 2,
    "DILOCO_SEQUENCE_LENGTH": 64,
    "PACE": 0.3,
    "EVALUATE_EVERY": 100,
}
"""Small steps at an even pace, so that two cores carry the fleet; the run has no end."""


@pytest.fixture(scope="session")
def fleet() -> ComposeFleet:
    """Redis, two synchronizers, three learners in two datacenters, an evaluator: started."""
    started = ComposeFleet(**SETTINGS)
    started.compose("up", "--detach", "--no-build", "--quiet-pull")
    return started
