"""One fleet that loses learners and its synchronizer, with two slow learners, one test per blow.

The tests share the fleet and run in order; each waits until the fleet has recovered.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from fleet_harness import Fleet, Lines, between, diloco, first_after, small

pytestmark = pytest.mark.integration

LEARNERS = 4
HALF_SPEED, CRAWLING = 2, 3


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(
        tmp_path_factory.mktemp("disturbed"),
        *("--learners", str(LEARNERS), "--global-steps", "0", "--pace", "0.15"),
        *("--slow-learner", f"{HALF_SPEED}:0.5", "--slow-learner", f"{CRAWLING}:0.05"),
        *("--evaluate-every", "60"),
        # A learner whose inner step outlasts a whole cycle of fragments has every copy overwritten.
        settings=small(interval=24),
    )
    try:
        yield fleet
    finally:
        fleet.close()


def contributions(lines: Lines, index: int) -> Lines:
    return [line for line in lines if f"learner-{index}" in line["contributors"]]


def num_contributions(fleet: Fleet, index: int, since: float = 0.0) -> int:
    lines = [line for line in fleet.rounds() if line["time"] > since]
    return len(contributions(lines, index))


def learner_states(fleet: Fleet, index: int, since: float) -> list[dict[str, Any]]:
    """What the synchronizer wrote about a learner after a time."""
    return [
        line
        for line in fleet.lines("synchronizer", "learner")
        if line["learner_id"] == f"learner-{index}" and line["time"] > since
    ]


def wait_for_return(fleet: Fleet, index: int, since: float) -> float:
    """Waits until a learner that died contributes again; returns when it joined again."""
    name = f"learner-{index}"

    def joined() -> dict[str, Any] | None:
        lines = learner_states(fleet, index, since)
        return next((line for line in lines if line["state"] == "joined"), None)

    line = fleet.wait_until(joined, f"{name} to join again")
    when = float(line["time"])
    fleet.wait_until(lambda: num_contributions(fleet, index, when), f"{name} to contribute again")
    return when


def assert_no_wait_names(fleet: Fleet, index: int, begin: float, end: float) -> None:
    waits = between(fleet.lines("synchronizer", "wait"), begin, end)
    named = [wait for wait in waits if f"learner-{index}" in wait["detail"]]
    assert not named


def test_slow_learners_hold_nobody_and_still_contribute(fleet: Fleet) -> None:
    """Half speed and one twentieth: rounds go on between their contributions, not at their pace."""
    fleet.wait_until(lambda: num_contributions(fleet, CRAWLING) >= 3, "the slowest to contribute")
    rounds = fleet.rounds()
    assert num_contributions(fleet, HALF_SPEED) > num_contributions(fleet, CRAWLING)
    for earlier, later in pairwise(contributions(rounds, CRAWLING)[-3:]):
        inside = between(rounds, earlier["time"], later["time"])
        assert len(inside) >= 5, "rounds go on while the slowest is in its inner step"
        for index in (0, 1):
            steps = between(fleet.steps(index), earlier["time"], later["time"])
            assert len(steps) >= 5, "the others step on meanwhile"
            assert len(steps) <= 4 * len(inside), "rounds keep to the pace of the fast ones"
            assert len(contributions(inside, index)) >= 0.5 * len(inside)
    startup_end = rounds[0]["time"]
    assert_no_wait_names(fleet, CRAWLING, startup_end, math.inf)
    assert_no_wait_names(fleet, HALF_SPEED, startup_end, math.inf)


def test_a_killed_learner_is_not_waited_for_and_comes_back(fleet: Fleet) -> None:
    """kill -9: survivors step and merge on, no wait names the dead, it contributes again."""
    killed = fleet.kill("learner-1")
    back = wait_for_return(fleet, 1, killed)
    rounds = fleet.rounds()

    after = [line for line in rounds if line["time"] > killed]
    steps = between(fleet.steps(0), killed, after[1]["time"])
    assert steps, "a survivor stepped between the kill and the next merge it could serve"

    gone = first_after(learner_states(fleet, 1, killed), killed)
    assert gone is not None
    noticed = gone["time"]
    assert gone["state"] in {"disconnected", "gone"}
    meanwhile = between(rounds, noticed, back)
    assert len(meanwhile) >= 3, "merges go on while it is away"
    assert all("learner-1" not in line["live"] for line in meanwhile[1:])
    assert not contributions(meanwhile[2:], 1)
    assert len(between(fleet.steps(0), noticed, back)) >= 3
    assert_no_wait_names(fleet, 1, noticed, back)

    incarnations = {line["incarnation"] for line in learner_states(fleet, 1, killed)}
    assert len(incarnations) == 2, "the dead one's and the new one's"
    assert len(fleet.lines("learner-1", "start")) == 2


def test_no_status_names_the_dead(fleet: Fleet) -> None:
    """What `diloco status` shows as waiting, sampled while a learner is dead."""
    killed = fleet.kill("learner-0")
    samples = []

    def is_back() -> bool:
        status = fleet.status()
        state = {entry["learner_id"]: entry["state"] for entry in status["learners"]}
        if state["learner-0"] != "live":
            samples.append(status)
        return any(line["state"] == "joined" for line in learner_states(fleet, 0, killed))

    fleet.wait_until(is_back, "learner-0 to join again")
    assert samples, "its death was seen"
    for status in samples:
        for wait in status["waits"]:
            assert "learner-0" not in wait["detail"], wait
    wait_for_return(fleet, 0, killed)


def test_one_survivor_goes_on_alone(fleet: Fleet) -> None:
    """kill -9 of all learners but one: merges of one, then everybody is back."""
    dead = (1, HALF_SPEED, CRAWLING)
    killed = [fleet.kill(f"learner-{index}") for index in dead]
    alone = fleet.wait_until(
        lambda: [
            line
            for line in fleet.rounds()
            if line["time"] > killed[-1] and line["live"] == ["learner-0"]
        ],
        "rounds of the survivor alone",
    )
    assert all(line["contributors"] == ["learner-0"] for line in alone)
    for index, when in zip(dead, killed, strict=True):
        wait_for_return(fleet, index, when)
    text = diloco("status", "--run-dir", str(fleet.files.root)).stdout
    assert all(f"learner-{index}" in text for index in range(LEARNERS))


def test_a_frozen_learner_is_left_out_and_goes_on(fleet: Fleet) -> None:
    """SIGSTOP closes no connection: silence alone is noticed; thawed, it contributes again."""
    frozen = fleet.kill("learner-1", signal.SIGSTOP)

    def noticed() -> dict[str, Any] | None:
        lines = learner_states(fleet, 1, frozen)
        return next((line for line in lines if line["state"] == "gone"), None)

    line = fleet.wait_until(noticed, "its silence to be noticed")
    fleet.wait_for_rounds(10)
    thawed = fleet.kill("learner-1", signal.SIGCONT)
    alone = between(fleet.rounds(), line["time"], thawed)
    assert all("learner-1" not in entry["live"] for entry in alone[1:])
    assert_no_wait_names(fleet, 1, line["time"], thawed)
    steps = between(fleet.steps(0), frozen, line["time"])
    assert steps, "nobody waits before it is noticed either"
    fleet.wait_until(lambda: num_contributions(fleet, 1, thawed), "learner-1 to contribute again")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_learners_train_on_without_a_synchronizer(fleet: Fleet, number: signal.Signals) -> None:
    """Local steps go on while it is away; no merged round is lost; versions go on; all rejoin."""
    starts = len(fleet.lines("synchronizer", "start"))
    published = max(step["global_step"] for step in fleet.steps(0))
    killed = fleet.kill("synchronizer", number)
    fleet.wait_until(
        lambda: len(fleet.lines("synchronizer", "start")) > starts, "another synchronizer"
    )
    started = fleet.lines("synchronizer", "start")[-1]
    for index in range(LEARNERS):
        fleet.wait_until(
            lambda index=index: num_contributions(fleet, index, started["time"]),
            f"learner-{index} to contribute again",
        )
    away = [line for line in fleet.lines("learner-0", "offline") if line["time"] > killed]
    assert away, "the learner says that the synchronizer is away"
    for index in (0, 1):
        trained = between(fleet.steps(index), away[0]["time"], started["time"])
        assert len(trained) >= 2, "training goes on without it"
        assert any(step["state"] == "offline" for step in trained)

    assert started["restored"] is True
    assert started["global_step"] >= published, "what a learner applied is still there"
    written = [line["global_step"] for line in fleet.rounds() if line["time"] < started["time"]]
    assert started["global_step"] >= written[-1], "what was merged is still there"
    steps = [line["global_step"] for line in fleet.rounds()]
    assert steps == sorted(set(steps)), "no global step is merged twice"
    for index in range(LEARNERS):
        versions = [step["global_step"] for step in fleet.steps(index)]
        assert versions == sorted(versions), "no learner goes back"
    if number is signal.SIGTERM:
        drained = between(fleet.lines("synchronizer", "stop"), killed, started["time"])
        assert len(drained) == 1, "it ended in order"


def test_an_interrupt_drains_and_reports(fleet: Fleet) -> None:
    """Ctrl-C: everybody leaves, the report counts every blow, no process is left."""
    evaluations = fleet.lines("evaluator", "evaluation")
    fleet.interrupt()
    assert fleet.wait() == 143, fleet.text()
    assert not fleet.pids()
    report = fleet.report()
    assert report["outcome"] == "drained"
    assert report["problems"] == []
    assert report["rounds_lost"] == 0
    assert report["rounds"] == fleet.global_step()
    assert report["restarts_by_process"] == {
        "learner-0": 1,
        "learner-1": 2,
        f"learner-{HALF_SPEED}": 1,
        f"learner-{CRAWLING}": 1,
        "synchronizer": 2,
    }
    assert report["restarts"] == 7
    assert report["uptime"] > 0.9, "somebody trained nearly always"
    assert 0.0 < report["participation"] < 1.0
    left = [
        line["learner_id"]
        for line in fleet.lines("synchronizer", "learner")[-2 * LEARNERS :]
        if line["state"] == "left"
    ]
    assert sorted(left) == [f"learner-{index}" for index in range(LEARNERS)]
    assert (fleet.files.model / "model.safetensors").is_file()
    losses = [line["loss"] for line in fleet.lines("evaluator", "evaluation")]
    assert len(losses) > len(evaluations) - 1
    assert losses[-1] < losses[0] - 1.0, "the loss fell through all of it"
    assert losses[-1] <= min(losses) + 0.3, "and did not rise again"
