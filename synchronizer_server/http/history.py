"""What the status page remembers: recent events, losses and weights, all of it bounded.

It hears of what the journal is told, at the moment at which that happens, and keeps no more than a
page can show; the journal's file is the whole record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from synchronizer_server.http.sentences import sentence

logger = logging.getLogger(__name__)

MAX_EVENTS: Final = 100
MAX_POINTS: Final = 512
"""Points of the loss curve; where there are more, neighbours become one."""
SHARE_ROUNDS: Final = 64
"""Rounds over which the share of a learner in the weight is averaged."""
_MAX_TEXT: Final = 300


@dataclass(slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        number: counts the events of this process, from 1.
        time: when, for the last time, seconds since the epoch.
        subject: what it happened to.
        text: what happened.
        times: how often in a row.
    """

    number: int
    time: float
    subject: str
    text: str
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What there is to show now.

    Attributes:
        events: the newest first.
        losses: median training loss of the contributors, by global step.
        shares: mean share of each learner in the weight of the last rounds, from 0 to 1; a round
            to which it contributed nothing counts as 0.
        store_trouble: reason code of the failure of the store that lasts; empty where it works.
        published_s: seconds since the last round was published; None before the first.
    """

    events: tuple[Event, ...]
    losses: tuple[tuple[int, float], ...]
    shares: Mapping[str, float]
    store_trouble: str
    published_s: float | None


class LossCurve:
    """Loss by global step, from the first one heard of to the newest, in few enough points.

    Args:
        max_points: even.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._open: list[tuple[int, float]] = []

    def add(self, global_step: int, loss: float) -> None:
        """Takes the loss of a round."""
        self._open.append((global_step, loss))
        if len(self._open) < self._stride:
            return
        self._points.append(_middle(self._open))
        self._open.clear()
        if len(self._points) >= self._max_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_middle(pair) for pair in pairs]
            self._stride *= 2

    def go_back(self, global_step: int) -> None:
        """Forgets what lies above a global step."""
        self._points = [x for x in self._points if x[0] <= global_step]
        self._open = [x for x in self._open if x[0] <= global_step]

    def points(self) -> list[tuple[int, float]]:
        """The points in order of their global steps; the newest round is always in."""
        return [*self._points, *([_middle(self._open)] if self._open else [])]


def _middle(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """One point for several: the last step, and the mean of the losses."""
    return points[-1][0], sum(loss / len(points) for _, loss in points)


class History:
    """Hears of events, from any thread, and keeps what a page shows of them.

    Args:
        clock: monotonic seconds.
        wall: seconds since the epoch; for people.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._curve = LossCurve()
        self._store_trouble = ""
        self._published_at: float | None = None
        self._num_events = 0
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._weights: deque[dict[str, float]] = deque(maxlen=SHARE_ROUNDS)

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Hears of an event; a failure here is said and harms nothing of the run."""
        with self._lock:
            try:
                self._take(kind, fields)
            except Exception:
                logger.exception("the status page lost an event: %s", kind)

    def remembered(self) -> Remembered:
        """Returns what there is to show now."""
        with self._lock:
            at = self._published_at
            return Remembered(
                events=tuple(replace(x) for x in reversed(self._events)),
                losses=tuple(self._curve.points()),
                shares=self._shares(),
                store_trouble=self._store_trouble,
                published_s=None if at is None else self._clock() - at,
            )

    def _shares(self) -> dict[str, float]:
        total: defaultdict[str, float] = defaultdict(float)
        for weights in self._weights:
            whole = sum(weights.values())
            for learner_id, weight in weights.items():
                total[learner_id] += weight / whole if whole else 0.0
        return {x: share / len(self._weights) for x, share in sorted(total.items())}

    def _note(self, subject: str, text: str) -> None:
        """Keeps an event; the same one again only counts up."""
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        last = self._events[-1] if self._events else None
        if last is not None and (last.subject, last.text) == (subject, text):
            last.times += 1
            last.time = self._wall()
        else:
            self._num_events += 1
            event = Event(number=self._num_events, time=self._wall(), subject=subject, text=text)
            self._events.append(event)

    def _take(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "round":
            self._round(fields)
        elif kind == "start":
            self._curve.go_back(fields["global_step"])
        elif kind == "persist_failed":
            if self._store_trouble == fields["reason"]:
                return  # it is tried again every second
            self._store_trouble = fields["reason"]
        elif kind == "seeded":
            self._persisted()
        told = sentence(kind, fields)
        if told is not None:
            self._note(*told)

    def _round(self, fields: Mapping[str, Any]) -> None:
        self._persisted()
        self._published_at = self._clock()
        weights = dict(zip(fields["contributors"], fields["weights"], strict=True))
        if weights:  # a fragment that was put back has no contributors
            self._weights.append(weights)
        if fields["loss"] is not None:
            self._curve.add(fields["global_step"], fields["loss"])
        for learner_id, reason in fields["dropped"].items():
            self._note(learner_id, f"was left out of a round: {reason}")

    def _persisted(self) -> None:
        if self._store_trouble:
            self._store_trouble = ""
            self._note("store", "persists again")
