"""A fleet of one learner through its whole life: trained, killed, resumed, short of disk, damaged.

The tests share one run directory and run in order.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fleet_harness import PATIENCE_S, Fleet, assert_refused, diloco, wait_for

pytestmark = pytest.mark.integration

FIRST, SECOND = 40, 120


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(
        tmp_path_factory.mktemp("single"),
        *("--learners", "1", "--global-steps", str(FIRST), "--pace", "0.1"),
        *("--evaluate-every", "1000"),
    )
    try:
        yield fleet
    finally:
        fleet.close()


def test_one_learner_is_a_fleet(fleet: Fleet) -> None:
    assert fleet.wait() == 0, fleet.text()
    report = fleet.report()
    assert report["outcome"] == "complete"
    assert report["rounds"] == FIRST
    assert report["rounds_lost"] == 0
    assert report["contributors_histogram"] == {"1": FIRST}
    assert report["participation"] == 1.0
    assert report["evaluation_loss_after"] < report["evaluation_loss_before"] - 0.5


def test_the_seed_is_measured_whoever_comes_first(fleet: Fleet) -> None:
    """Nobody waits for the evaluator, so the first copy that it sees may be of a later step."""
    evaluations = fleet.lines("evaluator", "evaluation")
    steps = [line["global_step"] for line in evaluations]
    assert steps[0] == 0
    assert steps[-1] == FIRST
    assert evaluations[0]["loss"] == fleet.report()["evaluation_loss_before"]


def test_a_process_that_still_waits_ends_when_it_is_told(fleet: Fleet) -> None:
    """SIGTERM before there is a synchronizer: there is no step to finish."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        common = ("--address", address, "--run-dir", str(fleet.files.root))
        for arguments in (("train", "--learner-id", "learner-0"), ("evaluate",)):
            output = fleet.files.root.parent / f"{arguments[0]}.txt"
            with fleet.start_other(
                "learner_client.cli", *arguments, *common, output=output
            ) as process:
                wait_for(lambda output=output: "waiting for" in output.read_text(), "its word")
                process.terminate()
                assert process.wait(timeout=PATIENCE_S) == 143


def test_its_status_page_is_where_it_says(fleet: Fleet) -> None:
    fleet.start("--resume", "--global-steps", str(SECOND))
    fleet.wait_until(lambda: fleet.global_step() >= FIRST + 10, "the resumed run to go on")
    (page,) = fleet.state().pages
    assert fleet.text().count(f"status page: {page}") == 1
    with urllib.request.urlopen(f"{page}status.json", timeout=PATIENCE_S) as answer:
        facts = json.load(answer)
    assert facts["status"]["global_step"] >= FIRST + 10
    assert facts["status"]["learners"][0]["learner_id"] == "learner-0"


def test_a_killed_run_leaves_no_orphan(fleet: Fleet) -> None:
    """kill -9 of `diloco run`: synchronizer, evaluator and learner end with it."""
    starts = fleet.lines("synchronizer", "start")
    assert [start["global_step"] for start in starts] == [0, FIRST]
    assert len(fleet.pids()) == 4
    fleet.interrupt(signal.SIGKILL)
    assert fleet.wait() == -signal.SIGKILL
    fleet.close()


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Puts a disk of its own under a folder; its content stays."""
    copy = folder.with_name(folder.name + "-copy")
    shutil.copytree(folder, copy)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        shutil.copytree(copy, folder, dirs_exist_ok=True)
        yield
        shutil.rmtree(copy)
        shutil.copytree(folder, copy)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.copytree(copy, folder, dirs_exist_ok=True)


def test_a_full_disk_stops_merging_alone_and_damages_nothing(fleet: Fleet) -> None:
    """The store says DISK_FULL and tries again; the learner trains on; with room it all goes on."""
    log = fleet.files.log_of("synchronizer")
    with small_disk(fleet.files.store, 64 << 20):
        fleet.start("--resume")
        before = fleet.global_step()
        fleet.wait_until(lambda: fleet.global_step() >= before + 5, "the resumed run to go on")
        filler = fleet.files.store / "filler"
        fill(filler)
        fleet.wait_until(lambda: "DISK_FULL" in log.read_text(), "the synchronizer to say it")
        stuck, steps = fleet.global_step(), len(fleet.steps(0))
        fleet.wait_until(lambda: len(fleet.steps(0)) >= steps + 20, "the learner to train on")
        assert fleet.global_step() <= stuck + 1, "nothing is published that is not persisted"
        waits = {wait["reason"]: wait["detail"] for wait in fleet.status()["waits"]}
        assert "the store failed" in waits["persist"]
        filler.unlink()
        assert fleet.wait() == 0, fleet.text()
    report = fleet.report()
    assert report["rounds"] == SECOND
    assert report["rounds_lost"] == 0
    assert report["restarts_by_process"] == {}, fleet.text()


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 16, 1 << 9, 1):
        try:
            while True:
                os.write(descriptor, b"x" * size)
        except OSError:
            continue
    os.close(descriptor)


def test_a_damaged_store_is_refused_and_left_alone(fleet: Fleet) -> None:
    """One flipped byte in the newest fragment: which file, what to do, and nothing is written."""
    terms = sorted((fleet.files.store / "group-000").glob("term-*"))
    newest = max(
        terms[-1].glob("fragment-*.safetensors"), key=lambda path: path.stem.rpartition("-")[2]
    )
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    root = fleet.files.root
    before = contents(fleet.files.store)
    result = diloco("run", "--run-dir", str(root), "--resume", "--global-steps", "1000")
    assert_refused(result, "STORE_CORRUPT", newest.name, code=74)
    assert contents(fleet.files.store) == before
    assert not fleet.pids()
    ends = {entry.name: entry.exit_code for entry in fleet.state().processes}
    assert ends == {"synchronizer": 74, "evaluator": 143, "learner-0": 143}, "nobody was killed"


def contents(store: Path) -> dict[Path, bytes]:
    """What is in a store, without the name of who locked it last."""
    files = (path for path in store.rglob("*") if path.is_file() and path.name != "lock")
    return {path: path.read_bytes() for path in files}
