"""Which committed rounds stand at the end, which did a learner apply in vain, and who led when.

A term of leadership begins with the ``start`` that its synchronizer writes down: the global step
that it names is where the term goes on. Whatever an earlier term committed beyond that is not on
the final lineage, in whichever order of time it was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from diloco_fleet.metrics import FLEET, Applied, Round, RunMetrics, Step, is_synchronizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The beginning of a term.

    Attributes:
        term: the term, from 1.
        time: unix time.
        synchronizer: name of the process that leads.
        global_step: the last global step on which the term rests.
    """

    term: int
    time: float
    synchronizer: str
    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderChange:
    """A term that followed another one: a take-over, or the restart of the only synchronizer.

    Attributes:
        term: the new term.
        time: unix time at which it began.
        synchronizer: name of the process that leads.
        global_step: the last global step on which the term rests.
        without_merging_s: from the last round before to the first round of this term, or from the
            start of the fleet where that lies between; None where this term merged nothing.
    """

    term: int
    time: float
    synchronizer: str
    global_step: int
    without_merging_s: float | None


def leaderships(metrics: RunMetrics) -> tuple[Leadership, ...]:
    """Returns the terms of a run in order."""
    found = [
        Leadership(
            term=mark.values["term"],
            time=mark.time,
            synchronizer=process,
            global_step=mark.values["global_step"],
        )
        for process in metrics.marks
        if is_synchronizer(process)
        for mark in metrics.marks_of(process, "start")
        if _is_count(mark.values.get("term")) and _is_count(mark.values.get("global_step"))
    ]
    return tuple(sorted(found, key=lambda leadership: leadership.term))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def standing_rounds(rounds: Iterable[Round], terms: Sequence[Leadership]) -> list[Round]:
    """Returns the rounds of the final lineage, by global step.

    Args:
        rounds: committed rounds, those of one term in the order in which they were written.
        terms: the terms of the run.
    """
    limits: dict[int, int] = {entry.term: entry.global_step for entry in terms}
    kept: list[Round] = []
    for entry in sorted(rounds, key=lambda entry: entry.term):
        for term in [term for term in limits if term <= entry.term]:
            _cut(kept, limits.pop(term))
        _cut(kept, entry.global_step - 1)
        kept.append(entry)
    for limit in limits.values():
        _cut(kept, limit)
    return kept


def _cut(rounds: list[Round], limit: int) -> None:
    """Drops the rounds beyond a global step."""
    while rounds and rounds[-1].global_step > limit:
        rounds.pop()


def lost_rounds(
    rounds: Sequence[Round], terms: Sequence[Leadership], steps: Mapping[str, Sequence[Step]]
) -> set[tuple[int, int]]:
    """Rounds that a learner applied and that are not on the final lineage (design section 4).

    A version that was applied and has no record (its line was lost with the process that was about
    to write it) stands when a later round or term rests on it: rounds are persisted in order, and
    before a learner can hear of them.

    Args:
        rounds: committed rounds.
        terms: the terms of the run.
        steps: step records of every learner.

    Returns:
        Pairs of term and global step.
    """
    standing = {entry.global_step: entry for entry in standing_rounds(rounds, terms)}
    head = max([*standing, *(entry.global_step for entry in terms)], default=0)

    def is_lost(applied: Applied) -> bool:
        later = [entry.global_step for entry in terms if entry.term > applied.term]
        if applied.global_step > min([head, *later]):
            return True
        record = standing.get(applied.global_step)
        return record is not None and (
            record.term != applied.term or (bool(record.digest) and record.digest != applied.digest)
        )

    return {
        (applied.term, applied.global_step)
        for records in steps.values()
        for record in records
        for applied in record.applied
        if applied.global_step > 0 and is_lost(applied)
    }


def leader_changes(metrics: RunMetrics) -> tuple[LeaderChange, ...]:
    """Returns the terms after the first, and for how long each left the fleet without merges.

    The first term after a start of the fleet is none: nothing failed and nothing was taken over.
    """
    sessions = [mark.time for mark in metrics.marks_of(FLEET, "start")]
    changes = []
    for previous, entry in pairwise(leaderships(metrics)):
        if any(previous.time < time <= entry.time for time in sessions):
            continue
        before = [x.time for x in metrics.rounds if x.term < entry.term]
        after = [x.time for x in metrics.rounds if x.term == entry.term]
        since = max(
            [*before, *(time for time in sessions if time < entry.time)], default=entry.time
        )
        changes.append(
            LeaderChange(
                term=entry.term,
                time=entry.time,
                synchronizer=entry.synchronizer,
                global_step=entry.global_step,
                without_merging_s=max(min(after) - since, 0.0) if after else None,
            )
        )
    return tuple(changes)
