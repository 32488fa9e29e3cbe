"""The picture of a run: training losses, evaluations and restarts over the global step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diloco_fleet.metrics import FLEET, RunMetrics, Step
from learner_client.train.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS: Final = 2000
_SMOOTHING_WINDOW_SHARE: Final = 0.02
_MIN_SMOOTHING_WINDOW: Final = 5


def plot_losses(metrics: RunMetrics, path: Path, *, title: str) -> None:
    """Draws ``loss.png``: one smoothed line per learner, evaluations as points, restarts as marks.

    Args:
        metrics: what the processes wrote.
        path: the PNG to write, whole or not at all.
        title: over the picture.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    # Drawing without pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
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
    _draw_restarts(axes, metrics)
    axes.set(xlabel="global step", ylabel="loss (nats per token)", title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def _draw_restarts(axes: Axes, metrics: RunMetrics) -> None:
    label: str | None = "restart"
    for mark in metrics.marks_of(FLEET, "restart"):
        position = global_step_at(metrics, mark.time)
        axes.axvline(position, color="tab:red", linestyle=":", linewidth=1.0, label=label)
        name = str(mark.values.get("process", ""))
        axes.text(
            position,
            0.02,
            f" {name}",
            rotation=90,
            fontsize="x-small",
            color="tab:red",
            transform=axes.get_xaxis_transform(),
        )
        label = None


def loss_curve(steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Returns (global step, loss) points of a trailing mean, at most about 2000 of them.

    Steps without a finite loss break nothing: they are left out.
    """
    known = [step for step in steps if math.isfinite(step.loss)]
    if not known:
        return [(math.nan, math.nan)]
    width = max(_MIN_SMOOTHING_WINDOW, round(len(known) * _SMOOTHING_WINDOW_SHARE))
    stride = max(1, len(known) // _MAX_POINTS)
    points = []
    window_sum = 0.0
    for index, step in enumerate(known):
        window_sum += step.loss
        if index >= width:
            window_sum -= known[index - width].loss
        if index % stride == 0 or index == len(known) - 1:
            points.append((float(step.global_step), window_sum / min(index + 1, width)))
    return points


def global_step_at(metrics: RunMetrics, time: float) -> int:
    """Returns the global step that had been committed at a unix time."""
    committed = [entry.global_step for entry in metrics.rounds if entry.time <= time]
    return committed[-1] if committed else 0
