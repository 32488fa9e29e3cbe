"""Fault points: nothing without the variable; with it, once, counted, and by the right process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco import fault_points
from decoupled_diloco.config import check_environ
from decoupled_diloco.errors import EXIT_INTERNAL, Reason, UsageError
from decoupled_diloco.fault_points import (
    VARIABLE,
    Fault,
    FaultAction,
    FaultPoint,
    Faults,
    crosses_half,
    for_process,
)

KILL = Fault(name="f", point=FaultPoint.BEFORE_PERSIST, action=FaultAction.KILL)


def script(folder: Path, *faults: Fault, process: str = "") -> Faults:
    return Faults(log=folder / "faults.jsonl", faults=faults, process=process)


def hits(folder: Path) -> list[str]:
    log = folder / "faults.jsonl"
    return [json.loads(x)["name"] for x in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    fault_points.arm({})


def recording(folder: Path, *faults: Fault, process: str = "") -> tuple[Faults, list[str]]:
    done: list[str] = []
    made = script(folder, *faults, process=process)
    made.act = lambda fault: done.append(fault.name)
    return made, done


def test_without_the_variable_no_point_does_anything(tmp_path: Path) -> None:
    fault_points.arm({})
    for point in FaultPoint:
        fault_points.reach(point)


def test_a_script_survives_the_way_through_the_environment(tmp_path: Path) -> None:
    fault = Fault(
        name="a", point=FaultPoint.MID_PUSH, action=FaultAction.HANG, nth=3, process="learner-*",
        hang_s=0.5, after=tmp_path / "go",
    )  # fmt: skip
    again = Faults.parse(for_process(script(tmp_path, fault, KILL).to_text(), "learner-1"))
    assert list(again.faults) == [fault, KILL]
    assert again.process == "learner-1"
    check_environ({VARIABLE: "x"}, [])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"log": "x", "faults": [{"name": "a"}]}', "[" * 9]
)
def test_what_is_no_script_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no script of faults") as caught:
        Faults.parse(text)
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_the_nth_time_counts_once_over_all_lives(tmp_path: Path) -> None:
    fault = Fault(name="f", point=FaultPoint.MID_WATCH, action=FaultAction.KILL, nth=3)
    faults, done = recording(tmp_path, fault)
    for expected in ([], [], ["f"], ["f"]):
        faults.reach(FaultPoint.MID_WATCH)
        faults.reach(FaultPoint.MID_PUSH)
        assert done == expected
    next_life, done_again = recording(tmp_path, fault)
    for _ in range(5):
        next_life.reach(FaultPoint.MID_WATCH)
    assert (done_again, hits(tmp_path)) == ([], ["f"])


def test_only_the_named_process_counts(tmp_path: Path) -> None:
    fault = Fault(name="f", point=FaultPoint.MID_PUSH, action=FaultAction.KILL, process="learner-*")
    synchronizer, at_synchronizer = recording(tmp_path, fault, process="synchronizer-0")
    synchronizer.reach(FaultPoint.MID_PUSH)
    assert not at_synchronizer
    learner, at_learner = recording(tmp_path, fault, process="learner-12")
    learner.reach(FaultPoint.MID_PUSH)
    assert at_learner == ["f"]


def test_a_file_arms_a_fault_and_may_name_the_process(tmp_path: Path) -> None:
    go = tmp_path / "go"
    fault = Fault(name="f", point=FaultPoint.AFTER_PERSIST, action=FaultAction.STOP, after=go)
    faults, done = recording(tmp_path, fault, process="synchronizer-1")
    faults.reach(FaultPoint.AFTER_PERSIST)
    go.write_text("synchronizer-0")
    faults.reach(FaultPoint.AFTER_PERSIST)
    assert not done
    go.write_text("synchronizer-1")
    faults.reach(FaultPoint.AFTER_PERSIST)
    assert done == ["f"]


@pytest.mark.parametrize(
    ("action", "code"),
    [(FaultAction.KILL, -signal.SIGKILL), (FaultAction.EXIT, EXIT_INTERNAL), (FaultAction.HANG, 0)],
)
def test_a_process_does_what_its_environment_says(
    tmp_path: Path, action: FaultAction, code: int
) -> None:
    program = (
        "import os\nfrom decoupled_diloco import fault_points as f\nf.arm(os.environ)\n"
        "f.reach(f.FaultPoint.BEFORE_PERSIST)\nprint('went on')"
    )
    fault = Fault(name="f", point=FaultPoint.BEFORE_PERSIST, action=action, hang_s=0.01)
    environ = {**os.environ, VARIABLE: script(tmp_path, fault).to_text()}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert ("went on" in done.stdout) is (code == 0)
    assert hits(tmp_path) == ["f"]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_exactly_one_chunk_of_a_transfer_crosses_its_half(total: int, size: int) -> None:
    offsets = range(0, total, size)
    crossing = [x for x in offsets if crosses_half(x, min(size, total - x), total)]
    assert len(crossing) == 1
    assert crossing[0] <= total / 2
