"""What the status page remembers: recent events, losses and weights, all of it bounded.

It hears of what the journal is told, at the moment at which that happens, and keeps no more than a
page can show; the journal's file is the whole record.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from decoupled_diloco.fault_points import wall as wall_clock
from synchronizer_server.http.sentences import sentence

logger = logging.getLogger(__name__)

MAX_EVENTS: Final = 80
MAX_POINTS: Final = 512
"""Points of the loss curve; where there are more, neighbours become one."""
MAX_LEFT_OUT: Final = 20
"""Events about learners that were left out of a round, beside the others: they push none out."""
SHARE_ROUNDS: Final = 64
"""Rounds over which the share of a learner in the weight is averaged."""
_MAX_TEXT: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        number: of what happened in this process, from 1.
        time: when, for the last time: seconds since the epoch, by the wall clock of whoever asks
            now; monotonic seconds while it is kept.
        subject: what it happened to.
        text: what happened.
        times: how often, since it was first kept.
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
    """

    events: tuple[Event, ...]
    losses: tuple[tuple[int, float], ...]
    shares: Mapping[str, float]


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


class Shares:
    """The mean share of everybody in the weight of the last rounds."""

    def __init__(self) -> None:
        self._rounds: deque[dict[str, float]] = deque()
        self._sums: dict[str, float] = {}
        self._times: Counter[str] = Counter()

    def add(self, weights: Mapping[str, float]) -> None:
        """Takes the weights of a round."""
        whole = sum(weights.values())
        is_number = 0.0 < whole < math.inf
        shares = {x: weight / whole if is_number else 0.0 for x, weight in weights.items()}
        self._rounds.append(shares)
        for learner_id, share in shares.items():
            self._sums[learner_id] = self._sums.get(learner_id, 0.0) + share
            self._times[learner_id] += 1
        if len(self._rounds) > SHARE_ROUNDS:
            self._forget(self._rounds.popleft())

    def _forget(self, shares: Mapping[str, float]) -> None:
        for learner_id, share in shares.items():
            self._times[learner_id] -= 1
            if self._times[learner_id]:
                self._sums[learner_id] -= share
            else:
                del self._times[learner_id], self._sums[learner_id]

    def mean(self) -> dict[str, float]:
        """By learner, from 0 to 1."""
        number = len(self._rounds)
        return {x: min(max(share / number, 0.0), 1.0) for x, share in self._sums.items()}


class Events:
    """The last events of a kind, each once.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[tuple[str, str], Event] = {}

    def add(self, event: Event) -> None:
        """Takes an event; one that was there already becomes the newest, and counts up."""
        key = event.subject, event.text
        before = self._kept.pop(key, None)
        self._kept[key] = event if before is None else replace(event, times=before.times + 1)
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._kept.values())


class History:
    """Hears of events, from any thread, and keeps what a page shows of them.

    Args:
        wall: seconds since the epoch; for people.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = wall_clock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._clock = clock
        self._lock = threading.Lock()
        self._curve = LossCurve()
        self._shares = Shares()
        self._store_failure = ""
        self._num_events = 0
        self._news = Events(MAX_EVENTS)
        self._left_out = Events(MAX_LEFT_OUT)
        self._failures: set[str] = set()

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Hears of an event; a failure here is said once and harms nothing of the run."""
        with self._lock:
            try:
                self._take(kind, fields)
            except Exception:
                if kind not in self._failures:
                    self._failures.add(kind)
                    logger.exception("the status page lost an event: %s", kind)

    def remembered(self) -> Remembered:
        """Returns what there is to show now."""
        with self._lock:
            events = sorted([*self._news, *self._left_out], key=lambda x: x.number, reverse=True)
            # How long ago each was does not change where the wall clock is set anew.
            zero = self._wall() - self._clock()
            return Remembered(
                events=tuple(replace(x, time=round(zero + x.time, 3)) for x in events),
                losses=tuple(self._curve.points()),
                shares=self._shares.mean(),
            )

    def _note(self, subject: str, text: str, to: Events | None = None) -> None:
        if not text.isprintable():
            text = "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in text)
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        self._num_events += 1
        event = Event(number=self._num_events, time=self._clock(), subject=subject, text=text)
        (self._news if to is None else to).add(event)

    def _take(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "round":
            self._round(fields)
        elif kind == "start":
            self._curve.go_back(fields["global_step"])
            self._store_failure = ""
        elif kind == "persist_failed":
            if self._store_failure == fields["reason"]:
                return  # it is tried again every second
            self._store_failure = fields["reason"]
        elif kind == "seeded":
            self._persisted()
        told = sentence(kind, fields)
        if told is not None:
            self._note(*told)

    def _round(self, fields: Mapping[str, Any]) -> None:
        self._persisted()
        weights = dict(zip(fields["contributors"], fields["weights"], strict=True))
        if weights:  # a fragment that was put back has no contributors
            self._shares.add(weights)
        if fields["loss"] is not None:
            self._curve.add(fields["global_step"], fields["loss"])
        for learner_id, reason in fields["dropped"].items():
            self._note(learner_id, f"was left out of a round: {reason}", self._left_out)

    def _persisted(self) -> None:
        if self._store_failure:
            self._store_failure = ""
            self._note("store", "persists again")
