"""Pace of the fleet: three moving averages, the grace window, and when rounds open.

Paper section 2, Eq. 3; design section 4, steps 1 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.settings import RunSettings


@dataclass(slots=True)
class Pace:
    """Moving averages in seconds; None before the first value.

    Attributes:
        settings: settings of the run.
        num_fragments: fragments of the layout, P; the model may allow fewer than were asked for.
        step_s: xi_step, inner step of the median live learner.
        quorum_s: xi_quorum, opening of a round to its K-th fresh report.
        sync_s: xi_sync, end of the grace window to published.
    """

    settings: RunSettings
    num_fragments: int
    step_s: float | None = None
    quorum_s: float | None = None
    sync_s: float | None = None

    @property
    def known(self) -> bool:
        """True once there are estimates; before, the first round waits for all learners."""
        return self.step_s is not None and self.sync_s is not None

    def observe_step(self, seconds: float) -> None:
        """Takes the median step time of the live learners."""
        self.step_s = self._average(self.step_s, seconds)

    def observe_quorum(self, seconds: float) -> None:
        """Takes the time that a round waited for its quorum."""
        self.quorum_s = self._average(self.quorum_s, seconds)

    def observe_sync(self, seconds: float) -> None:
        """Takes the time that a round took from the end of its grace window to published."""
        self.sync_s = self._average(self.sync_s, seconds)

    def grace_s(self) -> float:
        """Grace window: clip(gamma * (tau*step - quorum - sync), grace_min*step, step), seconds.

        The floor deviates from Eq. 3 where the slack is negative: no learner waits for it, the
        update only comes later, and a round with one member harms the model.
        """
        if not self.settings.grace or self.step_s is None:
            return 0.0
        slack = self.settings.overlap * self.step_s - (self.quorum_s or 0.0) - (self.sync_s or 0.0)
        shortest = self.settings.grace_min * self.step_s
        return min(max(self.settings.grace_gamma * slack, shortest), self.step_s)

    def opening_interval_s(self) -> float:
        """Shortest time between two openings, so that H inner steps pass between two merges."""
        if self.step_s is None:
            return 0.0
        return self.step_s * self.settings.sync_interval / self.num_fragments

    def push_limit_s(self, usual_transfer_s: float | None) -> float:
        """How long a push may make no progress, and how long it may take at all, seconds."""
        limit = self.settings.push_floor_s
        if self.step_s is not None:
            limit = max(limit, self.settings.overlap * self.step_s)
        if usual_transfer_s is not None:
            limit = max(limit, 4.0 * usual_transfer_s)
        return min(limit, self.settings.push_timeout_s)

    def _average(self, before: float | None, value: float) -> float:
        if before is None:
            return value
        return before + self.settings.smoothing * (value - before)
