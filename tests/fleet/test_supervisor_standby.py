"""The supervisor of a fleet with a standby, against small scripts in place of its processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_supervisor import FINISHES, SERVES, Fleet, once

from decoupled_diloco.errors import Reason
from diloco_fleet.local import Outcome
from diloco_fleet.run_files import read_fleet

BOTH = {"synchronizer-0": SERVES, "synchronizer-1": SERVES}
WRONG = "echo 'error: STORE_CORRUPT: record 7 is damaged' >&2; exit 74"
EVERYBODY = ("redis", "synchronizer-0", "synchronizer-1", "evaluator", "learner-0")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for journal in fleet.journals:
        journal.close()


def drained(fleet: Fleet, leader: str | None) -> Outcome:
    supervisor = fleet.supervisor(
        [SERVES], evaluator=SERVES, synchronizers=BOTH, redis=SERVES, leader=lambda: leader
    )
    return fleet.run(supervisor, once(lambda: fleet.up(*EVERYBODY)))


@pytest.mark.parametrize(("leader", "follower"), [(0, 1), (1, 0)])
def test_who_leads_is_the_last_synchronizer_and_redis_the_last_of_all(
    fleet: Fleet, leader: int, follower: int
) -> None:
    assert drained(fleet, f"synchronizer-{leader}").word == "drained"
    assert fleet.order() == [
        "learner-0",
        "evaluator",
        f"synchronizer-{follower}",
        f"synchronizer-{leader}",
        "redis",
    ]
    names = [entry.name for entry in read_fleet(fleet.files.fleet).processes]
    assert tuple(names) == EVERYBODY, "what others meet on is started first"


def test_where_nobody_leads_both_are_told_at_once(fleet: Fleet) -> None:
    assert drained(fleet, None).word == "drained"
    order = fleet.order()
    assert order[:2] == ["learner-0", "evaluator"]
    assert set(order[2:4]) == {"synchronizer-0", "synchronizer-1"}
    assert order[4] == "redis"


def test_a_dead_leader_and_a_dead_redis_are_started_again_and_the_run_goes_on(
    fleet: Fleet,
) -> None:
    dies = "if [ ! -e {name}.died ]; then touch {name}.died; kill -KILL $$; fi; " + SERVES
    learner = "while [ ! -e synchronizer-0.up -o ! -e redis.up ]; do sleep 0.02; done; " + FINISHES
    outcome = fleet.run(
        fleet.supervisor([learner], synchronizers={**BOTH, "synchronizer-0": dies}, redis=dies)
    )
    assert outcome.word == "complete"
    assert fleet.restarts() == {"synchronizer-0": 1, "redis": 1}


def test_the_run_goes_on_with_one_synchronizer_and_without_redis(fleet: Fleet) -> None:
    """Neither is started again, for good reasons; the other synchronizer is there."""
    supervisor = fleet.supervisor(
        ["while [ ! -e go ]; do sleep 0.02; done; " + FINISHES],
        synchronizers={**BOTH, "synchronizer-0": WRONG},
        redis="exit 64",
    )

    def both_gone() -> None:
        if sum("is not started again" in line for line in fleet.said) == 2:
            (fleet.folder / "go").touch()

    assert supervisor.run(both_gone).word == "complete"
    states = {entry.name: entry.state for entry in read_fleet(fleet.files.fleet).processes}
    assert (states["synchronizer-0"], states["synchronizer-1"], states["redis"]) == (
        "failed",
        "stopped",
        "failed",
    )


def test_the_run_fails_when_no_synchronizer_can_go_on(fleet: Fleet) -> None:
    both = dict.fromkeys(BOTH, WRONG)
    outcome = fleet.run(
        fleet.supervisor([SERVES], synchronizers=both, redis=SERVES, evaluator=SERVES)
    )
    assert (outcome.word, outcome.exit_code) == ("failed", 74)
    assert outcome.error is not None
    assert outcome.error.reason is Reason.STORE_CORRUPT


def test_a_frozen_follower_is_killed_and_does_not_hold_up_the_end(fleet: Fleet) -> None:
    deaf = 'trap "" TERM; touch {name}.up; while :; do sleep 0.02; done'
    supervisor = fleet.supervisor(
        [SERVES],
        evaluator=SERVES,
        synchronizers={**BOTH, "synchronizer-1": deaf},
        redis=SERVES,
        leader=lambda: "synchronizer-0",
        drain_s=3.0,
    )
    outcome = fleet.run(supervisor, once(lambda: fleet.up(*EVERYBODY)))
    assert outcome.word == "drained"
    assert fleet.order() == ["learner-0", "evaluator", "synchronizer-0", "redis"]
    codes = {entry.name: entry.exit_code for entry in read_fleet(fleet.files.fleet).processes}
    assert codes["synchronizer-1"] == -signal.SIGKILL
