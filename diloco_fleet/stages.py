"""The end of a fleet, stage by stage: processes to see the end of, each step with a bound."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_fleet.process import Process

KILL_WAIT_S: Final = 10.0
"""How long a killed process may take to be gone."""

Step = tuple[signal.Signals | None, float]
"""A signal, or None to wait only, and how long its effect may take in seconds."""


@dataclass(slots=True)
class Stage:
    """Processes to see the end of, and what to do about those that take too long.

    Attributes:
        choose: the processes; asked when the stage begins.
        escalation: what is done, in order.
    """

    choose: Callable[[], Sequence[Process]]
    escalation: list[Step]
    _processes: Sequence[Process] = ()
    _deadline: float | None = None
    _tried: str = ""

    def advance(self, now: float, late: Callable[[str], None]) -> bool:
        """Goes on with the stage; returns whether it is over.

        Args:
            now: monotonic, seconds.
            late: takes a sentence on processes that took too long.
        """
        if self._deadline is None:
            self._processes = self.choose()
        if self._deadline is None or now >= self._deadline:
            self._escalate(now, late)
        # What waits for its restart ends here once it has been told to stop.
        return all(process.ended for process in self._processes)

    def _escalate(self, now: float, say: Callable[[str], None]) -> None:
        number, bound_s = self.escalation.pop(0) if self.escalation else (signal.SIGKILL, 1.0)
        late = [process for process in self._processes if not process.ended]
        if self._deadline is not None and late and number is not None:
            names = ", ".join(process.name for process in late)
            say(f"{names} did not end {self._tried}; next: {number.name}")
        self._deadline = now + bound_s
        self._tried = f"within {bound_s:g} s" + (f" of {number.name}" if number else "")
        if number is not None:
            for process in late:
                process.stop(number)


def told(drain_s: float) -> list[Step]:
    """The escalation of a stage whose processes are told to stop."""
    return [(signal.SIGTERM, drain_s), (signal.SIGKILL, KILL_WAIT_S)]
