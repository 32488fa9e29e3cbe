"""What happens to learners, as far as their data leases are concerned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.data_records import DataLease
from synchronizer_server.core.effects import GrantData
from synchronizer_server.core.events import DataRequested, LearnerJoined, StepReported
from synchronizer_server.core.roster import Learner, LearnerState
from synchronizer_server.core.state import CoreState

_HERE = frozenset({LearnerState.LIVE, LearnerState.LEFT})


@dataclass(slots=True)
class DataDesk:
    """Keeps the book of data leases in step with the roster; idle where shards are fixed."""

    state: CoreState
    _full: dict[str, Incarnation] = field(default_factory=dict)

    def requested(self, event: DataRequested, now: float) -> None:
        """Leases a range to a learner that asks."""
        learner = self.state.roster.current(event.learner_id, event.incarnation)
        book = self.state.data
        if book is None or learner is None:
            return
        learner.heard_at = now
        lease = book.grant(event.learner_id, event.incarnation, event.request_id)
        if lease is None and book.is_full(event.learner_id, event.incarnation):
            self._full[event.learner_id] = event.incarnation
        self.state.effects.append(
            GrantData(learner_id=event.learner_id, incarnation=event.incarnation, lease=lease)
        )

    def joined(self, event: LearnerJoined, now: float) -> None:
        """A new incarnation goes on with what it claims; the rest of its id is given back.

        Once everybody is back who may have something to claim, others may have the rest.
        """
        state = self.state
        if state.data is None:
            return
        state.data.joined(event.learner_id, event.incarnation, event.previous, event.claims)
        if state.claimants is not None:
            state.claimants.discard(event.learner_id)
            if not state.claimants:
                state.claims_until = min(state.claims_until, now)

    def reported(self, event: StepReported) -> None:
        """A learner says how far it is."""
        if self.state.data is not None:
            self.state.data.reported(
                event.learner_id,
                event.incarnation,
                local_step=event.local_step,
                lease_id=event.data_lease_id,
                position=event.data_position,
            )

    def give_back(self, learner: Learner) -> None:
        """A learner is gone for good, or for too long."""
        book = self.state.data
        if book is not None and book.give_back(learner.learner_id, learner.incarnation):
            learner.lease_lost = True

    def expired(self, now: float) -> list[tuple[Learner, str]]:
        """Learners whose data is to be given back, and why.

        They were away for too long; or they hold so much that is not merged that it is better
        trained by somebody whose work is merged.
        """
        if self.state.data is not None and now >= self.state.claims_until:
            self.state.data.returning.over()
        found = [(x, "silent") for x in self._away() if now >= self._until(x)]
        full = [self.state.roster.current(k, v) for k, v in self._full.items()]
        self._full.clear()
        found += [(x, "too much is not merged") for x in full if x is not None]
        return found

    def claims_end(self, now: float) -> float | None:
        """When the time of claims is over, seconds; None where it is."""
        until = self.state.claims_until
        return until if self.state.data is not None and now < until < math.inf else None

    def expires_at(self) -> float | None:
        """When the next of them is, seconds; None where none can be."""
        return min((self._until(x) for x in self._away()), default=None)

    def _away(self) -> Iterator[Learner]:
        book = self.state.data
        if book is not None:
            holders = (self.state.roster.find(x) for x in book.holders())
            yield from (x for x in holders if x is not None and x.state not in _HERE)

    def _until(self, learner: Learner) -> float:
        # Before the first re-joins nobody could be heard: that is nobody's silence.
        silent_at = learner.heard_at + self.state.settings.heartbeat_timeout_s
        return max(silent_at, self.state.claims_until)

    def why_lost(
        self,
        learner_id: str,
        previous: Incarnation | None,
        claims: tuple[DataLease, ...],
        snapshot: str,
        now: float,
    ) -> str | None:
        """Why a process that joins again has lost the leases it claims; None where it has not."""
        if self.state.data is None:
            return None
        known = self.state.roster.find(learner_id)
        return self.state.data.why_lost(
            learner_id,
            previous,
            known.incarnation if known is not None else None,
            claims,
            may_claim=now < self.state.claims_until,
            has_missed=not snapshot and previous is not None and self._has_missed(previous, now),
            snapshot=snapshot,
        )

    def _has_missed(self, previous: Incarnation, now: float) -> bool:
        """Whether data was leased again that only this incarnation's own term knew it to have.

        So it is once a later term has committed rounds, or the time of claims is over in this one.
        """
        state = self.state
        if previous.term >= state.term:
            return False
        return previous.term < state.committed_term or now >= state.claims_until
