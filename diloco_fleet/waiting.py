"""For how long merging waited, and for what: the waits that the synchronizers told of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from diloco_fleet.metrics import Mark, RunMetrics, is_synchronizer

_MERGING: Final = re.compile(r"seed|round \d+")
_FOLLOWS: Final = "earlier_round"
"""The wait of a round that only waits for one before it: that one says why."""

_LIVES: Final = frozenset({"start", "stop"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTime:
    """Time in which the seed or a round waited for one reason.

    Attributes:
        reason: stable word for what was waited for.
        times: how often.
        total_s: in all, seconds; where several rounds waited at once, the time counts once.
        longest_s: the longest one, seconds.
        longest_detail: what the longest one waited for when it ended.
    """

    reason: str
    times: int
    total_s: float
    longest_s: float
    longest_detail: str


@dataclass(slots=True, kw_only=True)
class _Wait:
    reason: str
    detail: str
    begin: float
    end: float = field(default=0.0)

    @property
    def seconds(self) -> float:
        return max(self.end - self.begin, 0.0)


def wait_times(metrics: RunMetrics) -> tuple[WaitTime, ...]:
    """Sums up the waits of a run by reason, the longest sum first.

    A wait begins when it is told, which is a moment after it began (short ones are never told). It
    ends when the synchronizer says so, or with that life of the synchronizer.
    """
    by_reason: dict[str, list[_Wait]] = {}
    for process, marks in metrics.marks.items():
        if is_synchronizer(process):
            last = max((x.time for x in metrics.rounds if x.synchronizer == process), default=0.0)
            for wait in _waits(marks, last):
                by_reason.setdefault(wait.reason, []).append(wait)
    summed = [_sum(reason, waits) for reason, waits in by_reason.items()]
    return tuple(sorted(summed, key=lambda x: (-x.total_s, x.reason)))


def _waits(marks: Sequence[Mark], last_round: float) -> Iterable[_Wait]:
    """The waits of one process, each once it has ended."""
    waiting: dict[str, _Wait] = {}
    now = 0.0
    for mark in marks:
        if mark.kind in _LIVES:
            # One that was killed says no more: what it last said is as far as is known.
            yield from _ended(waiting, mark.time if mark.kind == "stop" else now)
        now = max(now, mark.time)
        subject = str(mark.values.get("subject", ""))
        if mark.kind != "wait" or not _MERGING.fullmatch(subject):
            continue
        reason, detail = (str(mark.values.get(key, "")) for key in ("reason", "detail"))
        before = waiting.get(subject)
        if before is not None and before.reason == reason:
            before.detail = detail
            continue
        if before is not None:
            yield from _ended({subject: waiting.pop(subject)}, mark.time)
        if reason and reason != _FOLLOWS:
            waiting[subject] = _Wait(reason=reason, detail=detail, begin=mark.time)
    yield from _ended(waiting, max(now, last_round))


def _ended(waiting: dict[str, _Wait], time: float) -> Iterable[_Wait]:
    for wait in waiting.values():
        wait.end = time
        yield wait
    waiting.clear()


def _sum(reason: str, waits: Sequence[_Wait]) -> WaitTime:
    longest = max(waits, key=lambda wait: wait.seconds)
    total, until = 0.0, 0.0
    for wait in sorted(waits, key=lambda wait: wait.begin):
        total += max(wait.end - max(wait.begin, until), 0.0)
        until = max(until, wait.end)
    return WaitTime(
        reason=reason,
        times=len(waits),
        total_s=total,
        longest_s=longest.seconds,
        longest_detail=longest.detail,
    )
