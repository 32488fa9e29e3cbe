"""Processes that die in the middle of the protocol: no published round is lost or doubled.

The tests share one fleet and run in order; each waits until the fleet has recovered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fault_script import FaultScript
from fleet_harness import Fleet, between, small

from decoupled_diloco.fault_points import Fault, FaultPoint
from diloco_fleet.lineage import leaderships, lost_rounds, standing_rounds
from diloco_fleet.metrics import is_synchronizer

pytestmark = pytest.mark.integration

LEARNERS = 2
PLACES = [
    (FaultPoint.BEFORE_PERSIST, "synchronizer"),
    (FaultPoint.AFTER_PERSIST, "synchronizer"),
    (FaultPoint.MID_PUSH, "synchronizer"),
    (FaultPoint.MID_WATCH, "synchronizer"),
    (FaultPoint.MID_PUSH, "learner-1"),
    (FaultPoint.MID_WATCH, "learner-1"),
]


MORE = {FaultPoint.BEFORE_PERSIST: (0,), FaultPoint.AFTER_PERSIST: (1,)}
"""Rounds beyond those written down that are durable at a death; elsewhere one may be under way."""


@dataclass(frozen=True)
class Struck:
    """A fleet, its script, and the fault of every place."""

    fleet: Fleet
    faults: FaultScript
    at: dict[tuple[FaultPoint, str], Fault]


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    folder = tmp_path_factory.mktemp("fault-points")
    faults = FaultScript(folder)
    at = {(point, process): faults.at(point, process=process) for point, process in PLACES}
    fleet = Fleet(
        folder,
        *("--learners", str(LEARNERS), "--global-steps", "0", "--pace", "0.1"),
        *("--evaluate-every", "1000"),
        settings=small(),
        faults=faults,
    )
    try:
        yield Struck(fleet, faults, at)
    finally:
        fleet.close()


def applied(fleet: Fleet) -> list[tuple[int, int, int, str]]:
    """Fragment, term, global step and digest of every version that a learner applied."""
    return [
        tuple(version)
        for index in range(LEARNERS)
        for step in fleet.steps(index)
        for version in step["applied"]
    ]


def assert_one_lineage(fleet: Fleet) -> None:
    """Nothing that a learner applied is lost, every global step has one version, in order."""
    metrics = fleet.metrics()
    terms = leaderships(metrics)
    assert not lost_rounds(metrics.rounds, terms, metrics.steps)
    assert standing_rounds(metrics.rounds, terms) == list(metrics.rounds), "nothing is redone"
    steps = [entry.global_step for entry in metrics.rounds]
    assert steps == sorted(set(steps)), "no global step is merged twice"
    # A line can be missing where its writer died: what a later term rests on was persisted.
    missing = set(range(1, steps[-1] + 1)) - set(steps)
    assert missing <= {entry.global_step for entry in terms}
    versions = set(applied(fleet))
    named = {(fragment, term, step) for fragment, term, step, _ in versions}
    assert len(named) == len(versions), "all learners applied the same bits"


def wait_for_contributions(fleet: Fleet, when: float) -> None:
    """Waits until everybody contributes to rounds that were merged after a time."""

    def helpers() -> set[str]:
        return {name for x in fleet.rounds() if x["time"] > when for name in x["contributors"]}

    fleet.wait_until(lambda: len(helpers()) == LEARNERS, "everybody to contribute again")


def life_after(fleet: Fleet, hit: dict[str, Any]) -> dict[str, Any]:
    def started() -> dict[str, Any] | None:
        lines = fleet.lines(hit["process"], "start")
        return next((line for line in lines if line["time"] > hit["time"]), None)

    return fleet.wait_until(started, f"{hit['process']} to be started again")


@pytest.mark.parametrize(("point", "process"), PLACES)
def test_a_death_in_the_middle_loses_and_doubles_no_round(
    struck: Struck, point: FaultPoint, process: str
) -> None:
    fleet = struck.fleet
    fleet.wait_for_rounds(4)
    fault = struck.at[point, process]
    hit = struck.faults.strike(fleet, fault)
    assert (hit["process"], hit["point"]) == (process, str(point))
    began = life_after(fleet, hit)
    wait_for_contributions(fleet, began["time"])
    trained = between(fleet.steps(0), hit["time"], began["time"])
    assert trained, "the learner that was not struck trains on meanwhile"
    if is_synchronizer(process):
        before = [x["global_step"] for x in fleet.rounds() if x["time"] < hit["time"]]
        assert began["global_step"] - before[-1] in MORE.get(point, (0, 1))
    assert_one_lineage(fleet)


def test_the_report_agrees_and_every_fault_was_hit(struck: Struck) -> None:
    struck.faults.assert_all_hit()
    assert len(struck.faults.hits()) == len(PLACES)
    struck.fleet.interrupt()
    assert struck.fleet.wait() == 143, struck.fleet.text()
    assert not struck.fleet.pids()
    assert_one_lineage(struck.fleet)
    report = struck.fleet.report()
    assert (report["rounds_lost"], report["problems"]) == (0, [])
    assert report["restarts_by_process"] == {"learner-1": 2, "synchronizer": 4}
    assert len(report["leader_changes"]) == 4
