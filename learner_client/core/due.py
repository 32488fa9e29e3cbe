"""Which fragments to copy at a boundary, because they are asked for next (design section 4)."""

from __future__ import annotations

from collections.abc import Sequence


class DueFragments:
    """Follows the schedule as far as it is heard, and computes it where it is not.

    A fragment is merged every P global steps and at most tau rounds are in flight, so the rounds
    that may ask before the next boundary are the tau + 1 after the last committed one.

    Args:
        num_fragments: P.
        overlap: tau.
    """

    def __init__(self, num_fragments: int, overlap: int) -> None:
        self._num_fragments = num_fragments
        self._overlap = overlap
        self._global_step = 0
        self._scheduled: tuple[int, ...] = ()
        self._scheduled_at = -1

    @property
    def global_step(self) -> int:
        """Last committed global step that was heard of."""
        return self._global_step

    def heard(self, global_step: int) -> None:
        """Notes a global step that is committed."""
        self._global_step = max(self._global_step, global_step)

    def rewound(self, global_step: int) -> None:
        """Notes where a new term starts, which may be below what was heard."""
        self._global_step = global_step
        self._scheduled_at = -1

    def scheduled(self, global_step: int, fragments: Sequence[int]) -> None:
        """Takes a schedule; fragments that do not exist and repetitions are left out."""
        self.heard(global_step)
        known = (p for p in fragments if 0 <= p < self._num_fragments)
        self._scheduled = tuple(dict.fromkeys(known))
        self._scheduled_at = global_step

    def now(self) -> tuple[int, ...]:
        """Fragments to copy, most urgent first; a schedule older than what was heard is ignored."""
        if self._scheduled and self._scheduled_at >= self._global_step:
            return self._scheduled
        first = self._global_step + 1
        steps = range(first, first + min(self._overlap + 1, self._num_fragments))
        return tuple(step % self._num_fragments for step in steps)
