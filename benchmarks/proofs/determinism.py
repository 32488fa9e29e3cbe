"""Two fleets with the same seed and schedule end with the same bits: the long form.

Every fleet runs twice, each time in a process of its own with another order of hashes. Its
schedule, made from the seed, has uneven speeds, deaths and returns of learners, and kills and
drains of the synchronizer; one fleet is undisturbed. Prints the hashes side by side, with
participation and measured H; writes determinism.json and determinism.md beside this file.

    make proof-determinism
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch

from decoupled_diloco.settings import RunSettings
from diloco_fleet.scripted import run_fleet
from diloco_fleet.scripted_data import (
    Action,
    FleetResult,
    rough_schedule,
    schedule_from_lines,
    schedule_to_lines,
    steady_schedule,
)
from diloco_fleet.scripted_learner import FleetSpec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NUM_LEARNERS = 4
SETTINGS = RunSettings(num_learners=NUM_LEARNERS, num_fragments=8, sync_interval=8)
UNDISTURBED = 0
NUM_FLEETS = 6
NUM_TICKS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is shown of one run of a fleet, in one process."""

    sha256: str
    published_sha256: tuple[str, ...]
    models_sha256: tuple[str, ...]
    num_rounds: int
    num_terms: int
    participation: float
    measured_h: float
    first_loss: float
    last_loss: float
    copies_equal: bool
    virtual_s: float


def schedule_of(seed: int, num_ticks: int) -> tuple[Action, ...]:
    if seed == UNDISTURBED:
        return steady_schedule(NUM_LEARNERS, num_ticks)
    return rough_schedule(seed, NUM_LEARNERS, num_ticks, fault_rate=0.12)


def outcome_of(result: FleetResult) -> Outcome:
    there = [x for x in result.learners if x.is_present]
    return Outcome(
        sha256=result.sha256,
        published_sha256=result.published_sha256,
        models_sha256=tuple(x.model_sha256 for x in there),
        num_rounds=len(result.rounds),
        num_terms=len({x.term for x in result.rounds}),
        participation=result.participation,
        measured_h=result.measured_h,
        first_loss=max(x.losses[0] for x in result.learners if x.losses),
        last_loss=mean(mean(x.losses[-8:]) for x in there),
        copies_equal=all(x.published_sha256 == result.published_sha256 for x in there),
        virtual_s=result.virtual_s,
    )


