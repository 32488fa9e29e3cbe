"""Simulated fleets under faults at every effect: the long form.

Runs 100,000 seeds on all cores. Each is a fleet of its own in virtual time, made of the shipped
cores, stores and keepers; an oracle checks what must never happen (docs/architecture.md,
"Simulation"). Prints faults by kind, and what became of the rounds. Exit code 1, with the seeds,
if any world fails.

What has held is written to simulation.json beside this file as it goes; a second call with the same
code, Python and torch goes on from there, any other starts anew.

    make proof-simulation                                # an hour or two on two cores
    make proof-simulation ARGS="--seeds 2000 --first 7"
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path

import click
import torch

from diloco_fleet.simulation.faults import Profile
from diloco_fleet.simulation.world import Outcome, run_world

CHUNK = 500
MOST_FAILURES = 20

ROOT = Path(__file__).parents[2]
STATE = Path(__file__).with_suffix(".json")
CODE = (
    "protos/decoupled_diloco",
    "synchronizer_server",
    "learner_client",
    "diloco_fleet/simulation",
)
"""What worlds are made of; another byte there is another proof."""


@dataclass(slots=True)
class Sums:
    """Sums over worlds.

    Attributes:
        chunks: by first seed, how many worlds of each chunk have held.
        worlds: number by kind.
        tally: faults and outcomes, by name.
        rounds: published.
        terms: led.
        lost: versions held by a learner and lost, by mode of replication.
        participation: sum over worlds and their number, by kind.
        measured_h: the same of measured H over its setting.
        longest_gap_s: longest time without a merge, virtual seconds, by kind.
        seconds: that the processes worked.
    """

    chunks: dict[str, int] = field(default_factory=dict)
    worlds: Counter[str] = field(default_factory=Counter)
    tally: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    terms: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    participation: dict[str, tuple[float, int]] = field(default_factory=dict)
    measured_h: dict[str, tuple[float, int]] = field(default_factory=dict)
    longest_gap_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Takes a world."""
        kind = str(outcome.profile)
        self.worlds[kind] += 1
        self.tally += outcome.tally
        self.rounds += outcome.num_rounds
        self.terms += outcome.num_terms
        self.lost[outcome.replication] += outcome.rounds_lost
        self.longest_gap_s[kind] = max(self.longest_gap_s.get(kind, 0.0), outcome.longest_gap_s)
        _add(self.participation, kind, outcome.participation)
        _add(self.measured_h, kind, outcome.measured_h)

    def to_json(self, code: str) -> str:
        """What a later call goes on from."""
        sums = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({"code": code, "sums": sums}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, code: str) -> Sums:
        """What an earlier call of the same code came to; empty where it was another's."""
        kept = json.loads(text) if text else {}
        if kept.get("code") != code:
            return cls()
        sums = cls(**kept["sums"])
        for name in ("worlds", "tally", "lost"):
            setattr(sums, name, Counter(getattr(sums, name)))
        return sums


def _add(sums: dict[str, tuple[float, int]], kind: str, value: float) -> None:
    if value:
        total, number = sums.get(kind, (0.0, 0))
        sums[kind] = (total + value, number + 1)


def code_digest() -> str:
    """Names the code, the Python and the torch that the worlds run on."""
    digest = hashlib.sha256(f"{platform.python_version()} {torch.__version__}".encode())
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def run_chunk(first: int, number: int) -> tuple[list[Outcome], list[str], float]:
    """Runs some seeds; returns what became of them, what failed, and the seconds it took."""
    began, outcomes, failures = time.monotonic(), [], []
    for seed in range(first, first + number):
        try:
            outcomes.append(run_world(seed))
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            failures.append(f"{type(error).__name__}: {error}\n{notes}")
    return outcomes, failures, time.monotonic() - began


def run_all(sums: Sums, first: int, seeds: int, code: str) -> Iterator[str]:
    """Runs what is missing, and yields what fails; ``sums`` and the state grow meanwhile."""
    numbers = {at: min(CHUNK, first + seeds - at) for at in range(first, first + seeds, CHUNK)}
    due = {at: number for at, number in numbers.items() if sums.chunks.get(str(at)) != number}
    began, total, done, num_failed = time.monotonic(), sum(due.values()), 0, 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        # Last first: what a proof that was cut short has not come to.
        work = {at: pool.submit(run_chunk, at, due[at]) for at in reversed(due)}
        for at, chunk in work.items():
            outcomes, failures, seconds = chunk.result()
            yield from failures
            num_failed += len(failures)
            if num_failed >= MOST_FAILURES:
                pool.shutdown(cancel_futures=True)
                return
            if not failures:
                for outcome in outcomes:
                    sums.add(outcome)
                sums.chunks[str(at)], sums.seconds = due[at], sums.seconds + seconds
                STATE.write_text(sums.to_json(code))
            done += due[at]
            rest_s = (time.monotonic() - began) * (total - done) / done
            print(f"{done} of {total}, {num_failed} failed, {rest_s:.0f} s to go", file=sys.stderr)


def mean(total: tuple[float, int]) -> float:
    """A sum over its number; 0 of none."""
    return total[0] / total[1] if total[1] else 0.0


def show(sums: Sums) -> None:
    """Prints the sums."""
    number = sum(sums.worlds.values())
    print(f"{number} worlds, {sums.seconds:.0f} s of one core")
    print(f"rounds published: {sums.rounds}; terms led: {sums.terms}")
    for mode in ("one", "off", "one-or-degrade"):
        print(f"  versions held by a learner and lost, replication {mode}: {sums.lost[mode]}")
    print("by kind of world: participation, measured H over its setting, longest time, virtual")
    print("seconds, without a merge (calm worlds have no fault at all)")
    for kind in Profile:
        if sums.worlds[kind]:
            print(
                f"  {kind:16} {sums.worlds[kind]:7} worlds"
                f"  {mean(sums.participation.get(kind, (0.0, 0))):.3f}"
                f"  {mean(sums.measured_h.get(kind, (0.0, 0))):.3f}"
                f"  {sums.longest_gap_s.get(kind, 0.0):6.2f}"
            )
    print("faults and outcomes:")
    for name, count in sorted(sums.tally.items()):
        print(f"  {name:36} {count}")


@click.command()
@click.option("--seeds", default=100_000, show_default=True, help="how many")
@click.option("--first", default=1_000_000, show_default=True, help="the first one")
def main(seeds: int, first: int) -> None:
    """Runs them, and fails loudly."""
    code = code_digest()
    sums = Sums.from_json(STATE.read_text() if STATE.exists() else "", code)
    kept = {str(at) for at in range(first, first + seeds, CHUNK)}
    if not set(sums.chunks) <= kept:
        sums = Sums()  # of other seeds
    num_failed = 0
    for failure in run_all(sums, first, seeds, code):
        num_failed += 1
        print(f"\n{failure}", flush=True)
    show(sums)
    print(f"code {code[:16]}, Python {platform.python_version()}, torch {torch.__version__}")
    if num_failed:
        raise SystemExit(f"{num_failed} worlds failed")
    print("no invariant was broken")


if __name__ == "__main__":
    main()
