"""What a synchronizer does. The shell carries these out **in the order given**.

Duties of order: an accepted push is accumulated before its round is merged; a round is persisted
before it is published; a published round is complete for everybody who asks afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core.data_records import DataLease, DataRange, DataTotals
from synchronizer_server.core.events import PushKey
from synchronizer_server.core.records import ContributionRecord, DropRecord


class Outcome(StrEnum):
    """What became of a push."""

    ACCEPTED = "accepted"
    DROPPED = "dropped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSeed:
    """Tell this incarnation that it is to push the first parameters."""

    learner_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPull:
    """Ask a learner for its newest outer gradient of a fragment."""

    learner_id: str
    incarnation: Incarnation
    global_step: int
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSchedule:
    """Tell every live learner which fragments to copy at its next inner-step boundary."""

    global_step: int
    due_fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDrain:
    """Ask a learner to finish its step and leave."""

    learner_id: str
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStop:
    """Tell every learner that the run is complete."""

    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """End everything that this earlier incarnation has open, with FENCED."""

    learner_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStream:
    """End the report stream of a learner that went silent; it may come back."""

    learner_id: str
    incarnation: Incarnation
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantData:
    """Tell this incarnation which range of the data it has; None: nothing before more is merged."""

    learner_id: str
    incarnation: Incarnation
    lease: DataLease | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePush:
    """Receive the bytes of this push."""

    key: PushKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptPush:
    """Accumulate this staged push, then answer `Outcome.ACCEPTED`.

    Attributes:
        weight: weight of the contribution.
        rebase: True where its base is older than the published copy and the vector must have
            (published_now - published_base) added first.
    """

    key: PushKey
    weight: float
    rebase: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPush:
    """Answer a push that is not accepted; whatever was staged of it is thrown away."""

    key: PushKey
    outcome: Outcome
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRound:
    """Compute the outer step of a full round from what was accumulated.

    Attributes:
        global_step: the round.
        fragment: its fragment.
        roll_back_to: where an operator puts the fragment back: the retained version whose copy is
            published anew, with residual and momentum zero; nothing was accumulated then.
    """

    global_step: int
    fragment: int
    roll_back_to: Version | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistSeed:
    """Persist the seed: every fragment, global step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSeed:
    """Publish the seed to every watcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """What happened in a round; becomes its record and a line of the metrics.

    Attributes:
        contributions: in order of accumulation.
        dropped: who was asked and left out, and why.
        live: learners that were live when the grace window ended.
        step_s: xi_step, seconds.
        quorum_s: opening of the round to its K-th fresh report, seconds.
        grace_s: grace window granted, seconds.
        measured_h: inner steps of the median live learner since this fragment's merge before;
            None where there was none.
        merged_data: ranges of leased data that are in every fragment from this round on.
        data_totals: where leased data stands with this round; None where shards are fixed.
        rolled_back: why an operator put the fragment back in this round; empty in all others.
    """

    global_step: int
    fragment: int
    contributions: tuple[ContributionRecord, ...]
    dropped: tuple[DropRecord, ...]
    live: tuple[str, ...]
    step_s: float
    quorum_s: float
    grace_s: float
    measured_h: float | None
    merged_data: tuple[DataRange, ...] = ()
    data_totals: DataTotals | None = None
    rolled_back: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistRound:
    """Persist the record of a merged round."""

    summary: RoundSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRound:
    """Publish a persisted round to every watcher.

    Attributes:
        sync_s: end of the grace window to now, seconds.
    """

    summary: RoundSummary
    sync_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitChanged:
    """Something waits for another reason than before, or (reason empty) no longer.

    Attributes:
        subject: what waits, such as ``round 17``.
        reason: stable word for what it waits for.
        detail: the same for people, with names and numbers.
    """

    subject: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerChanged:
    """A learner is live, disconnected, gone or left.

    Attributes:
        state: the new state.
        reason: why.
    """

    learner_id: str
    incarnation: Incarnation
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginSnapshot:
    """Pin the newest record and what it names; tell all learners of the cut.

    Attributes:
        global_step: the cut, S: the round that was just published.
        awaited: learners whose parts are to come.
    """

    global_step: int
    awaited: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSnapshot:
    """All parts are there: write the manifest, which makes the snapshot complete.

    Attributes:
        global_step: its cut.
        recorded: incarnation of every learner that is in it.
        left_out: why the others are not.
    """

    global_step: int
    recorded: Mapping[str, Incarnation]
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSnapshot:
    """The snapshot is over; where it failed, what there is of it goes.

    Attributes:
        global_step: its cut.
        participants: learners that recorded their part.
        left_out: why the others did not.
        failure: why it failed; empty where it is complete.
    """

    global_step: int
    participants: tuple[str, ...]
    left_out: Mapping[str, str]
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineChanged:
    """A learner is left out for a while, or (reason empty) is tried again.

    Attributes:
        reason: why, for people; empty where it is over.
        seconds: for how long.
    """

    learner_id: str
    incarnation: Incarnation
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersCut:
    """A learner claims counters that it cannot have; its weight is cut down. Said once in a row.

    Attributes:
        detail: what was claimed and what counts.
    """

    learner_id: str
    incarnation: Incarnation
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBackFailed:
    """A fragment could not be put back after all."""

    fragment: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDonor:
    """Ask a learner for its inner state.

    Attributes:
        learner_id: the donor.
        incarnation: under which life.
        recipient_id: who is to get it.
        known_global_steps: global step by fragment that it must have applied before it copies.
    """

    recovery_id: str
    learner_id: str
    incarnation: Incarnation
    recipient_id: str
    known_global_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropDonor:
    """Take nothing more from this donor of a recovery."""

    recovery_id: str
    learner_id: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecovery:
    """Tell the recipient that this recovery came to nothing."""

    recovery_id: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The last round is published, or a drain has nothing left to finish."""

    global_step: int


Effect = (
    GrantSeed
    | GrantData
    | SendPull
    | SendSchedule
    | SendDrain
    | SendStop
    | Fence
    | CloseStream
    | StagePush
    | AcceptPush
    | AnswerPush
    | MergeRound
    | PersistSeed
    | PublishSeed
    | PersistRound
    | PublishRound
    | WaitChanged
    | LearnerChanged
    | BeginSnapshot
    | KeepSnapshot
    | EndSnapshot
    | QuarantineChanged
    | CountersCut
    | RollBackFailed
    | AskDonor
    | DropDonor
    | EndRecovery
    | Completed
)
