"""Simulated fleets under faults at every effect: the long form.

Runs 100,000 seeds on all cores. Each is a fleet of its own in virtual time, made of the shipped
cores, stores and keepers; an oracle checks what must never happen (docs/architecture.md,
"Simulation"). Prints faults by kind, and what became of the rounds. Exit code 1, with the seeds,
if any world fails.

    make proof-simulation
    make proof-simulation ARGS="--seeds 2000 --first 7"
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import click

from diloco_fleet.simulation.faults import Profile
from diloco_fleet.simulation.world import Outcome, run_world

CHUNK = 50
MOST_FAILURES = 20
PROGRESS = 1000


@dataclass(slots=True)
class Sums:
    """Sums over worlds."""

    worlds: Counter[str] = field(default_factory=Counter)
    tally: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    terms: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    participation: dict[str, list[float]] = field(default_factory=dict)
    measured_h: dict[str, list[float]] = field(default_factory=dict)
    longest_gap_s: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Takes a world."""
        kind = str(outcome.profile)
        self.worlds[kind] += 1
        self.tally += outcome.tally
        self.rounds += outcome.num_rounds
        self.terms += outcome.num_terms
        self.lost[outcome.replication] += outcome.rounds_lost
        self.longest_gap_s[kind] = max(self.longest_gap_s.get(kind, 0.0), outcome.longest_gap_s)
        if outcome.participation:
            self.participation.setdefault(kind, []).append(outcome.participation)
        if outcome.measured_h:
            self.measured_h.setdefault(kind, []).append(outcome.measured_h)


def run_chunk(first: int, number: int) -> tuple[list[Outcome], list[str]]:
    """Runs some seeds; returns what became of them, and what failed."""
    outcomes, failures = [], []
    for seed in range(first, first + number):
        try:
            outcomes.append(run_world(seed))
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            failures.append(f"{type(error).__name__}: {error}\n{notes}")
    return outcomes, failures


def mean(values: list[float]) -> float:
    """Their mean; 0 of none."""
    return sum(values) / len(values) if values else 0.0


def show(sums: Sums, seconds: float) -> None:
    """Prints the sums."""
    number = sum(sums.worlds.values())
    print(f"{number} worlds in {seconds:.0f} s on {os.cpu_count()} cores")
    print(f"rounds published: {sums.rounds}; terms led: {sums.terms}")
    for mode in ("one", "off", "one-or-degrade"):
        print(f"  versions held by a learner and lost, replication {mode}: {sums.lost[mode]}")
    print("by kind of world: participation, measured H over its setting, longest time, virtual")
    print("seconds, without a merge (calm worlds have no fault at all)")
    for kind in Profile:
        if sums.worlds[kind]:
            print(
                f"  {kind:16} {sums.worlds[kind]:7} worlds"
                f"  {mean(sums.participation.get(kind, [])):.3f}"
                f"  {mean(sums.measured_h.get(kind, [])):.3f}"
                f"  {sums.longest_gap_s.get(kind, 0.0):6.2f}"
            )
    print("faults and outcomes:")
    for name, count in sorted(sums.tally.items()):
        print(f"  {name:36} {count}")


def tell_progress(sums: Sums, seeds: int, seconds: float) -> None:
    """Says on standard error, once per PROGRESS worlds, how far it is; the output stays clean."""
    done = sum(sums.worlds.values()) + len(sums.failures)
    if done % PROGRESS == 0:
        rest_s = seconds * (seeds - done) / done
        failed = len(sums.failures)
        print(f"{done} of {seeds}, {failed} failed, {rest_s:.0f} s to go", file=sys.stderr)


@click.command()
@click.option("--seeds", default=100_000, show_default=True, help="how many")
@click.option("--first", default=1_000_000, show_default=True, help="the first one")
def main(seeds: int, first: int) -> None:
    """Runs them, and fails loudly."""
    began, sums = time.monotonic(), Sums()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        chunks = [
            pool.submit(run_chunk, at, min(CHUNK, first + seeds - at))
            for at in reversed(range(first, first + seeds, CHUNK))
        ]
        for chunk in chunks:
            outcomes, failures = chunk.result()
            for outcome in outcomes:
                sums.add(outcome)
            sums.failures += failures
            for failure in failures:
                print(f"\n{failure}", flush=True)
            tell_progress(sums, seeds, time.monotonic() - began)
            if len(sums.failures) >= MOST_FAILURES:
                pool.shutdown(cancel_futures=True)
                break
    show(sums, time.monotonic() - began)
    if sums.failures:
        raise SystemExit(f"{len(sums.failures)} worlds failed")
    print("no invariant was broken")


if __name__ == "__main__":
    main()
