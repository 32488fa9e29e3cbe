"""A fleet on this machine, undisturbed and under blows, side by side: the long form.

Two runs of `diloco run`, four learners each, the default corpus, the same settings. The second one
has a learner at half speed, loses three learners to kill -9 and its synchronizer to kill -9 and to
SIGTERM. Prints what both came to, and of every blow what the others did meanwhile; writes
fleet.json beside this file. Exit code 1 if anything is not as promised.

    make proof-fleet
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click
import torch

from diloco_fleet.metrics import SYNCHRONIZER, Mark, Round, RunMetrics, parse_metrics, read_metrics
from diloco_fleet.run_files import RunFiles, read_fleet

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NUM_LEARNERS = 4
HALF_SPEED = "2:0.5"
IN_LINE_NATS = 0.15
TAIL_BYTES = 65536
FIGURES = (
    *("outcome", "evaluation_loss_before", "evaluation_loss_after", "tokens", "tokens_per_second"),
    *("rounds", "rounds_lost", "participation", "measured_h", "goodput", "uptime", "window_s"),
    *("contributors_histogram", "contributions", "bytes_per_parameter_per_sync"),
    *("restarts", "restarts_by_process"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """What is done to the fleet, and when: at a share of its global steps."""

    at: float
    process: str
    number: signal.Signals


BLOWS = (
    Blow(at=0.15, process="learner-1", number=signal.SIGKILL),
    Blow(at=0.30, process=SYNCHRONIZER, number=signal.SIGKILL),
    Blow(at=0.45, process="learner-3", number=signal.SIGKILL),
    Blow(at=0.60, process=SYNCHRONIZER, number=signal.SIGTERM),
    Blow(at=0.75, process="learner-0", number=signal.SIGKILL),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What a blow did, read from the metrics.

    Attributes:
        process: what was struck.
        signal: with what.
        global_step: last committed global step at that moment.
        away_s: from the blow until the process was back: a learner had joined, a synchronizer
            had started.
        steps_meanwhile: inner steps of the learners that were not struck, until then.
        rounds_meanwhile: rounds committed until then.
        steps_to_next_merge: inner steps of survivors from the blow to the first merge that began
            after it (the second one committed); 0 for a synchronizer.
        waits_naming_it: waits that were told after its death was noticed and that name it.
        contributions_after: rounds to which it contributed once back; for a synchronizer, the
            learners that contributed to its rounds.
    """

    process: str
    signal: str
    global_step: int
    away_s: float
    steps_meanwhile: int
    rounds_meanwhile: int
    steps_to_next_merge: int
    waits_naming_it: int
    contributions_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A blow that was dealt."""

    blow: Blow
    time: float
    global_step: int


def start_run(root: Path, arguments: list[str], output: BinaryIO) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("protos", "."))
    command = [sys.executable, "-m", "diloco_fleet.cli", "run", "--run-dir", str(root)]
    return subprocess.Popen(
        [*command, "--learners", str(NUM_LEARNERS), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def committed(files: RunFiles) -> int:
    """The last committed global step that was written down; 0 before the first."""
    try:
        with files.metrics_of(SYNCHRONIZER).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            tail = file.read().decode(errors="replace")
    except FileNotFoundError:
        return 0
    rounds = parse_metrics({SYNCHRONIZER: tail}).rounds
    return rounds[-1].global_step if rounds else 0


def strike(files: RunFiles, blow: Blow, global_step: int) -> Strike | None:
    """Deals a blow; None while the process is not there to be struck."""
    pid = next(x.pid for x in read_fleet(files.fleet).processes if x.name == blow.process)
    if pid is None:
        return None
    now = time.time()
    os.kill(pid, blow.number)
    return Strike(blow=blow, time=now, global_step=global_step)


def recovered(files: RunFiles, struck: Strike) -> bool:
    """Whether what was struck takes part again, so that blows do not blur into one another."""
    after = aftermath(read_metrics(files.metrics), struck)
    wanted = NUM_LEARNERS if struck.blow.process == SYNCHRONIZER else 1
    return after.contributions_after >= wanted


def play(root: Path, arguments: list[str], num_steps: int, blows: tuple[Blow, ...]) -> list[Strike]:
    """Runs a fleet to its end and deals the blows at their times; what it says lies beside it."""
    files, strikes, left = RunFiles(root), [], list(blows)
    root.parent.mkdir(parents=True, exist_ok=True)
    said = root.with_suffix(".txt")
    print(f"{root.name}: diloco run {' '.join(arguments)}")
    with said.open("wb") as output:
        process = start_run(root, [*arguments, "--global-steps", str(num_steps)], output)
    try:
        while process.poll() is None:
            time.sleep(0.5)
            now = committed(files)
            due = bool(left) and now >= left[0].at * num_steps
            if due and (not strikes or recovered(files, strikes[-1])):
                dealt = strike(files, left[0], now)
                if dealt is not None:
                    print(f"  {left[0].number.name} to {left[0].process} at global step {now}")
                    strikes.append(dealt)
                    left.pop(0)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        print(said.read_text(errors="replace"))
        raise SystemExit(f"diloco run ended with exit code {process.returncode}")
    return strikes


def aftermath(metrics: RunMetrics, struck: Strike) -> Aftermath:
    """Reads what followed a blow."""
    name, when = struck.blow.process, struck.time
    is_learner = name != SYNCHRONIZER
    noticed, back = (
        learner_gap(metrics, name, when) if is_learner else (when, started(metrics, when))
    )
    after = [x for x in metrics.rounds if x.time > when]
    waits = [
        mark
        for mark in metrics.marks_of(SYNCHRONIZER, "wait")
        if noticed < mark.time < back and name in str(mark.values.get("detail", ""))
    ]
    rounds_back = [x for x in metrics.rounds if x.time > back]
    helpers = {learner for x in rounds_back for learner in x.contributors}
    next_merge = after[1].time if len(after) > 1 else when
    return Aftermath(
        process=name,
        signal=struck.blow.number.name,
        global_step=struck.global_step,
        away_s=back - when,
        steps_meanwhile=num_steps_of_others(metrics, name, when, back),
        rounds_meanwhile=sum(x.time < back for x in after),
        steps_to_next_merge=(
            num_steps_of_others(metrics, name, when, next_merge) if is_learner else 0
        ),
        waits_naming_it=len(waits),
        contributions_after=contributions(rounds_back, name) if is_learner else len(helpers),
    )


def learner_gap(metrics: RunMetrics, name: str, when: float) -> tuple[float, float]:
    """When a learner's death was noticed, and when it had joined again."""
    marks = [
        mark
        for mark in metrics.marks_of(SYNCHRONIZER, "learner")
        if mark.time > when and mark.values.get("learner_id") == name
    ]
    return first_time(marks, {"disconnected", "gone"}), first_time(marks, {"joined"})


