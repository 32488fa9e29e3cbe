"""Quarantine: a learner that keeps failing to deliver is left out for a while, then tried again.

Only failures in a row count, and only those that are the learner's own: wrong content, and
answers that never come. Being late once, having nothing to push, or standing on an older base is
part of a healthy fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from decoupled_diloco.errors import Reason
from decoupled_diloco.settings import RunSettings

FAILURES: Final = frozenset(
    {
        Reason.NON_FINITE,
        Reason.NORM_BOUND,
        Reason.BAD_COUNTERS,
        Reason.CORRUPT,
        Reason.CODEC_MISMATCH,
        Reason.TRUNCATED,
        Reason.OVERSIZED,
        Reason.MALFORMED,
        Reason.UNKNOWN_FRAGMENT,
        Reason.BASE_MISMATCH,
        Reason.NO_PROGRESS,
    }
)
"""What counts by itself; ``TOO_LATE`` counts where nobody could be given more time."""

_FIRST_TIMEOUTS: Final = 2.0
_MOST_TIMEOUTS: Final = 120.0


@dataclass(slots=True)
class _Standing:
    num_failures: int = 0
    num_sentences: int = 0
    until: float | None = None
    probing: bool = False


class Quarantine:
    """Who is out, until when, and who is tried again.

    The first time lasts two heartbeat time-outs (10 s by default), each further one twice as long,
    at most 120 of them (10 min); an accepted push wipes the slate. It belongs to the learner id,
    so that joining again does not end it.

    Args:
        settings: settings of the run.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._standings: dict[str, _Standing] = {}

    def counts(self, reason: Reason, limit_s: float) -> bool:
        """Whether a push that was asked for and ended so is a failure to deliver.

        Args:
            reason: why it was not accepted.
            limit_s: how long it was given; bytes that come too slowly get more time at first.
        """
        if reason is Reason.TOO_LATE:
            return limit_s >= self._settings.push_timeout_s
        return reason in FAILURES

    def failed(self, learner_id: str, now: float) -> float | None:
        """Takes a failure; returns for how long the learner is out now, None where it is not."""
        after = self._settings.quarantine_after
        if after == 0:
            return None
        standing = self._standings.setdefault(learner_id, _Standing())
        standing.num_failures += 1
        if standing.until is not None or (standing.num_failures < after and not standing.probing):
            return None
        timeout_s = self._settings.heartbeat_timeout_s
        seconds = timeout_s * min(_FIRST_TIMEOUTS * 2.0**standing.num_sentences, _MOST_TIMEOUTS)
        standing.num_sentences = min(standing.num_sentences + 1, 16)
        standing.until = now + seconds
        standing.probing = False
        return seconds

    def accepted(self, learner_id: str) -> None:
        """An accepted push clears everything."""
        self._standings.pop(learner_id, None)

    def num_failures(self, learner_id: str) -> int:
        """Failures in a row."""
        standing = self._standings.get(learner_id)
        return standing.num_failures if standing is not None else 0

    def probing(self, learner_id: str) -> bool:
        """True once its time is over, until one pull has shown whether it delivers."""
        standing = self._standings.get(learner_id)
        return standing is not None and standing.probing

    def until(self, learner_id: str) -> float | None:
        """When its time is over, seconds; None where it is not out."""
        standing = self._standings.get(learner_id)
        return standing.until if standing is not None else None

    def release(self, now: float) -> list[str]:
        """Learners whose time is over now: they are tried again, one pull at a time."""
        over = [k for k, x in self._standings.items() if x.until is not None and now >= x.until]
        for learner_id in over:
            self._standings[learner_id].until = None
            self._standings[learner_id].probing = True
        return over

    def next_at(self) -> float | None:
        """When the next learner's time is over, seconds; None where nobody is out."""
        return min((x.until for x in self._standings.values() if x.until is not None), default=None)
