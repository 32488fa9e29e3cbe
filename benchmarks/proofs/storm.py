"""Learners are killed at random, against the same fleet left alone: the long form.

Two fleets of processes, the same settings and seed, an equal speed by --pace. In one of them a
learner is killed (-9) at random, with a mean of 20 s between two kills, for --seconds. Prints, side
by side, goodput by the paper's definition (time in inner steps over learners times window),
participation, measured H and the held-out loss on equal tokens, as many as both have got to: those
that all learners had trained on, what was lost with the killed ones too, when the copy that was
evaluated was committed; the two are to be within 2 % of each other. In a minute the loss still
falls steeply, and two runs alike may differ by more: what is beyond that is played again with other
kills, --plays times in all, and the mean of all plays counts. Writes storm.json beside this file.
Exit code 1 if anything is not as promised.

    make proof-storm
    make storm                           # a minute of it, which writes nothing
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import click
import torch

from decoupled_diloco.errors import EXIT_DRAINED
from decoupled_diloco.settings import RunSettings
from diloco_fleet.chaos.judge import Verdict
from diloco_fleet.chaos.process_injector import ProcessInjector
from diloco_fleet.chaos.result import Result, write_result
from diloco_fleet.chaos.runner import Interruption, World, run_scenario
from diloco_fleet.chaos.scenario import Fault, FaultKind, FleetShape, Hypothesis, Scenario
from diloco_fleet.chaos.schedule import draw_schedule
from diloco_fleet.chaos.timeline import write_timeline
from diloco_fleet.metrics import Evaluation, RunMetrics

HERE = Path(__file__).parent
LOSS_SHARE = 0.02
MIN_PARTICIPATION = 0.7
H_SHARE = 0.2
FIGURES = (
    *("window_s", "goodput", "uptime", "participation", "measured_h", "rounds", "rounds_lost"),
    *("leader_changes", "restarts", "tokens"),
)


def scenario(
    name: str, *, mtbf_s: float | None, seconds: float, learners: int, pace: float
) -> Scenario:
    """A fleet for so many seconds, with kills or without."""
    # Between two evaluations a loss that falls steeply, as at the beginning, is seen too high.
    evaluate_every = 10 if seconds < 300.0 else 25
    settings: dict[str, dict[str, object]] = {
        # A learning rate that does not fall: fleets are compared on equal tokens, not steps.
        "trainer": {"total_global_steps": 1_000_000, "warmup_steps": 40},
        "fleet": {"pace": pace, "evaluate_every": evaluate_every, "device": "cpu"},
    }
    return Scenario(
        name=name,
        about="",
        duration_s=seconds,
        settle_s=120.0,
        faults=() if mtbf_s is None else (kills(mtbf_s),),
        steady=Hypothesis(rounds_lost=0, uptime=1.0, leader_changes=0),
        fleet=FleetShape(learners=learners, standby=False, settings=settings),
    )


def kills(mtbf_s: float) -> Fault:
    return Fault(
        fault=FaultKind.KILL, who="random learner", mtbf_s=mtbf_s, spare=1, recovery_s=120.0
    )


def play(
    folder: Path, chosen: Scenario, seed: int, interruption: Interruption
) -> tuple[Result, RunMetrics]:
    schedule = draw_schedule(chosen, seed)
    world = World(say=lambda line: print(f"  {line}"), interruption=interruption)
    injector = ProcessInjector(chosen, schedule, folder, os.environ, lambda _: None)
    with injector:
        result, metrics = run_scenario(chosen, schedule, injector, world, seed=seed)
    write_result(folder, result)
    write_timeline(folder, result, metrics)
    if result.verdict is Verdict.INTERRUPTED:
        sys.exit(EXIT_DRAINED)
    return result, metrics


def loss_by_tokens(metrics: RunMetrics) -> list[tuple[float, float]]:
    """Points of tokens trained by all learners until a copy was committed, and its loss.

    How long the evaluator took to get there is its own affair, and differs from fleet to fleet.
    """
    committed = {entry.global_step: entry.time for entry in metrics.rounds}
    steps = sorted(
        (step.time, step.num_tokens) for records in metrics.steps.values() for step in records
    )
    times = [time for time, _ in steps]
    totals = [0, *accumulate(tokens for _, tokens in steps)]

    def trained(evaluation: Evaluation) -> int:
        if evaluation.global_step == 0:
            return 0
        until = committed.get(evaluation.global_step, evaluation.time)
        return totals[bisect_right(times, until)]

    return [(float(trained(entry)), entry.loss) for entry in metrics.evaluations]


def loss_at(points: Sequence[tuple[float, float]], tokens: float) -> float:
    """The loss on so many tokens, between the evaluations around them."""
    ordered = sorted(points)
    after = min(bisect_right([x for x, _ in ordered], tokens), len(ordered) - 1)
    (x0, y0), (x1, y1) = ordered[max(after - 1, 0)], ordered[after]
    share = (tokens - x0) / (x1 - x0) if x1 > x0 else 1.0
    return y0 + min(max(share, 0.0), 1.0) * (y1 - y0)


Losses = Mapping[str, float]
"""Of both fleets on equal tokens: ``storm`` and ``undisturbed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Both fleets, once.

    Attributes:
        quiet: the fleet left alone.
        storm: the one under kills.
        curves: points of tokens and loss of both, by name.
        tokens: as far as both have got.
        losses: of both on so many tokens.
    """

    quiet: Result
    storm: Result
    curves: dict[str, list[tuple[float, float]]]
    tokens: float
    losses: Losses

    def problems(self, sync_interval: int) -> list[str]:
        """What is not as promised, but for the loss, in words."""
        num_kills = sum(record.began_s is not None for record in self.storm.records)
        h = self.quiet.figures.measured_h
        checks = {
            "undisturbed: participation is below 0.7": (self.quiet.figures.participation or 0.0)
            >= MIN_PARTICIPATION,
            "undisturbed: measured H is not within 20 %": h is not None
            and abs(h / sync_interval - 1.0) <= H_SHARE,
            "nobody was killed": num_kills > 0,
        }
        found = [problem for problem, fine in checks.items() if not fine]
        for result in (self.quiet, self.storm):
            if result.verdict is not Verdict.PASSED:
                found.append(f"{result.scenario.name}: {result.verdict}")
            broken = [f"{x.name}: {x.found} ({x.wanted})" for x in result.checks if not x.holds]
            found += [
                f"{result.scenario.name}: {what}" for what in (*broken, result.stopped) if what
            ]
        return found


def compare(
    root: Path, calm: Scenario, rough: Scenario, seed: int, interruption: Interruption
) -> Play:
    """Plays both fleets, the one in the storm first."""
    storm, storm_metrics = play(root / f"storm-{seed}", rough, seed, interruption)
    quiet, quiet_metrics = play(root / f"undisturbed-{seed}", calm, seed, interruption)
    curves = {"storm": loss_by_tokens(storm_metrics), "undisturbed": loss_by_tokens(quiet_metrics)}
    if not all(len(points) > 1 for points in curves.values()):
        sys.exit("the evaluator has measured nothing that could be compared; take more --seconds")
    tokens = min(max(x for x, _ in points) for points in curves.values())
    losses = {name: loss_at(points, tokens) for name, points in curves.items()}
    return Play(quiet=quiet, storm=storm, curves=curves, tokens=tokens, losses=losses)


def excess(losses: Sequence[Losses]) -> float:
    """By which share the loss of the storm is above that of the fleet left alone, in the mean."""
    return sum(each["storm"] / each["undisturbed"] - 1.0 for each in losses) / len(losses)


def is_within(losses: Sequence[Losses]) -> bool:
    """Whether they are; what is not a number is not."""
    return abs(excess(losses)) <= LOSS_SHARE


def problems(plays: Sequence[Play], sync_interval: int) -> list[str]:
    """What is not as promised, in words."""
    found = [what for each in plays for what in each.problems(sync_interval)]
    losses = [each.losses for each in plays]
    if not is_within(losses):
        found.append(f"the loss on equal tokens is {excess(losses):+.1%} off; at most 2 %")
    return found


def print_figures(each: Play) -> None:
    quiet, storm = each.quiet, each.storm
    print(f"\n{'':24}{'undisturbed':>16}{'storm':>16}")
    rows: list[tuple[str, Any, Any]] = [
        (name, getattr(quiet.figures, name), getattr(storm.figures, name)) for name in FIGURES
    ]
    name = f"loss at {each.tokens / 1e6:.3g}M tokens"
    rows.append((name, each.losses["undisturbed"], each.losses["storm"]))
    for name, *values in rows:
        shown = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in values]
        print(f"{name:24}{shown[0]:>16}{shown[1]:>16}")
    print(f"{'  above the undisturbed':40}{excess([each.losses]):>+16.2%}")
    times = sorted(x.recovery_s for x in storm.records if x.recovery_s is not None)
    num_kills = sum(record.began_s is not None for record in storm.records)
    print(f"\nkills {num_kills}, of {len(storm.records)} that chance drew; as before after, s:")
    print("  " + " ".join(f"{x:.1f}" for x in times))


@click.command(help=__doc__)
@click.option("--seconds", default=600.0, show_default=True, help="of the storm")
@click.option("--mtbf", default=20.0, show_default=True, help="mean between two kills, seconds")
@click.option("--learners", default=4, show_default=True)
@click.option("--pace", default=0.2, show_default=True, help="shortest inner step, seconds")
@click.option("--seed", default=0, show_default=True, help="of the kills")
@click.option(
    "--plays", default=1, type=click.IntRange(min=1), show_default=True, help="at most, see above"
)
@click.option("--keep", type=click.Path(path_type=Path), help="folder that keeps both runs")
@click.option("--write/--no-write", default=True, help="write storm.json")
def main(  # noqa: PLR0917 - click gives them by name
    seconds: float, mtbf: float, learners: int, pace: float, seed: int, plays: int,
    keep: Path | None, write: bool,
) -> None:  # fmt: skip
    interruption = Interruption()

    def stop(number: int, _: object) -> None:
        interruption.why = signal.Signals(number).name

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    rough = scenario("storm", mtbf_s=mtbf, seconds=seconds, learners=learners, pace=pace)
    calm = scenario("undisturbed", mtbf_s=None, seconds=seconds, learners=learners, pace=pace)
    about = (
        f"{learners} learners, pace {pace:g} s, {seconds:g} s, a kill every {mtbf:g} s "
        f"in the mean, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
    played: list[Play] = []
    losses: list[Losses] = []
    with tempfile.TemporaryDirectory(prefix="proof-storm-") as folder:
        root = (keep or Path(folder)).resolve()
        while not losses or (len(losses) < plays and not is_within(losses)):
            played.append(compare(root, calm, rough, seed + len(played), interruption))
            losses.append(played[-1].losses)
            print(f"\n{about}")
            print_figures(played[-1])
    if len(played) > 1:
        print(f"\nmean of {len(played)} plays: {excess(losses):+.2%}")
    wrong = problems(played, RunSettings(run_id="storm").sync_interval)
    if write:
        last = played[-1]
        content = {
            "about": about,
            "undisturbed": last.quiet.to_dict(),
            "storm": last.storm.to_dict(),
            "tokens": last.tokens,
            "losses": last.losses,
            "curves": last.curves,
            "problems": wrong,
        }
        (HERE / "storm.json").write_text(json.dumps(content, indent=1) + "\n")
    print("\n" + ("\n".join(wrong) or "everything as promised"))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
