"""Puts right the times of records that were written by a clock that was wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TypeVar

from diloco_fleet.chaos.point_faults import Skew
from diloco_fleet.metrics import EVALUATOR, Evaluation, Mark, Round, RunMetrics, Step

_SLACK_S: Final = 1.0

T = TypeVar("T", Step, Round, Mark, Evaluation)


def with_true_times(metrics: RunMetrics, skews: Iterable[Skew]) -> RunMetrics:
    """Returns the metrics with the times at which their records were written.

    A record of a process whose clock was wrong is one of that span where its time lies in the span
    as that clock showed it; an offset that is shorter than the span leaves its edges uncertain.
    """
    by_process: dict[str, list[Skew]] = {}
    for skew in skews:
        by_process.setdefault(skew.process, []).append(skew)
    if not by_process:
        return metrics

    def right(process: str, record: T) -> T:
        for skew in by_process.get(process, ()):
            true = record.time - skew.offset_s
            if skew.begin - _SLACK_S <= true <= skew.end + _SLACK_S:
                return replace(record, time=true)
        return record

    return replace(
        metrics,
        steps={
            name: tuple(right(name, step) for step in steps)
            for name, steps in metrics.steps.items()
        },
        rounds=tuple(right(entry.synchronizer, entry) for entry in metrics.rounds),
        marks={
            name: tuple(right(name, mark) for mark in marks)
            for name, marks in metrics.marks.items()
        },
        evaluations=tuple(right(EVALUATOR, entry) for entry in metrics.evaluations),
    )
