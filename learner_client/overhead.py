"""How long ``learner.step`` holds up the user's loop: measured always, told on request."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from learner_client.transport.calls import num_calls

_MAX_SAMPLES: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Time inside ``learner.step``.

    Attributes:
        num_steps: steps so far.
        last_s: the newest step, seconds.
        median_s: median over the last 10 000 steps, seconds.
        p99_s: 99th percentile of them, seconds.
        share: of the time of the whole loop.
    """

    num_steps: int
    last_s: float
    median_s: float
    p99_s: float
    share: float


class OverheadMeter:
    """Takes one pair of durations per step.

    Attributes:
        num_steps: steps so far.
        inside_s: time inside ``learner.step`` so far, seconds.
        loop_s: time of the loop round it so far, seconds.
        join_s: time from entering to the first parameters, seconds.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.num_steps = 0
        self.inside_s = 0.0
        self.loop_s = 0.0
        self.join_s = 0.0
        self._thread: int | None = None
        self._calls_before = 0

    def joined(self, *, entered_at: float) -> float:
        """Training begins now, in the calling thread; returns the time, by ``perf_counter``."""
        now = time.perf_counter()
        self.join_s += now - entered_at
        self._thread = threading.get_ident()
        self._calls_before = num_calls(self._thread)
        return now

    def add(self, *, inside_s: float, loop_s: float) -> None:
        """Adds a step: time inside ``learner.step``, and of the whole loop iteration."""
        self._samples.append(inside_s)
        self.num_steps += 1
        self.inside_s += inside_s
        self.loop_s += loop_s

    @property
    def num_calls(self) -> int:
        """Network calls that the training thread has made since it may train."""
        return 0 if self._thread is None else num_calls(self._thread) - self._calls_before

    def read(self) -> Overhead:
        """Returns what was measured; zeros before the first step."""
        ordered = sorted(self._samples) or [0.0]
        return Overhead(
            num_steps=self.num_steps,
            last_s=self._samples[-1] if self._samples else 0.0,
            median_s=ordered[len(ordered) // 2],
            p99_s=ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            share=self.inside_s / self.loop_s if self.loop_s > 0.0 else 0.0,
        )
