"""Learners of the shipped trainer that are killed and come back, with a peer's or their own state.

Everything runs over gRPC in processes of its own.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fleet_harness import Fleet, small

pytestmark = pytest.mark.integration

VICTIM = 1
NAME = f"learner-{VICTIM}"


def steps(fleet: Fleet, index: int, since: float) -> list[dict]:
    lines = fleet.lines(f"learner-{index}", "step")
    return [line for line in lines if line["time"] > since]


def log_of(fleet: Fleet, name: str) -> str:
    return fleet.files.log_of(name).read_text(errors="replace")


def killed(fleet: Fleet) -> float:
    """Kills the victim once it has trained; returns the time at which it was gone."""
    fleet.wait_until(lambda: len(fleet.rounds()) >= 4, "rounds to be merged")
    fleet.wait_until(lambda: len(steps(fleet, VICTIM, 0.0)) >= 5, f"{NAME} to train")
    when = max(line["time"] for line in steps(fleet, VICTIM, 0.0))
    fleet.kill(NAME, signal.SIGKILL)
    return when


def test_a_killed_learner_comes_back_with_the_inner_state_of_a_peer(tmp_path: Path) -> None:
    arguments = ("--learners", "2", "--global-steps", "0", "--pace", "0.1")
    fleet = Fleet(tmp_path, *arguments, settings=small(interval=24))
    try:
        when = killed(fleet)
        fleet.wait_until(
            lambda: f"{NAME}: has the inner state of learner-0" in log_of(fleet, NAME),
            f"{NAME} to recover",
        )
        fleet.wait_until(lambda: len(steps(fleet, VICTIM, when)) >= 5, f"{NAME} to train again")
        assert f"{NAME} recovers from learner-0" in log_of(fleet, "synchronizer")
        # The donor trained on: no step of its waited for anything but its pace.
        donor = steps(fleet, 0, 0.0)
        assert all(line["state"] == "online" for line in donor)
        assert [x["local_step"] for x in donor] == list(range(1, len(donor) + 1))
    finally:
        fleet.close()


def test_a_killed_learner_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    arguments = ("--learners", "2", "--global-steps", "0", "--pace", "0.1")
    fleet = Fleet(
        tmp_path,
        *arguments,
        "--recover",
        "checkpoint",
        settings=small(interval=24) + "checkpoint_every_s = 1.0\n",
    )
    path = fleet.files.root / "checkpoints" / f"{NAME}.safetensors"
    try:
        fleet.wait_until(path.exists, "a checkpoint")
        when = killed(fleet)
        fleet.wait_until(lambda: len(steps(fleet, VICTIM, when)) >= 5, f"{NAME} to train again")
        log = log_of(fleet, NAME)
        assert "goes on from its checkpoint" in log
        assert log.count("there is no checkpoint") == 1
    finally:
        fleet.close()
