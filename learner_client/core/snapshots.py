"""Which cut a learner is to record, and which it has: decided by clocks alone (paper 7.3)."""

from __future__ import annotations

from decoupled_diloco.versions import Version


class SnapshotMarks:
    """Markers heard, parts captured, parts written. Not safe in several threads at a time.

    A cut is a global step of the current term. The first clock that shows a newer one is the
    marker; the part is recorded at the next inner-step boundary, before any update above the cut.
    """

    def __init__(self) -> None:
        self._term = 0
        self._heard = 0
        self._due = 0
        self._recorded = 0

    @property
    def due(self) -> int:
        """The cut to record at the next boundary; 0 for none."""
        return self._due

    @property
    def recorded(self) -> int:
        """The newest cut whose part is written: what the learner's own clocks carry."""
        return self._recorded

    @property
    def term(self) -> int:
        """Term of the cuts."""
        return self._term

    def joined(self, term: int, cut: int) -> None:
        """A Join was answered; a snapshot that had begun by then does not wait for this learner.

        A new term has abandoned whatever was pending in the one before.
        """
        if term != self._term:
            self._term, self._heard, self._due, self._recorded = term, 0, 0, 0
        self._heard = max(self._heard, cut)

    def heard(self, term: int, cut: int) -> None:
        """A clock of the synchronizer, or a notice of it, shows this cut."""
        if term == self._term and cut > self._heard:
            self._heard = self._due = cut

    def over(self, cut: int) -> None:
        """The snapshot is over: who has not recorded its part yet need not any more."""
        self._heard = max(self._heard, cut)
        if self._due <= cut:
            self._due = 0

    def is_beyond(self, version: Version) -> bool:
        """Whether an update of this version is above the cut that is due."""
        return self._due > 0 and (version.term, version.global_step) > (self._term, self._due)

    def applied(self, version: Version) -> None:
        """An update was written into the model: beyond the cut, the part cannot be recorded."""
        if self.is_beyond(version):
            self._due = 0

    def captured(self) -> None:
        """The part of the cut that was due is copied, or was given up."""
        self._due = 0

    def written(self, term: int, cut: int) -> None:
        """The part is on the disk."""
        if term == self._term:
            self._recorded = max(self._recorded, cut)
