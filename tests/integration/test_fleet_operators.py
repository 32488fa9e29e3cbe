"""Operators and deaths together: what was set, leased and put back under one leader holds under
the next.

The tests share one fleet with a standby and leased data, and run in order.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from fleet_harness import Fleet, Lines, diloco, small

from decoupled_diloco.errors import EXIT_TOLD_TO_LEAVE
from diloco_fleet.report import compute_report

pytestmark = pytest.mark.integration

EVERYBODY = {f"learner-{index}" for index in range(3)}
FRAGMENT = 1


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    # A member outlives the leader that heard it: a lease ends well within a heartbeat time-out.
    settings = small().replace("heartbeat_timeout_s = 3.0", "heartbeat_timeout_s = 8.0")
    fleet = Fleet(
        tmp_path_factory.mktemp("operators"),
        *("--learners", "3", "--global-steps", "0", "--pace", "0.1", "--data-mode", "leases"),
        *("--evaluate-every", "100000"),
        settings=settings + "max_restarts = 1000\nrestart_wait_s = 0.5\n",
        standby=True,
    )
    try:
        yield fleet
    finally:
        fleet.close()


def operate(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An operator's command, which succeeds."""
    done = diloco(*arguments, "--run-dir", str(fleet.files.root))
    assert done.returncode == 0, done.stderr
    return done


def settle(fleet: Fleet) -> tuple[str, int]:
    """Waits until rounds go on with a standby in sync; returns who leads, and its term."""
    rounds = fleet.wait_for_rounds(4)
    fleet.wait_until(fleet.in_sync, "a standby in sync")
    return fleet.wait_until(fleet.leader, "a leader"), rounds[-1]["term"]


def rounds_since(fleet: Fleet, when: float, term: int = 0) -> Lines:
    return [x for x in fleet.rounds() if x["time"] > when and x["term"] >= term]


def wait_for_merges(fleet: Fleet, who: set[str], when: float = 0.0, term: int = 0) -> None:
    """Waits until all of these contribute to rounds of a term, or later, after a time."""

    def helpers() -> set[str]:
        return {name for x in rounds_since(fleet, when, term) for name in x["contributors"]}

    fleet.wait_until(lambda: who <= helpers(), f"{', '.join(sorted(who))} to contribute")


def led_by_another(fleet: Fleet, term: int) -> dict[str, Any]:
    """Status of the first leader of a later term, as soon as there is one."""

    def look() -> dict[str, Any] | None:
        status = fleet.status()
        later = status.get("role") == "leading" and int(status["claim"]["term"]) > term
        return status if later else None

    return fleet.wait_until(look, "a leader of a later term")


def states(status: dict[str, Any]) -> dict[str, str]:
    return {entry["learner_id"]: entry["state"] for entry in status["learners"]}


def quorum_wait(fleet: Fleet, *words: str) -> dict[str, Any] | None:
    """The wait for a quorum that says all of this, once the status shows it."""
    waits = [x for x in fleet.status().get("waits", ()) if x["reason"] == "quorum"]
    return next((x for x in waits if all(word in x["detail"] for word in words)), None)


def test_a_quorum_and_its_members_outlive_their_leader(fleet: Fleet) -> None:
    """The next leader knows K and who was alive, and does not merge with fewer than K."""
    wait_for_merges(fleet, EVERYBODY)
    assert operate(fleet, "quorum", "set", "3").stdout == "quorum 3, 3 learners live\n"
    leader, term = settle(fleet)
    frozen = fleet.freeze("learner-2")
    fleet.kill(leader)
    status = led_by_another(fleet, term)
    assert status["quorum"] == 3
    assert states(status)["learner-2"] == "expected", "it cannot have joined again"
    fleet.wait_until(lambda: quorum_wait(fleet, "2 of 3", "learner-2"), "the wait to be told")
    before = len(fleet.steps(0)), len(fleet.steps(1))
    fleet.wait_until(
        lambda: all(len(fleet.steps(i)) >= before[i] + 10 for i in (0, 1)), "the others to train on"
    )
    assert quorum_wait(fleet, "learner-2"), "and it waits still"
    assert not rounds_since(fleet, frozen, term + 1), "no round without the quorum"


