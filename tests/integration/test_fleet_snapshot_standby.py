"""A snapshot of a fleet with a standby: taken under a leader, gone back to by both stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_harness import Fleet, diloco, small

from decoupled_diloco.snapshots import SnapshotName
from diloco_fleet.lineage import leaderships, lost_rounds

pytestmark = pytest.mark.integration


def settle(fleet: Fleet) -> tuple[str, int]:
    """Waits until rounds go on with a standby in sync; returns who leads, and its term."""
    rounds = fleet.wait_for_rounds(4)
    fleet.wait_until(fleet.in_sync, "a standby in sync")
    return fleet.wait_until(fleet.leader, "a leader"), rounds[-1]["term"]


def fail_over(fleet: Fleet) -> None:
    """Kills who leads, and waits until the other one merges and the killed one follows it."""
    leader, term = settle(fleet)
    pid = fleet.process_pid(leader)
    assert pid is not None
    fleet.kill(leader)
    fleet.hold_back(leader, pid)
    fleet.wait_until(lambda: fleet.rounds()[-1]["term"] > term, "rounds of a later term")
    assert fleet.leader() not in {None, leader}
    fleet.thaw(leader)
    settle(fleet)


def test_a_fleet_with_a_standby_goes_on_from_a_snapshot_and_fails_over(tmp_path: Path) -> None:
    fleet = Fleet(
        tmp_path,
        *("--learners", "2", "--global-steps", "0", "--pace", "0.1", "--evaluate-every", "100000"),
        settings=small() + "max_restarts = 1000\nrestart_wait_s = 0.5\n",
        standby=True,
    )
    try:
        fail_over(fleet)
        taken = diloco("snapshot", "--wait", "--run-dir", str(fleet.files.root))
        assert taken.returncode == 0, taken.stderr
        name = SnapshotName.parse(taken.stdout.split()[1])
        assert taken.stdout == f"snapshot {name} is complete, of learner-0, learner-1\n"
        fleet.wait_for_rounds(6)
        fleet.kill_everything()
        given_up = fleet.rounds()

        fleet.start("--resume", "--standby", "--snapshot", "latest")
        last_term = given_up[-1]["term"]
        assert name.term == last_term, "the leader of a later term has taken it"
        fleet.wait_until(lambda: fleet.rounds()[-1]["term"] > last_term, "rounds after the resume")
        first = next(x for x in fleet.rounds() if x["term"] > last_term)
        assert first["global_step"] == name.global_step + 1
        for index in range(2):
            assert fleet.lines(f"learner-{index}", "resumed"), "it goes on from its part"
        fail_over(fleet)
        after = fleet.rounds()[-1]

        metrics = fleet.metrics()
        resumed_at = min(x.time for x in leaderships(metrics) if x.term == first["term"])
        steps = {
            learner: [x for x in lines if x.time > resumed_at]
            for learner, lines in metrics.steps.items()
        }
        assert not lost_rounds(metrics.rounds, leaderships(metrics), steps), "but what was given up"
        applied = {x for lines in steps.values() for step in lines for x in step.applied}
        assert max(x.term for x in applied) == after["term"]
        assert {x.term for x in applied if x.global_step > name.global_step} == {
            first["term"], after["term"],
        }  # fmt: skip
    finally:
        fleet.close()