def first_time(marks: list[Mark], states: set[str]) -> float:
    found = (mark.time for mark in marks if mark.values.get("state") in states)
    return next(found, float("inf"))


def started(metrics: RunMetrics, when: float) -> float:
    starts = metrics.marks_of(SYNCHRONIZER, "start")
    return next((mark.time for mark in starts if mark.time > when), float("inf"))


def num_steps_of_others(metrics: RunMetrics, name: str, begin: float, end: float) -> int:
    others = (steps for learner, steps in metrics.steps.items() if learner != name)
    return sum(begin < step.time < end for steps in others for step in steps)


def contributions(rounds: list[Round], name: str) -> int:
    return sum(name in x.contributors for x in rounds)


def problems_of_undisturbed(report: dict[str, Any]) -> list[str]:
    interval = report["settings"]["run"]["sync_interval"]
    checks = {
        "the loss before is not about 5.5": abs(report["evaluation_loss_before"] - 5.5) < 0.3,
        "the loss after is not below 2.6": report["evaluation_loss_after"] < 2.6,
        "participation is below 0.9": report["participation"] >= 0.9,
        "measured H is not within 20 %": abs(report["measured_h"] / interval - 1) <= 0.2,
        "rounds were lost": report["rounds_lost"] == 0,
        "something was restarted": report["restarts"] == 0,
    }
    return [f"undisturbed: {problem}" for problem, fine in checks.items() if not fine]


