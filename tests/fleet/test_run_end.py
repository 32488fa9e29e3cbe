"""The ends of a run: the report at its end, and what ``--resume`` finds complete."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from test_fleet_cli import diloco

from diloco_fleet.commands import run as run_module
from diloco_fleet.run_files import RunFiles
from diloco_fleet.screen import LineScreen


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_silent_time_of_the_report_is_announced(somewhere: Path) -> None:
    said: list[str] = []
    run_module.finish(RunFiles(somewhere), LineScreen(said.append), "complete")
    assert said[0].endswith(" writing the report, picture and sample")
    assert " no report: " in said[1], "there is no run here"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_interrupts_the_report_hears_that_the_run_is_complete(
    somewhere: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    said: list[str] = []
    monkeypatch.setattr(run_module, "make_report", lambda _: signal.raise_signal(number))
    before = signal.getsignal(number)
    run_module.finish(RunFiles(somewhere), LineScreen(said.append), "complete")
    assert "the run is complete" in said[-1]
    assert f"`diloco report {somewhere}`" in said[-1]
    assert signal.getsignal(number) is before


ROUND = {
    "kind": "round",
    "time": 1,
    "global_step": 8,
    "fragment": 0,
    "contributors": [],
    "live": [],
    "tokens": 0,
    "measured_h": None,
    "bytes_up": 0,
    "bytes_down": 0,
}
END = {"kind": "end", "time": 2, "outcome": "complete"}


def write_metrics(files: RunFiles, process: str, *records: dict[str, Any]) -> None:
    files.metrics.mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    files.metrics_of(process).write_text(text)


@pytest.mark.parametrize(("total", "complete"), [(9, False), (8, True), (0, False)])
def test_a_run_is_complete_with_the_round_of_the_last_global_step(
    somewhere: Path, total: int, complete: bool
) -> None:
    files = RunFiles(somewhere)
    assert not run_module.is_complete(files, total)
    write_metrics(files, "synchronizer", ROUND)
    assert run_module.is_complete(files, total) is complete


def complete_run(root: Path) -> RunFiles:
    files = RunFiles(root)
    files.model.mkdir(parents=True)
    files.config.write_text("[run]\ntotal_global_steps = 8\n")
    write_metrics(files, "synchronizer", ROUND)
    write_metrics(files, "fleet", {"kind": "start", "time": 0}, END)
    return files


def test_resume_of_a_complete_run_starts_nothing_and_makes_a_missing_report(
    somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = complete_run(somewhere / "runs" / "amber")
    monkeypatch.setattr(run_module, "_run", lambda *_: pytest.fail("a fleet was started"))
    made: list[Path] = []
    monkeypatch.setattr(run_module, "finish", lambda files, *_: made.append(files.root))
    for _ in range(2):
        result = diloco("run", "--resume", "--name", "amber")
        assert (result.exit_code, result.stderr) == (0, "")
        assert "already complete at global step 8" in result.output
        files.report.touch()
    assert made == [files.root], "only where it was missing"
    assert not files.store.exists()


def test_a_run_that_was_complete_and_is_not_any_more_goes_on(somewhere: Path) -> None:
    """More global steps, a session after it that was killed, or no model."""
    files = complete_run(somewhere)
    assert run_module.has_ended(files, 8)
    assert not run_module.has_ended(files, 9)
    write_metrics(files, "fleet", END, {"kind": "start", "time": 3})
    assert not run_module.has_ended(files, 8)
    write_metrics(files, "fleet", END)
    files.model.rmdir()
    assert not run_module.has_ended(files, 8)