def test_the_next_leader_takes_another_quorum(fleet: Fleet) -> None:
    last = fleet.rounds()[-1]
    operate(fleet, "quorum", "set", "1")
    wait_for_merges(fleet, {"learner-0", "learner-1"}, term=last["term"] + 1)
    wait_for_merges(fleet, EVERYBODY, when=fleet.thaw("learner-2"))


def test_a_fragment_is_put_back_for_everybody_and_by_a_later_leader(fleet: Fleet) -> None:
    settle(fleet)
    said = operate(fleet, "rollback", str(FRAGMENT), "--reason", "test").stdout
    rounds = fleet.wait_until(
        lambda: [x for x in fleet.rounds() if x.get("rolled_back")] and fleet.rounds(),
        "the round that puts it back",
    )
    [back] = [x for x in rounds if x.get("rolled_back")]
    assert back["rolled_back"] == "test"
    assert f"version {back['term']}.{back['global_step']}, digest {back['digest'][:12]}" in said
    older = [x["digest"] for x in rounds[: rounds.index(back)] if x["fragment"] == FRAGMENT]
    # What was before the copy that the operator saw; a round in flight may have come between.
    assert back["digest"] in older[-3:-1]
    assert back["digest"] != older[-1]
    version = [FRAGMENT, back["term"], back["global_step"], back["digest"]]
    for index in range(3):
        fleet.wait_until(
            lambda index=index: any(version in x.get("applied", ()) for x in fleet.steps(index)),
            f"learner-{index} to have what was put back",
        )
    later = [x for x in fleet.wait_for_rounds(10) if x["fragment"] == FRAGMENT]
    assert later
    assert back["digest"] not in {x["digest"] for x in later}, "and it is trained on"


def test_a_learner_that_is_drained_leaves_for_good(fleet: Fleet) -> None:
    operate(fleet, "drain", "learner-2", "--reason", "new disk")
    fleet.wait_until(lambda: fleet.process_pid("learner-2") is None, "its end")
    fleet.wait_until(lambda: states(fleet.status())["learner-2"] == "drained", "it to have left")
    rounds = fleet.wait_for_rounds(8)
    assert {name for x in rounds for name in x["contributors"]} == {"learner-0", "learner-1"}
    entry = next(x for x in fleet.state().processes if x.name == "learner-2")
    assert (entry.state, entry.exit_code) == ("drained", EXIT_TOLD_TO_LEAVE)
    assert "learner-2" not in {x["process"] for x in fleet.lines("fleet", "restart")}


def test_a_learner_that_dies_with_its_leader_comes_back(fleet: Fleet) -> None:
    """With the inner state of a peer, or without one and says so; never does it wait for ever."""
    leader, term = settle(fleet)
    life = len(fleet.lines("learner-0", "start"))
    killed = fleet.kill("learner-0")
    fleet.kill(leader)
    led_by_another(fleet, term)
    fleet.wait_until(
        lambda: any(x.life > life for x in fleet.metrics().steps["learner-0"]), "it to train again"
    )
    wait_for_merges(fleet, {"learner-0", "learner-1"}, killed, term + 1)
    log = fleet.files.log_of("learner-0").read_text(errors="replace")
    _, waits, outcome = log.rpartition("waiting for the inner state of a peer")
    assert waits
    assert (
        outcome.count("has the inner state of learner-1")
        + outcome.count("begins with the published parameters alone")
    ) == 1
    assert states(fleet.status())["learner-2"] == "drained", "the next leader knows it"
    assert fleet.process_pid("learner-2") is None, "who has left is not called back"


def test_after_all_of_it_no_round_is_lost_and_the_data_add_up(fleet: Fleet) -> None:
    settle(fleet)
    metrics = fleet.metrics()
    report = compute_report(
        metrics, run_id=fleet.state().run_id, num_learners=len(EVERYBODY), settings={}
    )
    assert report.rounds_lost == 0
    assert len(report.leader_changes) >= 2
    applied = {x for steps in metrics.steps.values() for step in steps for x in step.applied}
    named = {(x.fragment, x.global_step) for x in applied}
    assert len(named) == len(applied), "all learners applied one version of every global step"
    data = report.data
    assert data is not None
    assert (data.twice, data.skipped) == (0, 0)
    assert data.leased == data.merged + data.open
    assert data.merged > 0
    assert data.returned > 0, "by who died and who left"
