"""The picture of a run, from metrics written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from diloco_fleet.metrics import RunMetrics, parse_metrics
from diloco_fleet.plots import draw_losses, loss_curve, plot_losses


def mark(kind: str, time: int, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, **values}


def step(time: int, global_step: int, loss: float) -> dict[str, Any]:
    costs = {"num_tokens": 10, "step_s": 1.0, "overhead_s": 0.01}
    return mark("step", time, global_step=global_step, loss=loss, **costs)


def text(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_an_empty_run_has_a_picture_too(tmp_path: Path) -> None:
    plot_losses(RunMetrics(), tmp_path / "loss.png", title="r")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_loss_curve_is_a_trailing_mean_of_bounded_size() -> None:
    records = parse_metrics({"l": text(*(step(i, i, float(i)) for i in range(10_000)))})
    points = loss_curve(records.steps["l"])
    assert len(points) <= 2001
    assert points[-1] == (9999.0, pytest.approx(9999 - 199 / 2))


def test_the_loss_curve_breaks_where_the_learner_was_not_stepping() -> None:
    """A new life begins its mean anew; a long pause within a life only breaks the line."""
    records = parse_metrics(
        {
            "l": text(
                *(step(i, i, 6.0) for i in range(10)),
                mark("start", 10),
                *(step(11 + i, 10 + i, 2.0) for i in range(10)),
                step(90, 20, 1.0),
            )
        }
    )
    points = loss_curve(records.steps["l"])
    breaks = [index for index, (_, loss) in enumerate(points) if math.isnan(loss)]
    assert breaks == [10, 21]
    assert points[9] == (9.0, 6.0)
    assert points[11] == (10.0, 2.0), "nothing of the earlier life is in it"
    assert points[22] == (20.0, pytest.approx((4 * 2.0 + 1.0) / 5))


def test_names_of_what_was_restarted_stand_apart_from_the_curves() -> None:
    learner = text(*(step(i, i, 2.0) for i in range(10)))
    restarts = [("learner-1", 3), ("learner-0", 5), ("learner-1", 7)]
    fleet = text(*(mark("restart", time, process=process) for process, time in restarts))
    curves, rows = draw_losses(parse_metrics({"learner-0": learner, "fleet": fleet}), "r").axes
    assert not curves.texts
    assert [label.get_text() for label in rows.get_yticklabels()] == ["learner-1", "learner-0"]
    assert len(draw_losses(parse_metrics({"learner-0": learner}), "r").axes) == 1
