"""When to try again, and what never to try again."""

from __future__ import annotations

from typing import Final

from decoupled_diloco.errors import DilocoError, Reason

_SURVIVED: Final = frozenset({Reason.INTERNAL, Reason.UNIMPLEMENTED, Reason.STORE_LOST})
"""Faults of the other side: a learner outlives them, though a catalogue says "do not retry"."""

REJOIN: Final = frozenset({Reason.UNKNOWN_LEARNER, Reason.STALE_TERM, Reason.LEASE_LOST})
"""The synchronizer does not know this incarnation (any more): join again."""


def is_fatal(error: DilocoError) -> bool:
    """True where no waiting heals: the process must stop and say why."""
    return not error.entry.retry and error.reason not in _SURVIVED


class Backoff:
    """Exponential backoff with full jitter: anything between 0 and a bound that doubles.

    Args:
        first_s: bound of the first wait, seconds.
        most_s: greatest bound, seconds.
    """

    def __init__(self, *, first_s: float = 0.1, most_s: float = 2.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._num_failures = 0

    def failed(self, random: float) -> float:
        """Returns how long to wait, seconds, from ``random`` in [0, 1)."""
        bound = min(self._most_s, self._first_s * 2.0 ** min(self._num_failures, 62))
        self._num_failures += 1
        return bound * random

    def succeeded(self) -> None:
        """Starts over."""
        self._num_failures = 0
