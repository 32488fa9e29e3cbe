"""What processes do to themselves, what is seen of a fleet, and disks of their own."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from decoupled_diloco import fault_points
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import VARIABLE, FaultPoint, Faults, for_process
from decoupled_diloco.journal import Journal
from decoupled_diloco.v1 import admin_pb2, types_pb2
from diloco_fleet.chaos import disks
from diloco_fleet.chaos.point_faults import PointFaults, Skew
from diloco_fleet.chaos.sample import Sample, advance, begin
from diloco_fleet.chaos.scenario import Fault, FaultKind, Hypothesis, Scenario
from diloco_fleet.chaos.schedule import draw_schedule
from diloco_fleet.chaos.watch import make_sample
from diloco_fleet.metrics import parse_metrics
from diloco_fleet.status import Seen

DONOR = Fault(fault=FaultKind.KILL, who="the donor", on="mid_recovery")


@pytest.fixture
def points(tmp_path: Path) -> PointFaults:
    scenario = Scenario(
        name="test", about="", duration_s=30.0, faults=(DONOR,), steady=Hypothesis(expired=0)
    )
    return PointFaults(tmp_path / "faults", scenario, draw_schedule(scenario, 0))


def process(points: PointFaults, environment: dict[str, str], name: str) -> tuple[Faults, list]:
    """The script as a process has it, which only notes what it would do."""
    faults = Faults.parse(for_process(environment[VARIABLE], name))
    acted: list[str] = []
    faults.act = lambda fault: acted.append(f"{fault.action} {name}")
    return faults, acted


def test_nobody_strikes_itself_before_it_is_armed_and_one_does_after(points: PointFaults) -> None:
    environment = points.environment()
    learner, by_learner = process(points, environment, "learner-1")
    leader, by_leader = process(points, environment, "synchronizer-0")
    learner.reach(FaultPoint.MID_RECOVERY)
    assert points.struck() == {}
    points.arm(0, "learner-*")
    leader.reach(FaultPoint.MID_RECOVERY)
    learner.reach(FaultPoint.MID_PUSH)
    learner.reach(FaultPoint.MID_RECOVERY)
    learner.reach(FaultPoint.MID_RECOVERY)
    assert (by_learner, by_leader) == (["kill learner-1"], [])
    assert points.struck() == {0: "learner-1"}


def test_what_is_disarmed_happens_no_more(points: PointFaults) -> None:
    learner, by_learner = process(points, points.environment(), "learner-1")
    points.arm(0, "learner-*")
    points.disarm(0)
    learner.reach(FaultPoint.MID_RECOVERY)
    assert by_learner == []


def test_a_wall_clock_is_wrong_for_one_process_and_a_while(
    points: PointFaults, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Journals are written by it; the times of their records can be put right."""
    environment = points.environment()
    now = [1000.0]
    monkeypatch.setattr(fault_points.time, "time", lambda: now[0])
    monkeypatch.setattr(points, "_wall", lambda: now[0])
    monkeypatch.setattr(fault_points, "_faults", None)
    fault_points.arm({VARIABLE: for_process(environment[VARIABLE], "learner-1")})
    path = tmp_path / "learner-1.jsonl"
    journal = Journal(path)
    journal.write("start")
    points.set_clock_wrong("learner-0", 60.0)
    points.set_clock_wrong("learner-1", -3600.0)
    now[0] = 1001.0
    journal.write("start")
    points.set_clock_right("learner-1")
    now[0] = 1002.0
    journal.write("start")
    journal.close()
    times = [mark.time for mark in parse_metrics({"l": path.read_text()}).marks["l"]]
    assert times == [1000.0, -2599.0, 1002.0]
    assert points.skews() == (
        Skew("learner-1", -3600.0, 1000.0, 1001.0), Skew("learner-0", 60.0, 1000.0, 1002.0),
    )  # fmt: skip
    points.set_clock_right("learner-1")


def test_a_script_without_clocks_leaves_them_alone() -> None:
    text = json.dumps({"log": "/nowhere", "faults": []})
    assert Faults.parse(text).offset_s == 0.0


# -- samples --------------------------------------------------------------------------------------


def seen(role: str, term: int, **values: object) -> Seen:
    status = admin_pb2.GetStatusResponse(
        role=role, claim=types_pb2.LeadershipClaim(term=term), **values
    )
    return Seen(address="x", status=status)


def learner(accepted: int, state: str = "live") -> admin_pb2.LearnerStatus:
    return admin_pb2.LearnerStatus(
        learner_id="learner-0", state=state, accepted=accepted, local_step=accepted,
        incarnation=types_pb2.Incarnation(term=1, number=1),
    )  # fmt: skip


def test_who_leads_by_the_highest_term_tells_what_is_seen() -> None:
    sync = admin_pb2.ReplicationStatus(
        lease_held=True, replicas=[admin_pb2.ReplicaStatus(standby_id="s", in_sync=True)]
    )
    old = seen("leading", 1, global_step=9)
    new = seen("leading", 2, global_step=8, replication=sync, learners=[learner(3)])
    sample = make_sample(
        {"synchronizer-0": old, "synchronizer-1": new}, at_s=1.0, running=["learner-0"]
    )
    assert (sample.leader, sample.term, sample.global_step) == ("synchronizer-1", 2, 8)
    assert (sample.in_sync, sample.lease_held) == (True, True)
    assert sample.learners["learner-0"].accepted == 3


