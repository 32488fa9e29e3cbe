"""A leader and a standby that die in the middle of the protocol: no published round is lost.

The tests share one fleet with a standby and run in order; each begins with a standby in sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fault_script import FaultScript
from fleet_harness import Fleet, between, small

from decoupled_diloco.fault_points import Fault, FaultPoint
from diloco_fleet.lineage import leaderships, lost_rounds

pytestmark = pytest.mark.integration

LEARNERS = 2
LEADER = (
    FaultPoint.BEFORE_PERSIST,
    FaultPoint.MID_REPLICATE,
    FaultPoint.BEFORE_PUBLISH,
)
FOLLOWER = (FaultPoint.MID_REPLICATE, FaultPoint.BEFORE_ACKNOWLEDGE)


@dataclass(frozen=True)
class Struck:
    """A fleet, its script, and its faults by role and point."""

    fleet: Fleet
    faults: FaultScript
    at: dict[tuple[str, FaultPoint], Fault]


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    folder = tmp_path_factory.mktemp("failover-points")
    faults = FaultScript(folder)
    at = {("leader", point): faults.at(point) for point in LEADER}
    at |= {("follower", point): faults.at(point) for point in FOLLOWER}
    fleet = Fleet(
        folder,
        *("--learners", str(LEARNERS), "--global-steps", "0", "--pace", "0.1"),
        *("--replication", "one", "--evaluate-every", "1000"),
        settings=small() + "restart_wait_s = 0.5\nmax_restarts = 1000\n",
        standby=True,
        faults=faults,
    )
    try:
        yield Struck(fleet, faults, at)
    finally:
        fleet.close()


def settle(fleet: Fleet) -> str:
    """Waits until rounds go on with a standby in sync; returns who leads."""
    fleet.wait_for_rounds(4)
    fleet.wait_until(fleet.in_sync, "a standby in sync")
    return fleet.wait_until(fleet.leader, "a leader")


def wait_for_merges(fleet: Fleet, when: float, term: int = 0) -> None:
    """Waits until every learner contributes to rounds of a term, or later, after a time."""

    def helpers() -> set[str]:
        rounds = [x for x in fleet.rounds() if x["time"] > when and x["term"] >= term]
        return {name for line in rounds for name in line["contributors"]}

    fleet.wait_until(lambda: len(helpers()) == LEARNERS, "everybody to contribute again")


def assert_nothing_lost_or_doubled(fleet: Fleet) -> None:
    metrics = fleet.metrics()
    assert not lost_rounds(metrics.rounds, leaderships(metrics), metrics.steps)
    applied = {x for steps in metrics.steps.values() for step in steps for x in step.applied}
    named = {(x.fragment, x.global_step) for x in applied}
    assert len(named) == len(applied), "all learners applied one version of every global step"


@pytest.mark.parametrize("point", LEADER)
def test_the_standby_takes_over_from_a_leader_that_dies(struck: Struck, point: FaultPoint) -> None:
    fleet = struck.fleet
    leader = settle(fleet)
    term = fleet.rounds()[-1]["term"]
    hit = struck.faults.strike(fleet, struck.at["leader", point], leader)
    assert hit["process"] == leader
    fleet.hold_back(leader, hit["pid"])
    wait_for_merges(fleet, hit["time"], term + 1)
    change = next(x for x in leaderships(fleet.metrics()) if x.term > term)
    assert change.synchronizer != leader
    fleet.thaw(leader)
    assert between(fleet.steps(0), hit["time"], fleet.rounds()[-1]["time"]), "training goes on"
    assert_nothing_lost_or_doubled(fleet)


@pytest.mark.parametrize("point", FOLLOWER)
def test_a_standby_that_dies_costs_nothing(struck: Struck, point: FaultPoint) -> None:
    fleet = struck.fleet
    leader = settle(fleet)
    term = fleet.rounds()[-1]["term"]
    follower = next(name for name in fleet.synchronizers if name != leader)
    hit = struck.faults.strike(fleet, struck.at["follower", point], follower)
    wait_for_merges(fleet, hit["time"])
    assert settle(fleet) == leader, "it leads on, and the standby is in sync again"
    assert fleet.rounds()[-1]["term"] == term
    assert_nothing_lost_or_doubled(fleet)


def test_the_report_tells_all_of_it(struck: Struck) -> None:
    struck.faults.assert_all_hit()
    struck.fleet.interrupt()
    assert struck.fleet.wait() == 143, struck.fleet.text()
    assert not struck.fleet.pids()
    report = struck.fleet.report()
    assert report["rounds_lost"] == 0
    assert len(report["leader_changes"]) >= len(LEADER)