def in_another_process(seed: int, schedule: str, hash_seed: int) -> Outcome:
    """Plays a schedule, given as JSON lines, in a process of its own."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("protos", "."))
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONHASHSEED": str(hash_seed),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.proofs.determinism", "--play", str(seed)],
        input=schedule,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    fields: dict[str, Any] = json.loads(done.stdout)
    for name in ("published_sha256", "models_sha256"):
        fields[name] = tuple(fields[name])
    return Outcome(**fields)


def faults_of(schedule: tuple[Action, ...]) -> str:
    counts = Counter(type(action).__name__ for action in schedule)
    words = {"Kill": "kills", "Leave": "goodbyes", "StopSynchronizer": "synchronizer stops"}
    found = [f"{word} {counts[kind]}" for kind, word in words.items() if counts[kind]]
    return ", ".join(found) or "none"


def problems_of(seed: int, first: Outcome, second: Outcome) -> list[str]:
    found = []
    if first != second:
        found.append(f"fleet {seed}: the two processes differ")
    if not first.copies_equal:
        found.append(f"fleet {seed}: published copies differ between learners and synchronizer")
    if first.last_loss >= first.first_loss - 0.3:
        found.append(f"fleet {seed}: the loss does not fall")
    if seed == UNDISTURBED:
        if first.participation < 0.9:
            found.append(f"fleet {seed}: participation {first.participation:.2f}")
        if abs(first.measured_h / SETTINGS.sync_interval - 1) > 0.2:
            found.append(f"fleet {seed}: measured H {first.measured_h:.2f}")
    return found


def markdown_of(rows: list[dict[str, object]], header: str) -> str:
    lines = [
        "# Determinism",
        "",
        header,
        "",
        "| fleet | faults | rounds | terms | participation | measured H | loss | first process "
        "| second process | same bits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first, second = row["first"], row["second"]
        assert isinstance(first, Outcome)
        assert isinstance(second, Outcome)
        name = "undisturbed" if row["seed"] == UNDISTURBED else f"seed {row['seed']}"
        lines.append(
            f"| {name} | {row['faults']} | {first.num_rounds} | {first.num_terms} "
            f"| {first.participation:.3f} | {first.measured_h:.2f} "
            f"| {first.first_loss:.2f} to {first.last_loss:.2f} "
            f"| `{first.sha256[:16]}` | `{second.sha256[:16]}` "
            f"| {'yes' if first == second else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def prove(seeds: tuple[int, ...], num_ticks: int) -> list[str]:
    rows: list[dict[str, object]] = []
    problems: list[str] = []
    for seed in seeds:
        began = time.monotonic()
        schedule = schedule_of(seed, num_ticks)
        lines = schedule_to_lines(schedule)
        first, second = (in_another_process(seed, lines, hash_seed) for hash_seed in (1, 2))
        problems += problems_of(seed, first, second)
        rows.append({"seed": seed, "faults": faults_of(schedule), "first": first, "second": second})
        print(f"fleet {seed}: {len(schedule)} actions, faults: {faults_of(schedule)}")
        print(f"  {first.sha256}\n  {second.sha256}")
        print(
            f"  {'the same' if first == second else 'DIFFERENT'}; "
            f"participation {first.participation:.3f}, measured H {first.measured_h:.2f} "
            f"(set {SETTINGS.sync_interval}), {first.num_rounds} rounds in "
            f"{first.num_terms} terms, {first.virtual_s:.0f} virtual s in "
            f"{time.monotonic() - began:.0f} s"
        )
    if len({row["first"].sha256 for row in rows}) < len(rows):  # type: ignore[attr-defined]
        problems.append("two fleets of different seeds gave the same result")
    header = (
        f"{NUM_LEARNERS} learners, P = {SETTINGS.num_fragments}, H = {SETTINGS.sync_interval}, "
        f"tau = {SETTINGS.overlap}, K = {SETTINGS.quorum}, {num_ticks} ticks of about one virtual "
        "second; the learners of a disturbed fleet have different speeds. Each fleet ran twice, in "
        "two processes; a hash covers every published copy, every learner's model, every round's "
        "contributors, order and weights, and every loss, bit for bit. Loss in nats per token. "
        f"Made by `make proof-determinism` (Python {platform.python_version()}, torch "
        f"{torch.__version__})."
    )
    write(rows, problems, header)
    return problems


def write(rows: list[dict[str, object]], problems: list[str], header: str) -> None:
    plain = [
        {k: dataclasses.asdict(v) if isinstance(v, Outcome) else v for k, v in row.items()}
        for row in rows
    ]
    text = json.dumps({"about": header, "fleets": plain, "problems": problems}, indent=1)
    (HERE / "determinism.json").write_text(text + "\n")
    (HERE / "determinism.md").write_text(markdown_of(rows, header))


@click.command(help=__doc__)
@click.option("--play", type=int, hidden=True, help="seed of a fleet; its schedule is on stdin")
@click.option("--ticks", default=NUM_TICKS, show_default=True, help="length of a schedule")
@click.option("--fleets", default=NUM_FLEETS, show_default=True, help="how many fleets")
def main(play: int | None, ticks: int, fleets: int) -> None:
    if play is not None:
        # Learners that lose their synchronizer say so; here that is the plan.
        logging.getLogger("learner_client").setLevel(logging.ERROR)
        schedule = schedule_from_lines(sys.stdin.read())
        result = run_fleet(FleetSpec(seed=play, settings=SETTINGS), schedule)
        print(json.dumps(dataclasses.asdict(outcome_of(result))))
        return
    problems = prove(tuple(range(fleets)), ticks)
    print("\n".join(problems) or "all fleets: the same bits twice")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
