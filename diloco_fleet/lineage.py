"""Which committed rounds stand at the end, and which did a learner apply in vain."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from diloco_fleet.metrics import Mark, Round, Step


def lost_rounds(
    rounds: Sequence[Round], starts: Sequence[Mark], steps: Mapping[str, Sequence[Step]]
) -> set[tuple[int, int]]:
    """Rounds that a learner applied and that are not on the final lineage (design section 4).

    Rounds commit in order, so the lineage is a line that only grows, except where a
    synchronizer starts from an older state. A commit of global step t is therefore off the
    final lineage when a later record commits t or less again, or when a synchronizer starts
    with a global step below t. A learner applied t when a step record of it names t; of several
    commits of one t, the one meant is the newest before the end of that step. A round that was
    applied and has no record (its line was lost with the process that was about to write it)
    stands when a later round does: rounds are persisted in order, and before a learner can hear
    of them.

    Args:
        rounds: committed rounds in the order in which they were written.
        starts: ``start`` marks of the synchronizer; ``global_step`` in them is used if given.
        steps: step records of every learner.

    Returns:
        Pairs of global step and number of the commit of that step, from 0.
    """
    events = _in_order(rounds, starts)
    standing = _standing(events)
    commits: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for (time, global_step, is_commit), stands in zip(events, standing, strict=True):
        if is_commit:
            commits[global_step].append((time, stands))
    head = events[-1][1] if events else 0
    lost = set()
    for global_step, time in _applied(steps):
        known = commits.get(global_step)
        if known is None:
            if global_step > head:
                lost.add((global_step, 0))
            continue
        index = max(bisect_right([when for when, _ in known], time) - 1, 0)
        if not known[index][1]:
            lost.add((global_step, index))
    return lost


def _in_order(rounds: Sequence[Round], starts: Sequence[Mark]) -> list[tuple[float, int, bool]]:
    """Time, global step of the lineage's head, and "is a commit", in the order of time."""
    events = [(entry.time, entry.global_step, True) for entry in rounds]
    events += [
        (mark.time, int(mark.values["global_step"]), False)
        for mark in starts
        if isinstance(mark.values.get("global_step"), int)
    ]
    return sorted(events, key=lambda event: event[0])


def _standing(events: Sequence[tuple[float, int, bool]]) -> list[bool]:
    """Whether each event's head is still below everything that came later."""
    standing = []
    lowest_possible: float = float("inf")
    for _, global_step, is_commit in reversed(events):
        standing.append(global_step <= lowest_possible)
        # A commit of t rests on t - 1; a start at t rests on t itself.
        lowest_possible = min(lowest_possible, global_step - 1 if is_commit else global_step)
    return standing[::-1]


def _applied(steps: Mapping[str, Sequence[Step]]) -> set[tuple[int, float]]:
    """Global step and time of the first record of it, for every run of equal global steps."""
    applied = set()
    for records in steps.values():
        previous: int | None = None
        for record in records:
            if record.global_step != previous and record.global_step > 0:
                applied.add((record.global_step, record.time))
            previous = record.global_step
    return applied
