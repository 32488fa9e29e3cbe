"""The leader is killed again and again under load: nothing that was published is lost.

Two fleets of real processes with a standby and replication `one`: one is left alone, in the other
the leader is killed (-9) at random points, each time once the standby is in sync. Prints rounds
lost and doubled, the distribution of the time without merging, the time inside learner.step next to
the undisturbed fleet's, network calls of training threads, participation and measured H.

    make proof-failover
    make proof-failover ARGS="--kills 5 --no-write"
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from decoupled_diloco.errors import EXIT_DRAINED
from diloco_fleet.lineage import leaderships, lost_rounds, standing_rounds
from diloco_fleet.metrics import RunMetrics
from diloco_fleet.report import percentile

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "integration"))

from fleet_harness import Fleet, small  # noqa: E402 - the tests' harness is not installed

SLACK_S = 2.0
P99_FACTOR = 2.0
SETTLED_ROUNDS = 8
FIGURES = ("outcome", "rounds", "rounds_lost", "participation", "measured_h", "goodput", "uptime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill of the leader, and what followed.

    Attributes:
        time: unix time.
        process: name of who led.
        without_merging_s: from the last round before to the first round of a later term; None
            where none followed.
        took_over: name of who led next; empty where nobody did.
        steps_meanwhile: inner steps of all learners between those two rounds.
    """

    time: float
    process: str
    without_merging_s: float | None
    took_over: str
    steps_meanwhile: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the metrics of a run say.

    Attributes:
        kills: every kill.
        lost: rounds, as term and global step, that were applied and are not on the lineage.
        doubled: global steps of which learners applied more than one version.
        redone: global steps that were committed and then given up for another commit.
        network_calls: calls of all learners, over lives that ended in order.
        network_calls_in_training: those that a training thread made.
    """

    kills: tuple[Kill, ...]
    lost: tuple[tuple[int, int], ...]
    doubled: tuple[int, ...]
    redone: tuple[int, ...]
    network_calls: int
    network_calls_in_training: int


def look_at(metrics: RunMetrics, kills: Sequence[tuple[float, str]]) -> Evidence:
    """Reads what followed the kills (time, process)."""
    terms = leaderships(metrics)
    versions: dict[tuple[int, int], set[tuple[int, str]]] = defaultdict(set)
    for steps in metrics.steps.values():
        for applied in (entry for step in steps for entry in step.applied):
            key = (applied.fragment, applied.global_step)
            versions[key].add((applied.term, applied.digest))
    standing = set(standing_rounds(metrics.rounds, terms))
    stops = [mark.values for name in metrics.steps for mark in metrics.marks_of(name, "stop")]
    return Evidence(
        kills=tuple(followed(metrics, when, process) for when, process in kills),
        lost=tuple(sorted(lost_rounds(metrics.rounds, terms, metrics.steps))),
        doubled=tuple(sorted({t for (_, t), seen in versions.items() if len(seen) > 1})),
        redone=tuple(sorted({x.global_step for x in metrics.rounds if x not in standing})),
        network_calls=sum(values["network_calls"] for values in stops),
        network_calls_in_training=sum(values["network_calls_in_training"] for values in stops),
    )


def followed(metrics: RunMetrics, when: float, process: str) -> Kill:
    """Reads what followed one kill."""
    before = [x for x in metrics.rounds if x.time <= when]
    term = max((x.term for x in before), default=0)
    after = min((x for x in metrics.rounds if x.term > term), key=lambda x: x.time, default=None)
    begin = max((x.time for x in before), default=when)
    end = after.time if after is not None else begin
    steps = [step for entries in metrics.steps.values() for step in entries]
    return Kill(
        time=when,
        process=process,
        without_merging_s=None if after is None else end - begin,
        took_over="" if after is None else after.synchronizer,
        steps_meanwhile=sum(begin < step.time < end for step in steps),
    )


def problems(
    found: Evidence, undisturbed: dict[str, Any], disturbed: dict[str, Any], num_kills: int
) -> list[str]:
    """What is not as promised, in words."""
    run = undisturbed["settings"]["run"]
    bound_s = run["lease_timeout_s"] + SLACK_S
    times = [kill.without_merging_s for kill in found.kills]
    quiet, rough = (x["step_overhead"]["p99_s"] for x in (undisturbed, disturbed))
    checks = {
        f"{len(found.kills)} kills of {num_kills}": len(found.kills) == num_kills,
        f"rounds were lost: {found.lost}": not found.lost and disturbed["rounds_lost"] == 0,
        f"global steps were applied twice: {found.doubled}": not found.doubled,
        "a kill was followed by no take-over": None not in times,
        "the standby never took over": any(x.took_over != x.process for x in found.kills),
        f"more than {bound_s:g} s without merging": all(x is None or x <= bound_s for x in times),
        "learners did not train on": all(kill.steps_meanwhile for kill in found.kills),
        f"p99 in learner.step is {rough / quiet:.2f} x": rough <= P99_FACTOR * quiet,
        "a training thread made network calls": found.network_calls_in_training == 0,
        "no network calls were counted": found.network_calls > 0,
        "undisturbed: participation is below 0.7": undisturbed["participation"] >= 0.7,
        "undisturbed: measured H is not within 20 %": (
            abs(undisturbed["measured_h"] / run["sync_interval"] - 1) <= 0.2
        ),
        "undisturbed: the leader changed": not undisturbed["leader_changes"],
    }
    return [problem for problem, fine in checks.items() if not fine]


def start(folder: Path, num_learners: int, pace: float) -> Fleet:
    folder.mkdir(parents=True)
    return Fleet(
        folder,
        *("--learners", str(num_learners), "--global-steps", "0", "--pace", str(pace)),
        *("--replication", "one", "--evaluate-every", "1000"),
        settings=small() + "max_restarts = 1000000\nrestart_wait_s = 0.5\n",
        standby=True,
    )


def finish(fleet: Fleet) -> tuple[dict[str, Any], RunMetrics]:
    """Drains a fleet; returns its report and its metrics."""
    fleet.interrupt()
    if fleet.wait() != EXIT_DRAINED:
        raise SystemExit(f"diloco run did not drain:\n{fleet.text()}")
    return fleet.report(), fleet.metrics()


def left_alone(folder: Path, num_learners: int, pace: float, num_rounds: int) -> dict[str, Any]:
    fleet = start(folder, num_learners, pace)
    try:
        fleet.wait_until(lambda: fleet.global_step() >= num_rounds, f"{num_rounds} rounds")
        return finish(fleet)[0]
    finally:
        fleet.close()


def killed(
    folder: Path, num_learners: int, pace: float, num_kills: int, chance: random.Random
) -> tuple[dict[str, Any], Evidence]:
    fleet = start(folder, num_learners, pace)
    try:
        dealt = []
        for number in range(num_kills):
            dealt.append(kill_leader(fleet, pace, chance))
            print(f"  kill {number + 1}: {dealt[-1][1]} at global step {fleet.global_step()}")
        fleet.wait_for_rounds(SETTLED_ROUNDS)
        report, metrics = finish(fleet)
        return report, look_at(metrics, dealt)
    finally:
        fleet.close()


def kill_leader(fleet: Fleet, pace: float, chance: random.Random) -> tuple[float, str]:
    """Kills the leader at a random moment after rounds went on and a standby was in sync."""
    fleet.wait_for_rounds(SETTLED_ROUNDS)
    fleet.wait_until(fleet.in_sync, "a standby in sync")
    leader = fleet.wait_until(fleet.leader, "a leader")
    time.sleep(chance.uniform(0.0, 2.0 * pace))  # anywhere within a round
    return fleet.kill(leader), leader


def print_figures(undisturbed: dict[str, Any], disturbed: dict[str, Any]) -> None:
    print(f"\n{'':24}{'undisturbed':>16}{'disturbed':>16}")
    rows = [(name, undisturbed[name], disturbed[name]) for name in FIGURES]
    rows += [
        (f"step overhead {name}", *(x["step_overhead"][name] for x in (undisturbed, disturbed)))
        for name in ("median_s", "p99_s", "share")
    ]
    for name, *values in rows:
        shown = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in values]
        print(f"{name:24}{shown[0]:>16}{shown[1]:>16}")


def print_evidence(found: Evidence, bound_s: float) -> None:
    times = sorted(x.without_merging_s for x in found.kills if x.without_merging_s is not None)
    by_standby = sum(bool(x.took_over) and x.took_over != x.process for x in found.kills)
    print(f"\nkills {len(found.kills)}, take-overs {len(times)}: {by_standby} by the standby, "
          f"{len(times) - by_standby} by the process that was killed, started again")  # fmt: skip
    print(f"rounds lost {len(found.lost)}, doubled {len(found.doubled)}")
    print(f"rounds committed that nobody had applied and that were made again {len(found.redone)}")
    print(f"network calls {found.network_calls}, of them by training threads "
          f"{found.network_calls_in_training}")  # fmt: skip
    if times:
        shares = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
        shown = ", ".join(f"{share:.0%} {percentile(times, share):.2f}" for share in shares)
        print(f"seconds without merging (at most {bound_s:g}): {shown}")
    for second in range(int(times[-1]) + 1 if times else 0):
        count = sum(second <= x < second + 1 for x in times)
        print(f"  {second:2} to {second + 1:2} s  {count:4}  {'#' * count}")


@click.command()
@click.option("--kills", default=100, show_default=True, help="kills of the leader")
@click.option("--learners", default=4, show_default=True, help="learners of both fleets")
@click.option("--rounds", default=300, show_default=True, help="rounds of the undisturbed fleet")
@click.option("--pace", default=0.2, show_default=True, help="shortest inner step, seconds")
@click.option("--seed", default=0, show_default=True, help="of the moments of the kills")
@click.option("--write/--no-write", default=True, help="write failover.json")
def main(*, kills: int, learners: int, rounds: int, pace: float, seed: int, write: bool) -> None:
    # Told to stop, it ends its fleets, as after an error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_DRAINED))
    with tempfile.TemporaryDirectory(prefix="proof-failover-") as folder:
        undisturbed = left_alone(Path(folder) / "undisturbed", learners, pace, rounds)
        chance = random.Random(seed)
        disturbed, found = killed(Path(folder) / "disturbed", learners, pace, kills, chance)
    about = (
        f"{learners} learners, pace {pace:g} s, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    wrong = problems(found, undisturbed, disturbed, kills)
    print(f"\n{about}")
    print_figures(undisturbed, disturbed)
    print_evidence(found, undisturbed["settings"]["run"]["lease_timeout_s"] + SLACK_S)
    if write:
        content = {
            "about": about,
            "undisturbed": undisturbed,
            "disturbed": disturbed,
            "evidence": asdict(found),
            "problems": wrong,
        }
        (HERE / "failover.json").write_text(json.dumps(content, indent=1) + "\n")
    print("\n" + ("\n".join(wrong) or "everything as promised"))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
