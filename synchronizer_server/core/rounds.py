"""A round: the work for one global step, and the table of its states.

The table is the specification: a pair that is absent is illegal. ``docs/architecture.md`` shows
the diagram drawn from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core.data_records import DataRange, DataTotals
from synchronizer_server.core.effects import RoundSummary
from synchronizer_server.core.events import PushOpened
from synchronizer_server.core.records import ContributionRecord, DropRecord


class RoundState(StrEnum):
    """Where a round stands (design section 4, steps 2 to 6)."""

    COLLECTING = "collecting"
    SUSPENDED = "suspended"
    GRACE = "grace"
    PULLING = "pulling"
    MERGING = "merging"
    MERGED = "merged"
    PERSISTING = "persisting"
    PUBLISHED = "published"
    ABANDONED = "abandoned"


class RoundInput(StrEnum):
    """What moves a round on."""

    QUORUM_REACHED = "quorum_reached"
    QUORUM_LOST = "quorum_lost"
    GRACE_OVER = "grace_over"
    TOO_FEW_ACCEPTED = "too_few_accepted"
    FULL = "full"
    MERGED = "merged"
    IN_TURN = "in_turn"
    PERSISTED = "persisted"
    PERSIST_FAILED = "persist_failed"
    EARLIER_COLLECTS = "earlier_collects"
    RESUMED = "resumed"
    ABANDON = "abandon"
    ROLL_BACK = "roll_back"


TRANSITIONS: Final[dict[tuple[RoundState, RoundInput], RoundState]] = {
    (RoundState.COLLECTING, RoundInput.QUORUM_REACHED): RoundState.GRACE,
    (RoundState.COLLECTING, RoundInput.EARLIER_COLLECTS): RoundState.SUSPENDED,
    (RoundState.COLLECTING, RoundInput.ABANDON): RoundState.ABANDONED,
    (RoundState.COLLECTING, RoundInput.ROLL_BACK): RoundState.MERGING,
    (RoundState.SUSPENDED, RoundInput.RESUMED): RoundState.COLLECTING,
    (RoundState.SUSPENDED, RoundInput.ABANDON): RoundState.ABANDONED,
    (RoundState.SUSPENDED, RoundInput.ROLL_BACK): RoundState.MERGING,
    (RoundState.GRACE, RoundInput.GRACE_OVER): RoundState.PULLING,
    (RoundState.GRACE, RoundInput.QUORUM_LOST): RoundState.COLLECTING,
    (RoundState.GRACE, RoundInput.EARLIER_COLLECTS): RoundState.SUSPENDED,
    (RoundState.GRACE, RoundInput.ABANDON): RoundState.ABANDONED,
    (RoundState.GRACE, RoundInput.ROLL_BACK): RoundState.MERGING,
    (RoundState.PULLING, RoundInput.TOO_FEW_ACCEPTED): RoundState.COLLECTING,
    (RoundState.PULLING, RoundInput.FULL): RoundState.MERGING,
    (RoundState.PULLING, RoundInput.ROLL_BACK): RoundState.MERGING,
    (RoundState.MERGING, RoundInput.MERGED): RoundState.MERGED,
    (RoundState.MERGED, RoundInput.IN_TURN): RoundState.PERSISTING,
    (RoundState.PERSISTING, RoundInput.PERSISTED): RoundState.PUBLISHED,
    (RoundState.PERSISTING, RoundInput.PERSIST_FAILED): RoundState.MERGED,
}

OPEN_STATES: Final = frozenset({RoundState.COLLECTING, RoundState.SUSPENDED, RoundState.GRACE})
"""The learners are still to be asked. At most one round collects at a time: where a round falls
back to collecting while a later one does, the later one is suspended until it is its turn."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """A learner that was asked and is neither in nor dropped.

    Attributes:
        incarnation: life that was asked.
        asked_at: when, seconds.
        limit_s: how long it may take.
        header: its push, once that is open.
        staged_bytes: bytes received.
    """

    incarnation: Incarnation
    asked_at: float
    limit_s: float
    header: PushOpened | None = None
    staged_bytes: int = 0

    def late_at(self) -> float:
        """When it is too late: complete by then, or dropped."""
        return self.asked_at + self.limit_s


@dataclass(slots=True, kw_only=True)
class Round:
    """One round in flight.

    Attributes:
        global_step: its t, fixed when it opens.
        fragment: its fragment, t mod P.
        opened_at: when it opened, seconds.
        startup: True where its grace window is that of a start: it is the first round of this
            synchronizer, or there was no estimate of the pace yet.
        state: where it stands.
        quorum_at: when the K-th fresh report came.
        quorum_s: opening to then.
        grace_s: grace window granted.
        grace_ended_at: when the learners were asked.
        pending: who was asked and is neither in nor dropped.
        accepted: contributions in order of accumulation.
        dropped: who was asked and is out, and why.
        live: learners live when the grace window ended.
        version: result, once merged.
        persisted_as: what is being persisted; the same is published.
        retry_at: no attempt to persist before that, seconds.
        measured_h: inner steps since the fragment's merge before, of the median learner.
        merged_data: ranges of leased data that are in every fragment from this round on.
        data_totals: where leased data stands with this round.
        rolled_back: why an operator put the fragment back in this round; empty in all others.
    """

    global_step: int
    fragment: int
    opened_at: float
    startup: bool
    state: RoundState = RoundState.COLLECTING
    quorum_at: float | None = None
    quorum_s: float = 0.0
    grace_s: float = 0.0
    grace_ended_at: float = 0.0
    pending: dict[str, Pending] = field(default_factory=dict)
    accepted: dict[str, ContributionRecord] = field(default_factory=dict)
    dropped: dict[str, Reason] = field(default_factory=dict)
    live: tuple[str, ...] = ()
    version: Version | None = None
    persisted_as: RoundSummary | None = None
    retry_at: float = 0.0
    measured_h: float | None = None
    merged_data: tuple[DataRange, ...] = ()
    data_totals: DataTotals | None = None
    rolled_back: str = ""

    def move(self, what: RoundInput) -> None:
        """Takes a transition of the table."""
        key = (self.state, what)
        assert key in TRANSITIONS, f"round {self.global_step}: {what} in {self.state}"
        self.state = TRANSITIONS[key]

    @property
    def collecting(self) -> bool:
        """True until the learners are asked."""
        return self.state in OPEN_STATES

    @property
    def grace_until(self) -> float:
        """When the grace window ends at the latest."""
        assert self.quorum_at is not None, "no grace before the quorum"
        return self.quorum_at + self.grace_s

    def drop(self, learner_id: str, reason: Reason) -> Pending:
        """Takes a learner that was asked out of this round: weight 0."""
        self.dropped[learner_id] = reason
        return self.pending.pop(learner_id)

    def summary(self, step_s: float) -> RoundSummary:
        """What happened, for the record and the metrics."""
        return RoundSummary(
            global_step=self.global_step,
            fragment=self.fragment,
            contributions=tuple(self.accepted.values()),
            dropped=tuple(
                DropRecord(learner_id=learner_id, reason=str(reason))
                for learner_id, reason in sorted(self.dropped.items())
                if learner_id not in self.accepted
            ),
            live=self.live,
            step_s=step_s,
            quorum_s=self.quorum_s,
            grace_s=self.grace_s,
            measured_h=self.measured_h,
            merged_data=self.merged_data,
            data_totals=self.data_totals,
            rolled_back=self.rolled_back,
        )


def diagram() -> str:
    """Returns the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {RoundState.COLLECTING}"]
    lines += [f"    {a} --> {b}: {what}" for (a, what), b in TRANSITIONS.items()]
    lines += [f"    {end} --> [*]" for end in (RoundState.PUBLISHED, RoundState.ABANDONED)]
    return "\n".join(lines)
