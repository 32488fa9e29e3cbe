"""The synchronizer's core: events in, effects out, time as an argument.

The same core runs in production, in tests and in simulation. It holds no tensors, no sockets, no
clock and no randomness: the same events at the same times give the same effects.
"""

from __future__ import annotations

from decoupled_diloco.errors import Reason
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import events as ev
from synchronizer_server.core.data_desk import DataDesk
from synchronizer_server.core.data_records import DataLease
from synchronizer_server.core.effects import (
    CloseStream,
    Effect,
    Fence,
    LearnerChanged,
    QuarantineChanged,
    SendDrain,
)
from synchronizer_server.core.pushes import PushDesk
from synchronizer_server.core.recovery import RecoveryDesk
from synchronizer_server.core.roster import Learner, LearnerState
from synchronizer_server.core.scheduler import Scheduler
from synchronizer_server.core.seeding import Seeding
from synchronizer_server.core.snapshots import Snapshots
from synchronizer_server.core.state import CoreState, Restored, RollBackOrder, new_state
from synchronizer_server.core.waits import Waiting, WaitLog, Waits

_SHORTEST_PATIENCE_S = 1.0


class SynchronizerCore:
    """Pure state machine of one synchronizer.

    Args:
        settings: settings of the run.
        term: term of leadership.
        num_fragments: P of the layout; 0 where no learner has brought a model yet.
        restored: what the store brought back; None for a new run.
        now: time, seconds of the shell's monotonic clock.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        term: int,
        num_fragments: int = 0,
        restored: Restored | None = None,
        now: float = 0.0,
    ) -> None:
        self.state: CoreState = new_state(
            settings, term=term, num_fragments=num_fragments, restored=restored, now=now
        )
        self._desk = PushDesk(self.state)
        self._scheduler = Scheduler(self.state, self._desk)
        self._seeding = Seeding(self.state)
        self.snapshots = Snapshots(self.state)
        self._data = DataDesk(self.state)
        self._recoveries = RecoveryDesk(self.state)
        self._wait_log = WaitLog(Waits(self.state, self._scheduler, self.snapshots))

    def fix_layout(self, num_fragments: int) -> None:
        """The first learner brought the model: the layout has P fragments from now on."""
        assert self.state.num_fragments in {0, num_fragments}, "the layout of a run is fixed once"
        self.state.num_fragments = num_fragments
        self.state.pace.num_fragments = num_fragments

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Takes an event at time ``now`` and returns what is to be done, in order."""
        assert not self.state.effects, "handle is not re-entrant"
        self.state.now = now
        self._take(event, now)
        self._expire(now)
        self._release(now)
        self._seeding.advance(now)
        self._scheduler.advance(now)
        self._recoveries.advance(now)
        self.snapshots.advance(now)
        self.state.effects.extend(self._wait_log.observe(now, self._patience_s()))
        effects, self.state.effects = self.state.effects, []
        return effects

    def wake_at(self, now: float) -> float | None:
        """When a `Tick` is due at the latest; None where only events can move anything."""
        state = self.state
        times: list[float | None] = [
            *self._scheduler.deadlines(now),
            *self.snapshots.deadlines(),
            self._seeding.deadline(),
            *self._recoveries.deadlines(),
            state.roster.silent_at(state.settings.heartbeat_timeout_s),
            self._data.expires_at(),
            self._data.claims_end(now),
            state.quarantine.next_at(),
            self._wait_log.next_at(now, self._patience_s()),
        ]
        return min((at for at in times if at is not None), default=None)

    def waits(self, now: float) -> list[tuple[Waiting, float]]:
        """Everything that waits, with for how long, seconds."""
        return self._wait_log.current(now) + self._recoveries.waits(now)

    def seed_refusal(
        self, learner_id: str, incarnation: Incarnation, fragment: int
    ) -> Reason | None:
        """Why this learner may not push the seed of this fragment; None where it may."""
        return self._seeding.refusal(learner_id, incarnation, fragment)

    def lease_refusal(
        self,
        learner_id: str,
        previous: Incarnation | None,
        claims: tuple[DataLease, ...],
        now: float,
        *,
        snapshot: str = "",
    ) -> str | None:
        """Why a process that joins again has lost the data leases it claims; None: it has not."""
        return self._data.why_lost(learner_id, previous, claims, snapshot, now)

    def roll_back_refusal(self, fragment: int) -> tuple[Reason, str] | None:
        """Why an operator may not put this fragment back now; None where it may be."""
        state = self.state
        if not state.seeded:
            return Reason.STARTING, "the run has no parameters yet; nothing can be put back"
        if not 0 <= fragment < state.num_fragments:
            last = state.num_fragments - 1
            return Reason.UNKNOWN_FRAGMENT, (
                f"there is no fragment {fragment}; fragments are 0 to {last}"
            )
        if state.draining or state.complete:
            return Reason.DRAINING, "no round opens any more, so no fragment can be put back"
        if state.lineage.before(fragment) is None:
            return Reason.STALE_BASE, (
                f"nothing older of fragment {fragment} is retained: it was not updated since this "
                "synchronizer started, or since it was put back"
            )
        return None

    def shard_for(self, learner_id: str, claimed: int | None = None) -> int | None:
        """Data shard of a learner id: the one it always had, or a free one; None where none is.

        With leased data it is a number of its own and nothing more: there is always one.

        Args:
            learner_id: the learner.
            claimed: the one on which its process trains already, as it says: it joined under a
                leader that died before its record could tell of it.
        """
        known = self.state.roster.find(learner_id)
        if known is not None:
            return known.shard
        taken = {x.shard for x in self.state.roster}
        most = self.state.settings.num_learners + (len(taken) if self.state.data else 0)
        free = [i for i in range(most) if i not in taken]
        return claimed if claimed in free else next(iter(free), None)

    def _patience_s(self) -> float:
        step_s = self.state.pace.step_s or 0.0
        return max(4 * self.state.settings.overlap * step_s, _SHORTEST_PATIENCE_S)

    def _take(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.StepReported():
                self._reported(event, now)
            case ev.DataRequested():
                self._data.requested(event, now)
            case ev.Heard():
                learner = self._current(event.learner_id, event.incarnation)
                if learner is not None:
                    learner.heard_at = now
            case ev.PushOpened() | ev.PushProgressed() | ev.PushStaged():
                self._push(event, now)
            case ev.PushFailed():
                self._desk.failed(event)
            case ev.PullDeclined():
                self._desk.declined(event)
            case ev.RoundMerged():
                self._scheduler.merged(event)
            case ev.RoundPersisted():
                self._scheduler.persisted(event, now)
                self.snapshots.published(now)
            case ev.PersistFailed():
                self._persist_failed(event, now)
            case ev.RoundHeld():
                self.state.held = (event.reason, event.detail)
            case ev.SeedStaged():
                self._seeding.staged(event, now)
            case ev.SeedPersisted():
                self._seeding.persisted(event)
            case ev.QuorumSet():
                assert event.quorum >= 1, "checked where it was set"
                self.state.quorum = event.quorum
            case ev.RollBack():
                self._roll_back(event)
            case ev.LearnerDrained():
                self._drained(event)
            case ev.SeedForbidden():
                self._seeding.forbidden(event)
            case ev.DrainStarted():
                self.state.draining = True
            case (
                ev.RecoveryAsked()
                | ev.DonationProgressed()
                | ev.DonationFailed()
                | ev.RecoveryEnded()
            ):
                self._recoveries.take(event, now)
            case (
                ev.SnapshotWanted()
                | ev.SnapshotRecorded()
                | ev.SnapshotKept()
                | ev.SnapshotFailed()
            ):
                self.snapshots.take(event, now)
            case ev.Tick():
                pass
            case _:
                self._membership(event, now)

    def _push(self, event: ev.PushOpened | ev.PushProgressed | ev.PushStaged, now: float) -> None:
        match event:
            case ev.PushOpened():
                self._desk.opened(event)
            case ev.PushProgressed():
                self._desk.progressed(event)
            case ev.PushStaged():
                self._desk.staged(event, now)
        self._heard(event.key, now)

    def _membership(
        self,
        event: ev.LearnerJoined | ev.StreamOpened | ev.StreamClosed | ev.LearnerLeft,
        now: float,
    ) -> None:
        match event:
            case ev.LearnerJoined():
                self._joined(event, now)
            case ev.StreamOpened():
                learner = self._current(event.learner_id, event.incarnation)
                may_open = learner is not None and not learner.lease_lost
                if learner is not None and may_open and not learner.state.has_left:
                    self.state.roster.opened(learner, now)
                    self._changed(learner, "report stream open")
                    self._send_drain(learner)
            case ev.StreamClosed():
                self._out(event, LearnerState.DISCONNECTED, "report stream closed")
            case _:
                self._out(event, LearnerState.LEFT, event.reason)

    def _joined(self, event: ev.LearnerJoined, now: float) -> None:
        before = self.state.roster.find(event.learner_id)
        if before is not None and before.incarnation >= event.incarnation:
            return
        learner = self.state.roster.join(event, now)
        if before is not None:
            self._desk.drop_learner(event.learner_id, Reason.FENCED, "a later incarnation joined")
            self._seeding.lost(event.learner_id, before.incarnation)
            self.state.effects.append(
                Fence(learner_id=event.learner_id, incarnation=before.incarnation)
            )
        self._data.joined(event, now)
        self._changed(learner, "joined")
        self._seeding.joined(event.learner_id, event.incarnation, now)

    def _reported(self, event: ev.StepReported, now: float) -> None:
        learner = self._current(event.learner_id, event.incarnation)
        if learner is None or not self.state.roster.reported(learner, event, now):
            return
        self._data.reported(event)
        median = self.state.roster.median_step_s()
        if median is not None:
            self.state.pace.observe_step(median)

    def _drained(self, event: ev.LearnerDrained) -> None:
        learner = self.state.roster.find(event.learner_id)
        assert learner is not None, "checked where it was asked for"
        learner.drain = event.reason
        self._send_drain(learner)

    def _send_drain(self, learner: Learner) -> None:
        if learner.drain:
            self.state.effects.append(
                SendDrain(
                    learner_id=learner.learner_id,
                    incarnation=learner.incarnation,
                    reason=learner.drain,
                )
            )

    def _heard(self, key: ev.PushKey, now: float) -> None:
        learner = self._current(key.learner_id, key.incarnation)
        if learner is not None:
            learner.heard_at = now

    def _out(
        self, event: ev.StreamClosed | ev.LearnerLeft, state: LearnerState, reason: str
    ) -> None:
        learner = self._current(event.learner_id, event.incarnation)
        if learner is None or learner.state is state or learner.state.has_left:
            return
        if state is LearnerState.LEFT and learner.drain:
            state = LearnerState.DRAINED
        if state is LearnerState.DISCONNECTED and learner.state is LearnerState.GONE:
            return
        self.state.roster.move(learner, state)
        if state.has_left:
            self._data.give_back(learner)
        self._drop_out(learner, reason)

    def _expire(self, now: float) -> None:
        for learner in self.state.roster.silent(now, self.state.settings.heartbeat_timeout_s):
            self.state.roster.move(learner, LearnerState.GONE)
            self._drop_out(learner, "silent")
            self.state.effects.append(
                CloseStream(
                    learner_id=learner.learner_id,
                    incarnation=learner.incarnation,
                    reason=Reason.LEARNER_GONE,
                )
            )
        for learner, why in self._data.expired(now):
            was_live = learner.live
            if not learner.state.has_left:  # by a record that still had leases of it
                self.state.roster.move(learner, LearnerState.GONE)
            self._data.give_back(learner)
            reason = f"{why}; its data is handed out again"
            if was_live:
                self._drop_out(learner, reason)
            else:
                self._changed(learner, reason)

    def _release(self, now: float) -> None:
        for learner_id in self.state.quarantine.release(now):
            learner = self.state.roster.find(learner_id)
            assert learner is not None, "only learners are left out"
            self.state.roster.leave_out(learner, "")
            self.state.effects.append(
                QuarantineChanged(
                    learner_id=learner_id,
                    incarnation=learner.incarnation,
                    reason="",
                    seconds=0.0,
                )
            )

    def _roll_back(self, event: ev.RollBack) -> None:
        target = self.state.lineage.before(event.fragment)
        assert target is not None, "checked where it was ordered"
        order = RollBackOrder(target=target, reason=event.reason)
        self.state.roll_backs.setdefault(event.fragment, order)

    def _drop_out(self, learner: Learner, reason: str) -> None:
        message = f"{learner.learner_id} is out: {reason}"
        self._desk.drop_learner(learner.learner_id, Reason.LEARNER_GONE, message)
        self._changed(learner, reason)
        self._seeding.lost(learner.learner_id, learner.incarnation)

    def _changed(self, learner: Learner, reason: str) -> None:
        self.state.effects.append(
            LearnerChanged(
                learner_id=learner.learner_id,
                incarnation=learner.incarnation,
                state=str(learner.state),
                reason=reason,
            )
        )

    def _persist_failed(self, event: ev.PersistFailed, now: float) -> None:
        if event.global_step == 0:
            self.state.seed_retry_at = now + event.retry_after_s
        else:
            self._scheduler.persist_failed(event, now)

    def _current(self, learner_id: str, incarnation: Incarnation) -> Learner | None:
        return self.state.roster.current(learner_id, incarnation)
