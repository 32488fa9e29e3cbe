"""How long ``learner.step`` holds up the user's loop: measured always, told on request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

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
    """Takes one pair of durations per step."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._num_steps = 0
        self._inside_s = 0.0
        self._loop_s = 0.0

    def add(self, *, inside_s: float, loop_s: float) -> None:
        """Adds a step: time inside ``learner.step``, and of the whole loop iteration."""
        self._samples.append(inside_s)
        self._num_steps += 1
        self._inside_s += inside_s
        self._loop_s += loop_s

    def read(self) -> Overhead:
        """Returns what was measured; zeros before the first step."""
        ordered = sorted(self._samples) or [0.0]
        return Overhead(
            num_steps=self._num_steps,
            last_s=self._samples[-1] if self._samples else 0.0,
            median_s=ordered[len(ordered) // 2],
            p99_s=ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            share=self._inside_s / self._loop_s if self._loop_s > 0.0 else 0.0,
        )
