"""The picture of a run: training losses, evaluations and restarts over the global step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diloco_fleet.goodput import GAP_FACTOR
from diloco_fleet.metrics import FLEET, RunMetrics, Step
from learner_client.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS: Final = 2000
_SMOOTHING_WINDOW_SHARE: Final = 0.02
_MIN_SMOOTHING_WINDOW: Final = 5
_BREAK: Final = (math.nan, math.nan)


def plot_losses(metrics: RunMetrics, path: Path, *, title: str) -> None:
    """Draws ``loss.png``: one smoothed line per learner, evaluations as points, restarts as marks.

    Args:
        metrics: what the processes wrote.
        path: the PNG to write, whole or not at all.
        title: over the picture.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    figure = draw_losses(metrics, title)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def draw_losses(metrics: RunMetrics, title: str) -> Figure:
    """Returns the picture: the losses, and below them a row per process that was restarted."""
    # Drawing without pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    restarts = [
        (global_step_at(metrics, mark.time), str(mark.values.get("process", "")))
        for mark in metrics.marks_of(FLEET, "restart")
    ]
    num_rows = len({name for _, name in restarts})
    figure = Figure(figsize=(9, 5 + 0.2 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    if restarts:
        axes, rows = figure.subplots(2, 1, sharex=True, height_ratios=(20, num_rows))
        _draw_restarts(axes, rows, restarts)
    else:
        axes = rows = figure.subplots()
    for learner, steps in sorted(metrics.steps.items()):
        points = loss_curve(steps)
        axes.plot(*zip(*points, strict=True), label=learner, linewidth=1.0, alpha=0.8)
    evaluations = [entry for entry in metrics.evaluations if math.isfinite(entry.loss)]
    axes.plot(
        [entry.global_step for entry in evaluations],
        [entry.loss for entry in evaluations],
        "ko-",
        label="held-out",
        linewidth=1.5,
        markersize=4,
    )
    axes.set(ylabel="loss (nats per token)", title=title)
    rows.set_xlabel("global step")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    return figure


def _draw_restarts(axes: Axes, rows: Axes, restarts: Sequence[tuple[int, str]]) -> None:
    """Names stand in rows of their own, where they hide no curve."""
    names = sorted({name for _, name in restarts}, reverse=True)
    positions = [position for position, _ in restarts]
    for index, position in enumerate(sorted(set(positions))):
        label = None if index else "restart"
        axes.axvline(position, color="tab:red", linestyle=":", linewidth=1.0, label=label)
    heights = [names.index(name) for _, name in restarts]
    rows.plot(positions, heights, linestyle="", marker="^", markersize=4, color="tab:red")
    rows.set_yticks(range(len(names)), names, fontsize="x-small", color="tab:red")
    rows.set_ylim(-0.7, len(names) - 0.3)
    rows.grid(visible=True, alpha=0.3)


def loss_curve(steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Returns (global step, loss) points of a trailing mean, at most about 2000 of them.

    A point that is no number breaks the line where the learner was not stepping: between two of
    its lives, where the mean begins anew, and where it stood still for long. Steps without a
    finite loss break nothing: they are left out.
    """
    known = [step for step in steps if math.isfinite(step.loss)]
    if not known:
        return [_BREAK]
    width = max(_MIN_SMOOTHING_WINDOW, round(len(known) * _SMOOTHING_WINDOW_SHARE))
    stride = max(1, len(known) // _MAX_POINTS)
    longest_s = GAP_FACTOR * statistics.median(step.step_s for step in known)
    points: list[tuple[float, float]] = []
    for _, life in groupby(known, key=lambda step: step.life):
        points += [_BREAK] if points else []
        points += _life_curve(list(life), width, stride, longest_s)
    return points


def _life_curve(
    steps: Sequence[Step], width: int, stride: int, longest_s: float
) -> list[tuple[float, float]]:
    points = []
    window_sum = 0.0
    for index, step in enumerate(steps):
        window_sum += step.loss
        if index >= width:
            window_sum -= steps[index - width].loss
        stood_still = index > 0 and step.time - steps[index - 1].time > longest_s
        if stood_still:
            points.append(_BREAK)
        if stood_still or index % stride == 0 or index == len(steps) - 1:
            points.append((float(step.global_step), window_sum / min(index + 1, width)))
    return points


def global_step_at(metrics: RunMetrics, time: float) -> int:
    """Returns the global step that had been committed at a unix time."""
    committed = [entry.global_step for entry in metrics.rounds if entry.time <= time]
    return committed[-1] if committed else 0
