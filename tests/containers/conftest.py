"""The fleet that all container tests share, in the order of the tests."""

from __future__ import annotations

from pathlib import Path

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

ORDER = ("images", "fleet", "metrics", "chaos", "end", "disks")
"""What is built, what works, what is seen, what is broken; then what changes the fleet for good."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the modules of this folder into their order; a module that has none is an error."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if item.path.parent == here]
    mine = sorted(
        (items[place] for place in places),
        key=lambda item: ORDER.index(item.path.stem.removeprefix("test_container_")),
    )
    for place, item in zip(places, mine, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def fleet() -> ComposeFleet:
    """Redis, two synchronizers, three learners in two datacenters, an evaluator: started."""
    started = ComposeFleet(**SETTINGS)
    started.compose("up", "--detach", "--no-build", "--quiet-pull")
    return started
