"""Everything that the core knows, in one place; its parts act on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core.data_records import DataRecord, LeaseRecord
from synchronizer_server.core.effects import Effect
from synchronizer_server.core.leases import DataLeases
from synchronizer_server.core.lineage import Lineage
from synchronizer_server.core.pacing import Pace
from synchronizer_server.core.quarantine import Quarantine
from synchronizer_server.core.records import DrainRecord
from synchronizer_server.core.roster import Roster
from synchronizer_server.core.rounds import Round
from synchronizer_server.core.scale import NormScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a store brings back at a restart.

    Attributes:
        global_step: last persisted t.
        versions: version of every fragment.
        incarnations: newest incarnation by learner id.
        shards: data shard by learner id.
        local_steps: highest local step known by learner id.
        tokens_merged: tokens of accepted contributions by learner id.
        tokens_processed: tokens reported by learner id.
        quorum: K in force.
        ages_s: seconds since the membership last heard each learner that it counts as a member;
            None where it did not answer.
        data: where the leased data stands.
        leases: the data on lease.
        has_just_gone_back: True where the record is the one with which the run went back to a
            snapshot: nothing was leased since.
        drains: who was asked to leave.
    """

    global_step: int
    versions: tuple[Version, ...]
    incarnations: Mapping[str, Incarnation]
    shards: Mapping[str, int]
    local_steps: Mapping[str, int]
    tokens_merged: Mapping[str, int]
    quorum: int
    ages_s: Mapping[str, float] | None = None
    tokens_processed: Mapping[str, int] = field(default_factory=dict)
    data: DataRecord = field(default_factory=DataRecord)
    leases: tuple[LeaseRecord, ...] = ()
    has_just_gone_back: bool = False
    drains: tuple[DrainRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBackOrder:
    """An operator's wish that waits for the next round of its fragment.

    Attributes:
        target: version whose content comes back.
        reason: why, in the operator's words.
    """

    target: Version
    reason: str


@dataclass(slots=True, kw_only=True)
class CoreState:
    """State of the synchronizer's core.

    Attributes:
        settings: settings of the run.
        term: term of leadership.
        num_fragments: fragments of the layout, P; 0 until the first learner brings it.
        quorum: K in force.
        roster: the learners.
        lineage: versions of the fragments.
        pace: moving averages.
        scale: usual norms of outer gradients.
        quarantine: who is left out for a while.
        now: time of the event under way, seconds.
        rounds: rounds in flight, oldest first.
        last_opened: t of the newest round.
        committed: t of the newest published round.
        opens_at: no round opens before, seconds.
        steps_at_merge: per fragment, (incarnation, local step) of each live learner at its merge.
        seeder: who is to push the seed.
        seeded_fragments: fragments of the seed that are staged.
        seed_persisting: True while the seed is being persisted.
        seed_progress_at: when the seeder was granted, or brought its last fragment, seconds.
        seed_retry_at: when to persist the seed again after a failure, seconds; None: no failure.
        held: why the round that is persisted is not published yet, as reason and detail.
        seed_forbidden: a learner that holds a merged version of this run; empty without one.
        roll_backs: fragments that an operator puts back, until the round that does it.
        draining: no round opens any more.
        complete: the last round is published, or the drain is done.
        first_step: t of the first round that this synchronizer opens.
        started: True once that round has opened.
        knows_members: True where the membership said who was alive before the first re-join.
        data: the book of data leases; None where shards are fixed.
        claims_until: until then leases of before the start are claimed, and none is handed out.
        claimants: who may have something to claim and is not back; None where that is not known.
        committed_term: highest term that had committed a round at the start.
        effects: what the event under way leads to, in order.
    """

    settings: RunSettings
    term: int
    num_fragments: int
    quorum: int
    roster: Roster
    lineage: Lineage
    pace: Pace
    scale: NormScale
    quarantine: Quarantine
    now: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    last_opened: int = 0
    committed: int = 0
    opens_at: float = 0.0
    steps_at_merge: dict[int, dict[str, tuple[Incarnation, int]]] = field(default_factory=dict)
    seeder: tuple[str, Incarnation] | None = None
    seeded_fragments: set[int] = field(default_factory=set)
    seed_persisting: bool = False
    seed_progress_at: float = 0.0
    seed_retry_at: float | None = None
    held: tuple[str, str] = ("", "")
    seed_forbidden: str = ""
    roll_backs: dict[int, RollBackOrder] = field(default_factory=dict)
    draining: bool = False
    complete: bool = False
    first_step: int = 1
    started: bool = False
    knows_members: bool = False
    data: DataLeases | None = None
    claims_until: float = 0.0
    claimants: set[str] | None = None
    committed_term: int = 0
    effects: list[Effect] = field(default_factory=list)

    @property
    def seeded(self) -> bool:
        """True once every fragment has a version."""
        return self.lineage.num_fragments > 0

    @property
    def finished(self) -> bool:
        """True once the last round of the run is published."""
        return self.seeded and self.last_step is not None and self.committed >= self.last_step

    @property
    def last_step(self) -> int | None:
        """T, or None where the run has no end."""
        return self.settings.total_global_steps or None

    def round(self, global_step: int) -> Round | None:
        """The round of ``global_step`` if it is in flight."""
        return next((r for r in self.rounds if r.global_step == global_step), None)

    def fragment_of(self, global_step: int) -> int:
        """The fragment of a global step: t mod P."""
        return global_step % self.num_fragments

    def due_fragments(self) -> tuple[int, ...]:
        """Fragments that learners are to copy at the next inner-step boundary, soonest first."""
        steps: Sequence[int] = [r.global_step for r in self.rounds if r.collecting]
        newest = max(self.last_opened, self.committed)
        steps = [*steps, *range(newest + 1, newest + 1 + self.settings.overlap)]
        last = self.last_step
        return tuple(dict.fromkeys(self.fragment_of(t) for t in steps if last is None or t <= last))


def new_state(
    settings: RunSettings, *, term: int, num_fragments: int, restored: Restored | None, now: float
) -> CoreState:
    """Returns the state of a synchronizer that begins, or goes on from a store."""
    state = CoreState(
        settings=settings,
        term=term,
        num_fragments=num_fragments,
        quorum=settings.quorum,
        roster=Roster(),
        lineage=Lineage((), settings.retained_updates),
        pace=Pace(settings, max(num_fragments, 1)),
        scale=NormScale(settings.norm_bound_factor),
        quarantine=Quarantine(settings),
        now=now,
    )
    if settings.data_mode == "leases":
        state.data = DataLeases(
            length=settings.data_length,
            lease_length=settings.data_lease_length,
            record=restored.data if restored is not None and restored.data.num_issued else None,
            leases=restored.leases if restored is not None else (),
        )
    if restored is not None:
        state.claimants = _claimants(restored, settings)
        state.committed_term = max((version.term for version in restored.versions), default=0)
        state.claims_until = now + _claims_s(restored, settings)
        state.quorum = restored.quorum
        state.last_opened = state.committed = restored.global_step
        state.first_step = restored.global_step + 1
        state.lineage.start(restored.versions)
        state.knows_members = restored.ages_s is not None
        ages_s = restored.ages_s or {}
        drains = {x.learner_id: x for x in restored.drains}
        for learner_id, incarnation in sorted(restored.incarnations.items()):
            state.roster.restore(
                learner_id,
                incarnation=incarnation,
                shard=restored.shards[learner_id],
                local_step=restored.local_steps.get(learner_id, 0),
                num_tokens=restored.tokens_processed.get(learner_id, 0),
                num_tokens_merged=restored.tokens_merged.get(learner_id, 0),
                heard_at=now - ages_s.get(learner_id, 0.0),
                expected=ages_s.get(learner_id, math.inf) < settings.heartbeat_timeout_s,
                drain=drains.get(learner_id),
            )
    return state


def _claims_s(restored: Restored, settings: RunSettings) -> float:
    """How long leases of before are claimed, at most; processes that start anew take longer."""
    went_back = restored.data.went_back
    is_resumed = went_back is not None and bool(went_back.awaited)
    return max(settings.heartbeat_timeout_s, settings.startup_wait_s if is_resumed else 0.0)


def _claimants(restored: Restored, settings: RunSettings) -> set[str] | None:
    """Who may hold data of before the start; None where that cannot be known.

    Whoever was granted anything is a member. The leader before heard nobody after its own end, so
    the age of the latest heartbeat is nobody's silence.
    """
    went_back = restored.data.went_back
    resumed = set(went_back.awaited) if went_back is not None else set()
    if restored.has_just_gone_back:
        return resumed
    ages_s = restored.ages_s
    if not ages_s:
        return None
    silent_s = min(ages_s.values()) + settings.heartbeat_timeout_s
    alive = {learner_id for learner_id, age_s in ages_s.items() if age_s < silent_s}
    return alive | resumed | {x.learner_id for x in restored.leases if x.learner_id not in ages_s}
