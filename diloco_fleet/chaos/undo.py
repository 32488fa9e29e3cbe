"""What undoes faults, kept until it has worked."""

from __future__ import annotations

from collections.abc import Callable

from decoupled_diloco.errors import DilocoError, Reason

Undoing = Callable[[], None]
"""Undoes one thing that was done; may fail, and is tried again then."""


class Undo:
    """Undoings by the number of their strike."""

    def __init__(self) -> None:
        self._undoings: dict[int, list[Undoing]] = {}

    def add(self, number: int, undoing: Undoing) -> None:
        """Keeps what undoes something; to be called before that is done."""
        self._undoings.setdefault(number, []).append(undoing)

    def heal(self, number: int) -> None:
        """Undoes everything of a strike, the last first; what fails is kept, and stops no other.

        Whatever an undoing raises, expected or not, is such a failure.

        Raises:
            DilocoError: what could not be undone.
        """
        failures, kept = [], []
        for undoing in reversed(self._undoings.pop(number, [])):
            try:
                undoing()
            except Exception as error:
                failures.append(
                    error.message
                    if isinstance(error, DilocoError)
                    else f"{type(error).__name__}: {error}"
                )
                kept.append(undoing)
        if failures:
            self._undoings[number] = kept[::-1]
            raise DilocoError(Reason.INTERNAL, f"not healed: {'; '.join(failures)}")

    def heal_all(self) -> list[str]:
        """Undoes everything; returns what could not be, for people."""
        unhealed = []
        for number in sorted(self._undoings, reverse=True):
            try:
                self.heal(number)
            except DilocoError as error:
                unhealed.append(f"strike {number}: {error.message}")
        return unhealed
