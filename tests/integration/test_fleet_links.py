"""A fleet whose links are cut, delayed and healed: who is cut off is left out and comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet_harness import Lines, between, small
from wired_fleet import WiredFleet

from diloco_fleet.chaos.proxy import Cut
from diloco_fleet.lineage import leaderships, lost_rounds

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredFleet]:
    settings = {"num_learners": 2, "total_global_steps": 0, "pace": 0.1, "evaluate_every": 1000}
    fleet = WiredFleet(tmp_path_factory.mktemp("links"), settings, small())
    try:
        yield fleet
    finally:
        fleet.close()


def with_learner_1(rounds: Lines) -> Lines:
    return [line for line in rounds if "learner-1" in line["contributors"]]


def states(fleet: WiredFleet, since: float) -> list[str]:
    """What the synchronizer wrote about learner-1 after a time."""
    lines = fleet.lines("synchronizer", "learner")
    return [x["state"] for x in lines if x["learner_id"] == "learner-1" and x["time"] > since]


@pytest.mark.parametrize(
    ("how", "noticed"), [(Cut.BLACKHOLE, {"gone"}), (Cut.RESET, {"disconnected", "gone"})]
)
def test_a_learner_that_is_cut_off_trains_on_and_comes_back(
    fleet: WiredFleet, how: Cut, noticed: set[str]
) -> None:
    fleet.wait_until(lambda: with_learner_1(fleet.rounds()), "learner-1 to contribute")
    cut = fleet.rounds()[-1]["time"]
    fleet.cut("learner-1", "synchronizer", how)
    fleet.wait_until(lambda: noticed & set(states(fleet, cut)), "its silence to be noticed")
    alone = fleet.wait_for_rounds(6)
    assert all(line["live"] == ["learner-0"] for line in alone[1:]), "the other one merges on"
    assert between(fleet.steps(1), alone[0]["time"], alone[-1]["time"]), "it trains on"
    fleet.heal("learner-1", "synchronizer")
    healed = alone[-1]["time"]

    def back() -> Lines:
        return with_learner_1([x for x in fleet.rounds() if x["time"] > healed])

    fleet.wait_until(back, "learner-1 to contribute again")
    restarts = [entry.restarts for entry in fleet.state().processes]
    assert not any(restarts), "no process died of it"


def test_a_delayed_link_loses_nothing_and_nothing_is_lost_by_all_of_it(fleet: WiredFleet) -> None:
    fleet.delay("learner-1", "synchronizer", 0.05)
    before = len(with_learner_1(fleet.rounds()))
    fleet.wait_until(
        lambda: len(with_learner_1(fleet.rounds())) > before + 4, "learner-1 to contribute slowly"
    )
    fleet.heal("learner-1", "synchronizer")
    assert fleet.drain().word == "drained"
    metrics = fleet.metrics()
    assert not lost_rounds(metrics.rounds, leaderships(metrics), metrics.steps)
    assert [x.global_step for x in metrics.rounds] == list(range(1, len(metrics.rounds) + 1))
    assert not fleet.pids()
