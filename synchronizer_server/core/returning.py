"""Who goes on from a part of the snapshot that the run went back to, and with which leases."""

from __future__ import annotations

from collections.abc import Mapping

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.data_records import WentBack


class Returning:
    """Learners of a snapshot, from going back to it until each has joined again.

    What was leased before is on a lineage that is given up: whoever lived on past the cut has
    trained on samples that are handed out again, and must not claim them.

    Args:
        went_back: the last time that the run went back; None where it never did.
    """

    def __init__(self, went_back: WentBack | None) -> None:
        self._went_back = went_back
        self._awaited = dict(went_back.awaited) if went_back is not None else {}

    @property
    def awaited(self) -> tuple[str, ...]:
        """Ids of the learners that are to go on from their parts, and have not."""
        return tuple(self._awaited)

    @property
    def record(self) -> WentBack | None:
        """The same, for a round record."""
        if self._went_back is None:
            return None
        before = self._went_back
        return WentBack(snapshot=before.snapshot, term=before.term, awaited=dict(self._awaited))

    def begin(self, snapshot: str, term: int, participants: Mapping[str, Incarnation]) -> None:
        """The run goes back."""
        self._awaited = dict(participants)
        self._went_back = WentBack(snapshot=snapshot, term=term, awaited={})

    def settled(self, learner_id: str) -> None:
        """A learner is back, or has lost what it had."""
        self._awaited.pop(learner_id, None)

    def over(self) -> None:
        """Who is not back by now is not awaited any more."""
        self._awaited.clear()

    def why_not(self, learner_id: str, previous: Incarnation, snapshot: str) -> str | None:
        """Why a process cannot go on with what it held; None where nothing is against it.

        Args:
            learner_id: its id.
            previous: the incarnation under which it held it.
            snapshot: the snapshot whose part it goes on from; empty where from none.
        """
        went_back = self._went_back
        if not snapshot:
            if went_back is None or previous.term >= went_back.term:
                return None
            return f"the run went back to snapshot {went_back.snapshot}"
        if went_back is None or went_back.snapshot != snapshot:
            return f"the run has not gone back to snapshot {snapshot}"
        if self._awaited.get(learner_id) != previous:
            return f"its part of snapshot {snapshot} comes too late, or has served"
        return None
