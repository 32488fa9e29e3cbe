"""Goodput and uptime of a run, from the step records of its learners (paper section 6.1)."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from diloco_fleet.metrics import Round, Step

GAP_FACTOR: Final = 5.0
"""A learner that ends no inner step for this many of its median steps was not stepping."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """How much of the time was spent on inner steps.

    Attributes:
        window_s: length of the window.
        stepping_s: sum over the learners of their time in inner steps within the window.
        goodput: ``stepping_s`` over planned learners times ``window_s``.
        uptime: share of the window in which at least one learner was stepping.
    """

    window_s: float
    stepping_s: float
    goodput: float
    uptime: float


def measure_stepping(
    steps: Mapping[str, Sequence[Step]],
    rounds: Sequence[Round],
    *,
    num_learners: int,
    sessions: Sequence[float] = (),
) -> Stepping | None:
    """Computes goodput and uptime.

    The window reaches from the beginning of the fleet's first inner step to the last committed
    round. A run that was resumed has one such window per session, and their lengths add up: the
    time between two sessions is nobody's.

    An inner step occupies the time from the end of the learner's step before it to its own end
    (the pause of ``--pace`` is part of a step). Where that is more than ``GAP_FACTOR`` times the
    learner's median step, and for the first step of a life, it occupies its own ``step_s``
    before its end instead, and at most one median step: what was waited for was no step.

    Args:
        steps: step records of every learner.
        rounds: committed rounds.
        num_learners: planned learners, M.
        sessions: unix times at which the fleet was started.

    Returns:
        The figures; None where no learner stepped before a committed round.
    """
    intervals = {learner: stepping_intervals(records) for learner, records in steps.items()}
    window_s = stepping_s = covered_s = 0.0
    for window in _windows(intervals, rounds, sessions):
        inside = [clip(spans, window) for spans in intervals.values()]
        window_s += window[1] - window[0]
        stepping_s += sum(length(spans) for spans in inside)
        covered_s += length(union([span for spans in inside for span in spans]))
    if window_s <= 0.0:
        return None
    return Stepping(
        window_s=window_s,
        stepping_s=stepping_s,
        goodput=stepping_s / (num_learners * window_s),
        uptime=covered_s / window_s,
    )


def stepping_intervals(records: Sequence[Step]) -> list[Interval]:
    """Returns the time that one learner spent in inner steps, as disjoint sorted intervals."""
    if not records:
        return []
    median_s = statistics.median(record.step_s for record in records)
    spans: list[Interval] = []
    previous: Step | None = None
    for record in records:
        reach_s = min(record.step_s, median_s)
        if previous is not None and previous.life == record.life:
            since_s = record.time - previous.time
            if 0.0 <= since_s <= GAP_FACTOR * median_s:
                reach_s = since_s
        spans.append((record.time - reach_s, record.time))
        previous = record
    return union(spans)


def _windows(
    intervals: Mapping[str, Sequence[Interval]],
    rounds: Sequence[Round],
    sessions: Sequence[float],
) -> list[Interval]:
    begins = sorted(span[0] for spans in intervals.values() for span in spans)
    commits = sorted(entry.time for entry in rounds)
    bounds = [float("-inf"), *sorted(sessions)[1:], float("inf")]
    windows = []
    for start, stop in pairwise(bounds):
        first = next((begin for begin in begins if start <= begin < stop), None)
        last_index = bisect_right(commits, stop) - 1
        if first is not None and last_index >= 0 and commits[last_index] > first:
            windows.append((first, commits[last_index]))
    return windows


def union(spans: Sequence[Interval]) -> list[Interval]:
    """Returns the union of intervals as disjoint sorted ones."""
    merged: list[Interval] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def clip(spans: Sequence[Interval], window: Interval) -> list[Interval]:
    """Returns the parts of intervals that lie in a window."""
    cut = [(max(begin, window[0]), min(end, window[1])) for begin, end in spans]
    return [(begin, end) for begin, end in cut if end > begin]


def length(spans: Sequence[Interval]) -> float:
    """Returns the total length of disjoint intervals, in seconds."""
    return sum(end - begin for begin, end in spans)
