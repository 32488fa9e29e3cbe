"""A real fleet: a snapshot while it runs, kill -9 of everything, and on from the snapshot."""

from __future__ import annotations

import os
import signal
import statistics
from pathlib import Path

import pytest
from fleet_harness import Fleet, assert_refused, diloco, wait_for

from decoupled_diloco.snapshots import SnapshotName
from learner_client.checkpoint import saved_state_from
from learner_client.snapshots import SnapshotDirectory
from learner_client.training_state import load_training_state

pytestmark = pytest.mark.integration

LEARNERS = ("learner-0", "learner-1")


def kill_everything(fleet: Fleet) -> None:
    """Every process at once, ``diloco run`` too, without a word."""
    for pid in fleet.pids():
        os.kill(pid, signal.SIGKILL)
    fleet.wait()
    wait_for(lambda: not fleet.pids(), "the end of every process")


def loss_of(fleet: Fleet, index: int, first: int, last: int, life: int) -> float:
    """Mean loss over local steps of one process of a learner, by the order of its file."""
    lines = fleet.lines(f"learner-{index}", "step", "start")
    lives = [i for i, line in enumerate(lines) if line["kind"] == "start"]
    own = lines[lives[life] : lives[life + 1] if life + 1 < len(lives) else None]
    return statistics.fmean(
        line["loss"]
        for line in own
        if line["kind"] == "step" and first <= line["local_step"] < last
    )


def test_a_fleet_killed_whole_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    fleet = Fleet(
        tmp_path,
        *("--learners", "2", "--quorum", "2", "--global-steps", "0", "--pace", "0.1"),
        *("--evaluate-every", "100000"),
    )
    try:
        root = str(fleet.files.root)
        fleet.wait_until(lambda: fleet.global_step() >= 20, "twenty rounds")
        assert_refused(
            diloco("run", "--resume", "--run-dir", root, "--snapshot", "latest"), "CONFIG_CONFLICT"
        )
        taken = diloco("snapshot", "--run-dir", root)
        assert taken.returncode == 0, taken.stderr
        [line] = fleet.lines("synchronizer", "snapshot")
        name = SnapshotName.parse(line["snapshot"])
        assert taken.stdout == f"snapshot {name} is complete, of learner-0, learner-1\n"
        assert fleet.status()["snapshot"]["complete"] == str(name)
        assert diloco("snapshot", "list", "--run-dir", root).stdout == (
            f"{name}  learner-0, learner-1\n"
        )
        fleet.wait_for_rounds(5)
        kill_everything(fleet)
        newest = fleet.global_step()

        parts = SnapshotDirectory(fleet.files.snapshots)
        saved = saved_state_from(load_training_state(parts.part(name, "learner-0")).learner)
        damaged = parts.part(name, "learner-1")
        content = bytearray(damaged.read_bytes())
        content[-5] ^= 1
        damaged.write_bytes(content)
        fleet.start("--resume", "--snapshot", str(name.global_step))
        fleet.wait_until(
            lambda: fleet.lines("synchronizer", "round")[-1]["term"] > name.term + 1,
            "rounds of the resumed fleet",
        )
        fleet.wait_for_rounds(12)
        given_up = [line for line in fleet.text().splitlines() if "back to snapshot" in line]
        assert len(given_up) == 1
        assert f"{newest - name.global_step} newer rounds are given up" in given_up[0]
        start = fleet.lines("synchronizer", "start")[-1]
        assert start["global_step"] == name.global_step
        first = next(x for x in fleet.rounds() if x["term"] == start["term"])
        assert first["global_step"] == name.global_step + 1

        assert len(fleet.lines("learner-0", "resumed")) == 1
        [refusal] = fleet.lines("learner-1", "not_resumed")
        assert refusal["reason"] == "CORRUPT"
        steps = fleet.lines("learner-0", "step", "resumed")
        at = next(i for i, line in enumerate(steps) if line["kind"] == "resumed")
        assert steps[at + 1]["local_step"] == saved.local_step + 1, "no step twice, none left out"

        here = saved.local_step
        before = loss_of(fleet, 0, 1, 6, life=0)
        at_cut = loss_of(fleet, 0, here - 10, here, life=0)
        after = loss_of(fleet, 0, here + 1, here + 11, life=1)
        assert after < at_cut + 0.25 * (before - at_cut), "the losses go on where they were"

        fleet.kill("learner-0")
        fleet.wait_until(lambda: len(fleet.lines("learner-0", "joined")) == 3, "its restart")
        fleet.wait_for_rounds(2)
        assert len(fleet.lines("learner-0", "resumed")) == 1, "a part serves once"
    finally:
        fleet.close()