def problems_of_disturbed(
    report: dict[str, Any], other: dict[str, Any], found: list[Aftermath]
) -> list[str]:
    worse = report["evaluation_loss_after"] - other["evaluation_loss_after"]
    checks = {
        f"the loss is {worse:.3f} nats above the undisturbed run's": worse <= IN_LINE_NATS,
        "rounds were lost": report["rounds_lost"] == 0,
        "not every blow was dealt": len(found) == len(BLOWS),
        "the restarts are not counted": report["restarts"] == len(BLOWS),
        "a learner never contributed": len(report["contributions"]) == NUM_LEARNERS,
    }
    for entry in found:
        where = f"{entry.signal} to {entry.process}: "
        checks[where + "the others did not step on"] = entry.steps_meanwhile > 0
        checks[where + "a wait names it"] = entry.waits_naming_it == 0
        if entry.process == SYNCHRONIZER:
            everybody = entry.contributions_after == NUM_LEARNERS
            checks[where + "not every learner rejoined"] = everybody
        else:
            checks[where + "merges stopped"] = entry.rounds_meanwhile > 0
            checks[where + "no step up to the next merge"] = entry.steps_to_next_merge > 0
            checks[where + "it never contributed again"] = entry.contributions_after > 0
    return [f"disturbed: {problem}" for problem, fine in checks.items() if not fine]


def show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {show(entry)}" for key, entry in value.items()) or "none"
    return str(value)


def print_figures(undisturbed: dict[str, Any], disturbed: dict[str, Any]) -> None:
    print(f"\n{'':30}{'undisturbed':>34}  {'disturbed':>34}")
    rows = [(name, undisturbed[name], disturbed[name]) for name in FIGURES]
    rows += [
        (f"step_overhead.{key}", undisturbed["step_overhead"][key], disturbed["step_overhead"][key])
        for key in ("median_s", "p99_s", "share")
    ]
    for name, left, right in rows:
        if isinstance(left, dict) or isinstance(right, dict):
            print(f"{name}\n{'':4}undisturbed  {show(left)}\n{'':4}disturbed    {show(right)}")
        else:
            print(f"{name:30}{show(left):>34}  {show(right):>34}")


def print_blows(found: list[Aftermath]) -> None:
    print("\nblow, at global step, seconds away; what the others did meanwhile; what followed")
    for entry in found:
        what = f"{entry.signal} {entry.process}"
        print(
            f"{what:26}{entry.global_step:9}{entry.away_s:9.1f}"
            f"{entry.steps_meanwhile:16} steps{entry.rounds_meanwhile:5} rounds"
            f"{entry.contributions_after:11} "
            f"{'learners' if entry.process == SYNCHRONIZER else 'contributions'}"
            f", {entry.waits_naming_it} waits naming it"
        )


@click.command(help=__doc__)
@click.option("--global-steps", default=800, show_default=True, help="length of both runs")
@click.option("--pace", default=0.2, show_default=True, help="shortest inner step, seconds")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="settings, TOML")
@click.option("--keep", type=click.Path(path_type=Path), help="folder that keeps both runs")
@click.option("--write/--no-write", default=True, help="write fleet.json")
def main(
    global_steps: int, pace: float, config: Path | None, keep: Path | None, write: bool
) -> None:
    arguments = ["--pace", str(pace)]
    arguments += ["--config", str(config.resolve())] if config else []
    with tempfile.TemporaryDirectory(prefix="proof-fleet-") as folder:
        quiet, rough = (
            Path(keep or folder).resolve() / name for name in ("undisturbed", "disturbed")
        )
        play(quiet, arguments, global_steps, ())
        slow = [*arguments, "--slow-learner", HALF_SPEED]
        strikes = play(rough, slow, global_steps, BLOWS)
        undisturbed = json.loads((quiet / "report.json").read_text())
        disturbed = json.loads((rough / "report.json").read_text())
        metrics = read_metrics(RunFiles(rough).metrics)
    found = [aftermath(metrics, struck) for struck in strikes]
    problems = problems_of_undisturbed(undisturbed)
    problems += problems_of_disturbed(disturbed, undisturbed, found)
    about = (
        f"{NUM_LEARNERS} learners, {global_steps} global steps, pace {pace:g} s, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}; "
        f"disturbed: learner {HALF_SPEED} of its speed and the blows listed"
    )
    print(f"\n{about}")
    print_figures(undisturbed, disturbed)
    print_blows(found)
    if write:
        content = {
            "about": about,
            "undisturbed": undisturbed,
            "disturbed": disturbed,
            "blows": [asdict(entry) for entry in found],
            "problems": problems,
        }
        (HERE / "fleet.json").write_text(json.dumps(content, indent=1) + "\n")
    print("\n" + ("\n".join(problems) or "everything as promised"))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
