"""What can happen to a synchronizer. The shell feeds these to `SynchronizerCore.handle`.

Every event about a learner names its incarnation, so that whatever an earlier life of the same
learner still sends is recognised and fenced.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core.data_records import DataLease


@dataclass(frozen=True, slots=True, order=True)
class PushKey:
    """Names a push; a repeated push of one key gets the first answer.

    Attributes:
        learner_id: who pushes.
        incarnation: under which life.
        global_step: round that asked; 0 when seeding.
        fragment: fragment pushed.
    """

    learner_id: str
    incarnation: Incarnation
    global_step: int
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerJoined:
    """Membership granted an incarnation; every earlier one of this learner is fenced.

    Attributes:
        shard: its number, and data shard.
        records_parts: True where it records its part of snapshots.
        previous: incarnation of the same process before, if it had one.
        claims: data leases that this process holds since then.
    """

    learner_id: str
    incarnation: Incarnation
    shard: int
    records_parts: bool = True
    previous: Incarnation | None = None
    claims: tuple[DataLease, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpened:
    """The learner's report stream is open: from now on it can be asked."""

    learner_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """The learner's report stream broke: it is out until it is back."""

    learner_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLeft:
    """The learner said goodbye."""

    learner_id: str
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerDrained:
    """An operator asks a learner to leave."""

    learner_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A heartbeat: the learner lives, though perhaps it does not progress."""

    learner_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReported:
    """A report: the learner's metadata after an inner step.

    Attributes:
        local_step: its step now.
        num_steps: inner steps since its report before.
        num_tokens: tokens trained in them.
        known_global_steps: global step of the version it has applied, by fragment.
        loss: training loss in nats per token, where it told.
        data_lease_id: data lease in use; 0 without one.
        data_position: first position of it that is not trained.
    """

    learner_id: str
    incarnation: Incarnation
    local_step: int
    num_steps: int
    num_tokens: int
    known_global_steps: tuple[int, ...] = ()
    loss: float | None = None
    data_lease_id: int = 0
    data_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequested:
    """The learner asks for a range of the data; a repeated request is one."""

    learner_id: str
    incarnation: Incarnation
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullDeclined:
    """The learner cannot meet a pull now; it counts with weight 0."""

    learner_id: str
    incarnation: Incarnation
    global_step: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOpened:
    """The header of an outer gradient came. Nothing is staged before the core agrees.

    Attributes:
        key: names the push.
        term: term of the round that it answers.
        base: published copy against which it was computed.
        local_step: local step at which the parameters were copied.
        num_tokens: tokens since the learner's counters of this fragment were reset.
        num_steps: inner steps since then.
    """

    key: PushKey
    term: int
    base: Version
    local_step: int
    num_tokens: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushProgressed:
    """More bytes of a push are staged."""

    key: PushKey
    staged_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStaged:
    """A push is whole and valid: digest, size and finiteness are checked.

    Attributes:
        key: names the push.
        norm: L2 norm of the outer gradient; its bound is checked here.
    """

    key: PushKey
    norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFailed:
    """A push was found wrong, or its stream broke for good.

    Attributes:
        refused: True where the content is wrong; False where it merely did not come.
    """

    key: PushKey
    reason: Reason
    message: str
    refused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedStaged:
    """The first parameters of a fragment are whole and valid."""

    learner_id: str
    incarnation: Incarnation
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedPersisted:
    """All fragments of the seed are persisted, with these versions."""

    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMerged:
    """The outer step of a round is computed; its result has this version."""

    global_step: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPersisted:
    """The record of a round is persisted, in the sense of the durability setting."""

    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed:
    """The record of a round (0: the seed) could not be persisted; it is tried again.

    Attributes:
        retry_after_s: how long to wait first.
    """

    global_step: int
    reason: Reason
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundHeld:
    """The record of a round is persisted, but may not be published yet (design section 6).

    Attributes:
        reason: ``replica`` or ``lease``; empty where it is held back no longer.
        detail: the same for people.
    """

    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumSet:
    """An operator set the minimum quorum."""

    quorum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """An operator puts a fragment back; `SynchronizerCore.roll_back_refusal` was asked before.

    Attributes:
        fragment: the fragment.
        reason: why, in the operator's words.
    """

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedForbidden:
    """A joiner holds merged versions of this run: it must not be seeded again."""

    learner_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """The synchronizer is to stop: no round opens any more, those in flight are finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAsked:
    """A learner asks for the inner state of a peer.

    Attributes:
        recovery_id: names the recovery.
        known_global_steps: global step of the version that it has, by fragment.
    """

    recovery_id: str
    learner_id: str
    incarnation: Incarnation
    known_global_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DonationProgressed:
    """More of a donor's inner state is here.

    Attributes:
        learner_id: the donor.
        is_blocked: True where the rest waits for the recipient to read.
        is_whole: True where the donor has sent everything.
    """

    recovery_id: str
    learner_id: str
    is_blocked: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DonationFailed:
    """A donor declined, broke off or sent what cannot be."""

    recovery_id: str
    learner_id: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWanted:
    """An operator asked for a snapshot: the next round that is committed becomes its cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecorded:
    """The learner's clock shows that its part is written; or it says why there will be none."""

    learner_id: str
    incarnation: Incarnation
    global_step: int
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotKept:
    """The manifest of the snapshot with this cut is durable."""

    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFailed:
    """The synchronizer's own part, or the manifest, could not be written."""

    global_step: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryEnded:
    """The recipient has everything, or is gone."""

    recovery_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed; sent at `SynchronizerCore.wake_at`."""


Event = (
    LearnerJoined
    | StreamOpened
    | StreamClosed
    | LearnerLeft
    | LearnerDrained
    | Heard
    | StepReported
    | DataRequested
    | PullDeclined
    | PushOpened
    | PushProgressed
    | PushStaged
    | PushFailed
    | SeedStaged
    | SeedPersisted
    | RoundMerged
    | RoundPersisted
    | PersistFailed
    | RoundHeld
    | QuorumSet
    | RollBack
    | SeedForbidden
    | DrainStarted
    | RecoveryAsked
    | DonationProgressed
    | DonationFailed
    | RecoveryEnded
    | SnapshotWanted
    | SnapshotRecorded
    | SnapshotKept
    | SnapshotFailed
    | Tick
)
