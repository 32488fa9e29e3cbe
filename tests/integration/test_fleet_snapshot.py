"""A real fleet: snapshots while it runs, deaths in their middle, and on from one after kill -9.

The tests share one fleet and run in order.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_script import FaultScript
from fleet_harness import Fleet, assert_refused, diloco

from decoupled_diloco.fault_points import Fault, FaultPoint
from decoupled_diloco.snapshots import SnapshotName
from learner_client.checkpoint import saved_state_from
from learner_client.snapshots import SnapshotDirectory
from learner_client.training_state import load_training_state

pytestmark = pytest.mark.integration


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


@dataclass(frozen=True)
class Struck:
    """A fleet, its script, and who is to die in the middle of a snapshot."""

    fleet: Fleet
    faults: FaultScript
    deaths: dict[str, Fault]


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    folder = tmp_path_factory.mktemp("snapshot")
    faults = FaultScript(folder)
    deaths = {
        process: faults.at(FaultPoint.MID_SNAPSHOT, process=process)
        for process in ("learner-1", "synchronizer")
    }
    fleet = Fleet(
        folder,
        *("--learners", "2", "--quorum", "2", "--global-steps", "0", "--pace", "0.1"),
        *("--evaluate-every", "100000"),
        faults=faults,
    )
    try:
        yield Struck(fleet, faults, deaths)
    finally:
        fleet.close()


@pytest.fixture
def fleet(struck: Struck) -> Fleet:
    return struck.fleet


def listed(fleet: Fleet) -> list[str]:
    """What ``diloco snapshot list`` says."""
    return diloco("snapshot", "list", "--run-dir", str(fleet.files.root)).stdout.splitlines()


def damage(path: Path) -> None:
    """One bit of a part is another; the file is as long as before."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def assert_goes_on(fleet: Fleet, name: SnapshotName, newest: int) -> None:
    """The synchronizer goes on at the cut, and says what is given up."""
    [given_up] = [line for line in fleet.text().splitlines() if "back to snapshot" in line]
    # What was committed last may not have been written down any more.
    lost = newest - name.global_step
    assert any(f" {lost + more} newer rounds are given up" in given_up for more in (0, 1))
    start = fleet.lines("synchronizer", "start")[-1]
    assert start["global_step"] == name.global_step
    first = next(x for x in fleet.rounds() if x["term"] == start["term"])
    assert first["global_step"] == name.global_step + 1


def test_a_snapshot_is_taken_while_the_fleet_runs(fleet: Fleet) -> None:
    fleet.wait_until(lambda: fleet.global_step() >= 20, "twenty rounds")
    taken = diloco("snapshot", "--run-dir", str(fleet.files.root))
    assert taken.returncode == 0, taken.stderr
    [line] = fleet.lines("synchronizer", "snapshot")
    name = line["snapshot"]
    assert taken.stdout == f"snapshot {name} is complete, of learner-0, learner-1\n"
    assert fleet.status()["snapshot"]["complete"] == name
    assert listed(fleet) == [f"{name}  learner-0, learner-1"]


def test_a_learner_that_dies_in_the_middle_is_left_out(struck: Struck) -> None:
    fleet = struck.fleet
    struck.faults.arm(struck.deaths["learner-1"])
    taken = diloco("snapshot", "--run-dir", str(fleet.files.root))
    assert taken.returncode == 0, taken.stderr
    complete, left_out = taken.stdout.splitlines()
    assert complete.endswith("is complete, of learner-0")
    assert left_out.startswith("left out: learner-1: ")
    assert len(listed(fleet)) == 2
    fleet.wait_for_rounds(3)


def test_a_synchronizer_that_dies_in_the_middle_leaves_the_complete_ones(struck: Struck) -> None:
    fleet = struck.fleet
    before = listed(fleet)
    struck.faults.arm(struck.deaths["synchronizer"])
    assert diloco("snapshot", "--run-dir", str(fleet.files.root)).returncode != 0
    fleet.wait_until(lambda: len(fleet.lines("synchronizer", "start")) == 2, "its restart")
    fleet.wait_for_rounds(3)
    assert listed(fleet) == before
    names = {line.split()[0] for line in before}
    assert {path.name for path in fleet.files.snapshots.iterdir()} == names, "no leftovers"


def test_a_fleet_killed_whole_goes_on_from_its_snapshot(fleet: Fleet) -> None:
    root = str(fleet.files.root)
    refused = diloco("run", "--resume", "--run-dir", root, "--snapshot", "latest")
    assert_refused(refused, "CONFIG_CONFLICT")
    name = SnapshotName.parse(listed(fleet)[0].split()[0])
    fleet.kill_everything()
    newest = fleet.global_step()
    last_term = fleet.rounds()[-1]["term"]

    parts = SnapshotDirectory(fleet.files.snapshots)
    saved = saved_state_from(load_training_state(parts.part(name, "learner-0")).learner)
    damage(parts.part(name, "learner-1"))
    fleet.start("--resume", "--snapshot", str(name.global_step))
    fleet.wait_until(lambda: fleet.rounds()[-1]["term"] > last_term, "rounds of the resumed fleet")
    fleet.wait_for_rounds(12)
    assert_goes_on(fleet, name, newest)

    [refusal] = fleet.lines("learner-1", "not_resumed")
    assert refusal["reason"] == "CORRUPT"
    steps = fleet.lines("learner-0", "step", "resumed")
    at = next(i for i, line in enumerate(steps) if line["kind"] == "resumed")
    here = saved.local_step
    assert steps[at + 1]["local_step"] == here + 1, "no step twice, none left out"
    before = loss_of(fleet, 0, 1, 6, life=0)
    at_cut = loss_of(fleet, 0, here - 10, here, life=0)
    after = loss_of(fleet, 0, here + 1, here + 11, life=1)
    assert after < at_cut + 0.25 * (before - at_cut), "the losses go on where they were"

    fleet.kill("learner-0")
    fleet.wait_until(lambda: len(fleet.lines("learner-0", "joined")) == 3, "its restart")
    fleet.wait_for_rounds(2)
    assert len(fleet.lines("learner-0", "resumed")) == 1, "a part serves once"
