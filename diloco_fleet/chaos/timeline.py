"""The picture of a scenario: inner steps per learner, merges, faults and who led, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diloco_fleet.chaos.record import Record
from diloco_fleet.chaos.result import RESULT_NAME, Result
from diloco_fleet.chaos.targets import is_learner
from diloco_fleet.goodput import stepping_intervals
from diloco_fleet.lineage import leaderships
from diloco_fleet.metrics import RunMetrics
from learner_client.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TALLEST_FAULTS: Final = 60.0
"""Inches: thousands of strikes would be more than a picture can hold."""

_COLORS: Final = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:cyan")


def write_timeline(folder: Path, result: Result, metrics: RunMetrics) -> None:
    """Draws ``chaos.png``, whole or not at all.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    figure = draw_timeline(result, metrics)
    write_atomically(
        folder / f"{RESULT_NAME}.png",
        lambda temporary: figure.savefig(temporary, format="png", dpi=120),
    )


def draw_timeline(result: Result, metrics: RunMetrics) -> Figure:
    """Returns the picture; its time is in seconds since the fleet was steady."""
    # Drawing without pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    learners = sorted(name for name in metrics.steps if is_learner(name))
    struck = [record for record in result.records if record.began_s is not None]
    rows_of_faults = min(0.3 * len(struck), _TALLEST_FAULTS)
    heights = (2.2, 0.35 * len(learners) + 0.4, rows_of_faults + 0.4, 0.9)
    figure = Figure(figsize=(10, sum(heights) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    steps, stepping, faults, leader = figure.subplots(4, 1, sharex=True, height_ratios=heights)
    _draw_steps(steps, result, metrics, learners)
    _draw_stepping(stepping, result, metrics, learners)
    _draw_faults(faults, struck, result)
    _draw_leader(leader, result, metrics)
    steps.set_title(f"{result.scenario.name}: {result.verdict}")
    leader.set_xlabel("seconds since the fleet was steady")
    leader.set_xlim(0.0, max(result.end - result.begin, 1.0))
    for axes in (steps, stepping, faults, leader):
        axes.grid(visible=True, axis="x", alpha=0.3)
        axes.vlines(
            [record.began_s or 0.0 for record in struck], 0.0, 1.0,
            transform=axes.get_xaxis_transform(), colors="tab:red", linestyles=":", linewidth=0.8,
        )  # fmt: skip
    return figure


def _draw_steps(axes: Axes, result: Result, metrics: RunMetrics, learners: Sequence[str]) -> None:
    """Inner steps and merges since the beginning: a flat line is a standstill."""
    for name in learners:
        times = [step.time - result.begin for step in metrics.steps[name]]
        inside = [time for time in times if time >= 0.0]
        axes.plot(inside, range(1, len(inside) + 1), label=name, linewidth=1.0)
    merges = sorted(entry.time - result.begin for entry in metrics.rounds)
    inside = [time for time in merges if time >= 0.0]
    axes.plot(inside, range(1, len(inside) + 1), "k--", label="merges", linewidth=1.2)
    axes.set_ylabel("inner steps, merges")
    axes.legend(loc="upper left", fontsize="x-small")


def _draw_stepping(
    axes: Axes, result: Result, metrics: RunMetrics, learners: Sequence[str]
) -> None:
    """A bar wherever a learner was in an inner step."""
    for row, name in enumerate(learners):
        spans = [
            (begin - result.begin, end - begin)
            for begin, end in stepping_intervals(metrics.steps[name])
        ]
        axes.broken_barh(spans, (row - 0.35, 0.7), color=_COLORS[row % len(_COLORS)])
    axes.set_yticks(range(len(learners)), learners, fontsize="x-small")
    axes.set_ylim(-0.6, max(len(learners), 1) - 0.4)
    axes.set_ylabel("stepping")


def _draw_faults(axes: Axes, struck: Sequence[Record], result: Result) -> None:
    """Red while a fault lasts, yellow until the fleet is as before."""
    end_s = result.end - result.begin
    for row, record in enumerate(struck):
        began_s = record.began_s or 0.0
        healed_s = end_s if record.healed_s is None else record.healed_s
        as_before_s = end_s if record.recovered_s is None else record.recovered_s
        shown_s = max(healed_s - began_s, 0.002 * end_s)
        axes.broken_barh([(began_s, shown_s)], (row - 0.35, 0.7), color="tab:red")
        axes.broken_barh(
            [(began_s + shown_s, max(as_before_s - began_s - shown_s, 0.0))],
            (row - 0.35, 0.7),
            color="gold",
        )
    names = [f"{x.fault.fault} {', '.join(x.targets[0])}" for x in struck]
    axes.set_yticks(range(len(struck)), names, fontsize="x-small")
    axes.set_ylim(-0.6, max(len(struck), 1) - 0.4)
    axes.set_ylabel("faults")


def _draw_leader(axes: Axes, result: Result, metrics: RunMetrics) -> None:
    """Who led, by term."""
    terms = leaderships(metrics)
    names = sorted({term.synchronizer for term in terms})
    ends = [*(term.time for term in terms[1:]), result.end]
    for term, end in zip(terms, ends, strict=False):
        row = names.index(term.synchronizer)
        span = [(term.time - result.begin, max(end - term.time, 0.0))]
        axes.broken_barh(span, (row - 0.35, 0.7), color=_COLORS[term.term % len(_COLORS)])
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.set_ylim(-0.6, max(len(names), 1) - 0.4)
    axes.set_ylabel("leader")