def test_a_fleet_in_which_nobody_leads_is_seen_as_such() -> None:
    sample = make_sample({"synchronizer-0": seen("following", 1)}, at_s=1.0, running=[])
    assert sample.leader is None
    assert make_sample({}, at_s=1.0, running=[]).leader is None


def test_contributions_add_up_over_leaders() -> None:
    """Each leader counts from the beginning of its term; one that is away is no step back."""

    def at(at_s: float, term: int, accepted: int, state: str = "live") -> Sample:
        answer = seen("leading", term, global_step=accepted, learners=[learner(accepted, state)])
        return make_sample({"s": answer}, at_s=at_s, running=[])

    progress = begin(at(0.0, 1, 5))
    progress = advance(progress, at(1.0, 1, 7))
    assert progress.contributions == {"learner-0": 2}
    assert progress.merged_at_s == 1.0
    progress = advance(progress, Sample(at_s=2.0, running=frozenset()))
    assert (progress.contributions, progress.sample.term) == ({"learner-0": 2}, 1)
    progress = advance(progress, at(3.0, 2, 3, "gone"))
    assert progress.contributions == {"learner-0": 5}
    assert progress.events == {"leader-change", "learner-gone"}
    progress = advance(progress, at(4.0, 2, 4))
    assert progress.events == {"learner-back"}


def test_what_a_leader_counted_before_anybody_looked_is_no_progress() -> None:
    """A fleet that runs already may stand still: its first answer is where counting begins."""

    def at(at_s: float, accepted: int) -> Sample:
        answer = seen("leading", 3, global_step=100 + accepted, learners=[learner(accepted)])
        return make_sample({"s": answer}, at_s=at_s, running=[])

    progress = begin(Sample(at_s=0.0, running=frozenset()))
    progress = advance(progress, at(1.0, 50))
    progress = advance(progress, at(2.0, 50))
    assert (progress.merges, progress.events) == (0, frozenset())
    assert not progress.contributions.get("learner-0")
    progress = advance(progress, at(3.0, 51))
    assert (progress.merges, progress.contributions) == (1, {"learner-0": 1})


# -- disks ----------------------------------------------------------------------------------------


def test_a_full_disk_is_full_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing ends at the first error of each size; what others remove meanwhile is taken, too."""
    sizes: list[int] = []
    again = threading.Event()

    def write(_: int, data: bytes) -> int:
        sizes.append(len(data))
        if threading.current_thread() is not threading.main_thread():
            again.set()
        if len(sizes) % 3 == 0:
            raise OSError(28, "No space left on device")
        return len(data)

    # Not os.write itself: others write meanwhile.
    monkeypatch.setattr(disks, "os", SimpleNamespace(**{**vars(os), "write": write}))
    disks.fill(tmp_path)
    assert sorted(set(sizes)) == [1, 1 << 12, 1 << 20]
    assert list(tmp_path.iterdir())
    assert again.wait(60), "it is kept full"
    disks.make_room(tmp_path)
    disks.make_room(tmp_path)
    for filler in [x for x in threading.enumerate() if x.name == "filler"]:
        filler.join(60)
        assert not filler.is_alive(), "nobody fills it any more"
    assert not list(tmp_path.iterdir())


def test_who_may_mount_nothing_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "unshare"
    program.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
    program.chmod(0o755)
    (tmp_path / "mount").write_text("")
    (tmp_path / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert "Operation not permitted" in disks.no_disk_because()
    assert "root" in disks.no_disk_because()


@pytest.fixture
def two_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[disks.Disks, list[Path]]:
    """Disks that nobody has to mount, with something on them."""
    monkeypatch.setattr(disks, "_run", lambda *_: None)
    mine, folders = disks.Disks(), [tmp_path / "store", tmp_path / "store-1"]
    mine._folders += folders
    for folder in folders:
        folder.mkdir()
        (folder / "round").write_text(folder.name)
    return mine, folders


def test_what_could_not_be_kept_is_kept_by_a_second_call(
    two_disks: tuple[disks.Disks, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, folders = two_disks
    whole = shutil.copytree

    def full(folder: Path, copy: Path) -> None:
        whole(folder, copy)
        (copy / "round").write_text("ha")
        if folder == folders[0]:
            raise shutil.Error([(str(folder), str(copy), "No space left on device")])
        (copy / "round").write_text(folder.name)

    monkeypatch.setattr(disks.shutil, "copytree", full)
    with pytest.raises(DilocoError, match="No space left") as raised:
        mine.keep()
    assert raised.value.reason is Reason.STORAGE_FAILED
    monkeypatch.setattr(disks.shutil, "copytree", whole)
    mine.keep()
    mine.keep()
    assert [(folder / "round").read_text() for folder in folders] == ["store", "store-1"]
    assert sorted(folders[0].parent.iterdir()) == folders, "no half copy"


def test_a_copy_that_is_whole_is_not_made_again_of_an_unmounted_folder(
    two_disks: tuple[disks.Disks, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, folders = two_disks

    def unmount(folder: Path, *_: str) -> None:
        (folder / "round").unlink()  # under the disk there is nothing

    monkeypatch.setattr(disks, "_run", unmount)
    remove = shutil.rmtree

    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(disks.shutil, "rmtree", fails)
    with pytest.raises(DilocoError, match="Permission denied"):
        mine.keep()
    monkeypatch.setattr(disks.shutil, "rmtree", remove)
    mine.keep()
    assert [(folder / "round").read_text() for folder in folders] == ["store", "store-1"]
