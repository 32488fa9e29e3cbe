"""Snapshots of the whole fleet: when one begins, who is awaited, when it is complete (paper 7.3).

A snapshot is named by its cut S, a committed global step. What belongs to it is decided by clocks:
the round record S with the fragments that it names is the synchronizer's part, and a learner's is
its state before any update above S. Contributions to rounds above S are not part of it, so nothing
is in flight across the cut that would have to be stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import events as ev
from synchronizer_server.core.effects import BeginSnapshot, EndSnapshot, KeepSnapshot
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.core.state import CoreState

_LONGEST_FACTOR = 4.0

NO_DIRECTORY = "it has no directory for its part"
"""Why a learner is left out that said so at Join."""


@dataclass(slots=True, kw_only=True)
class PendingSnapshot:
    """The snapshot under way.

    Attributes:
        global_step: its cut, S.
        begun_at: when record S was published, seconds.
        deadline: who has not returned the marker by then is left out, seconds.
        awaited: incarnation of every learner whose part is still to come.
        recorded: incarnation of every learner that has recorded its part.
        left_out: why the others are not in it.
        keeping: True once its manifest is being written.
    """

    global_step: int
    begun_at: float
    deadline: float
    awaited: dict[str, Incarnation]
    recorded: dict[str, Incarnation] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    keeping: bool = False


class Snapshots:
    """Decides about snapshots; one at a time.

    Args:
        state: the core's state.

    Attributes:
        pending: the snapshot under way.
        cut: S of the newest snapshot that was begun in this term; 0 before the first.
        wanted: True where one was asked for and has not begun yet.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self.pending: PendingSnapshot | None = None
        self.cut = 0
        self.wanted = False
        self._longest_s: float | None = None
        self._next_due = self._due_after(state.committed)

    # -- events ------------------------------------------------------------------------------------

    def published(self, now: float) -> None:
        """A round was published: its record may be the cut of a snapshot."""
        state, step = self._state, self._state.committed
        due = self._next_due is not None and step >= self._next_due
        # A run that is complete needs no snapshot: its learners leave, and its store is durable.
        if self.pending is not None or state.finished or not (due or self.wanted):
            return
        self._next_due = self._due_after(step)
        self.wanted = False
        self.cut = step
        live = state.roster.live()
        awaited = {x.learner_id: x.incarnation for x in live if x.records_parts}
        self.pending = PendingSnapshot(
            global_step=step,
            begun_at=now,
            deadline=now + self._bound_s(),
            awaited=awaited,
            left_out={x.learner_id: NO_DIRECTORY for x in live if not x.records_parts},
        )
        state.effects.append(BeginSnapshot(global_step=step, awaited=tuple(awaited)))

    def take(
        self,
        event: ev.SnapshotWanted | ev.SnapshotRecorded | ev.SnapshotKept | ev.SnapshotFailed,
        now: float,
    ) -> None:
        """Takes an event of its own."""
        match event:
            case ev.SnapshotWanted():
                self.wanted = True
            case ev.SnapshotRecorded():
                self._recorded(event, now)
            case ev.SnapshotKept():
                self._end(event.global_step, "")
            case ev.SnapshotFailed():
                self._end(event.global_step, event.message)

    def advance(self, now: float) -> None:
        """Leaves out who does not come any more; keeps the snapshot once all others are in."""
        pending = self.pending
        if pending is None or pending.keeping:
            return
        for learner_id, incarnation in list(pending.awaited.items()):
            reason = self._why_out(learner_id, incarnation, now)
            if reason is not None:
                del pending.awaited[learner_id]
                pending.left_out[learner_id] = reason
        for learner_id, incarnation in list(pending.recorded.items()):
            if self._has_given_back(learner_id, incarnation):
                del pending.recorded[learner_id]
                pending.left_out[learner_id] = "its data was given back before all were in"
        if pending.awaited:
            return
        if not pending.recorded:
            reasons = "; ".join(f"{k}: {v}" for k, v in sorted(pending.left_out.items()))
            self._end(pending.global_step, f"no learner is in it ({reasons or 'none was live'})")
            return
        pending.keeping = True
        self._state.effects.append(
            KeepSnapshot(
                global_step=pending.global_step,
                recorded=dict(sorted(pending.recorded.items())),
                left_out=dict(sorted(pending.left_out.items())),
            )
        )

    def deadlines(self) -> list[float]:
        """When somebody may have to be left out, seconds."""
        pending = self.pending
        if pending is None or pending.keeping:
            return []
        learners = (self._state.roster.current(k, v) for k, v in pending.awaited.items())
        silent = [x.heard_at + self._silence_s for x in learners if x is not None and not x.live]
        return [pending.deadline, *silent]

    # -- what follows ------------------------------------------------------------------------------

    @property
    def _silence_s(self) -> float:
        return self._state.settings.heartbeat_timeout_s

    def _due_after(self, global_step: int) -> int | None:
        every = self._state.settings.snapshot_every
        return (global_step // every + 1) * every if every else None

    def _bound_s(self) -> float:
        """How long parts are awaited: as measured, from the second snapshot on."""
        settings = self._state.settings
        if self._longest_s is None:
            return settings.snapshot_timeout_s
        steps = [x.step_s for x in self._state.roster.live() if x.step_s is not None]
        measured = max(
            settings.sync_interval * (self._state.pace.step_s or 0.0),
            2.0 * max(steps, default=0.0),
            _LONGEST_FACTOR * self._longest_s,
            self._silence_s,
        )
        return min(measured, settings.snapshot_timeout_s)

    def _recorded(self, event: ev.SnapshotRecorded, now: float) -> None:
        pending = self.pending
        if pending is None or pending.global_step != event.global_step or pending.keeping:
            return
        if pending.awaited.get(event.learner_id) != event.incarnation:
            return
        if event.missing:
            del pending.awaited[event.learner_id]
            pending.left_out[event.learner_id] = event.missing
            return
        pending.recorded[event.learner_id] = pending.awaited.pop(event.learner_id)
        self._longest_s = max(self._longest_s or 0.0, now - pending.begun_at)

    def _why_out(self, learner_id: str, incarnation: Incarnation, now: float) -> str | None:
        learner = self._state.roster.current(learner_id, incarnation)
        if learner is None:
            return "a later incarnation joined"
        if learner.state.has_left or learner.state is LearnerState.GONE:
            return str(learner.state)
        if not learner.live and now >= learner.heard_at + self._silence_s:
            return str(learner.state)
        assert self.pending is not None, "asked while one is pending"
        if now >= self.pending.deadline:
            return f"no part within {self.pending.deadline - self.pending.begun_at:.1f} s"
        return None

    def _has_given_back(self, learner_id: str, incarnation: Incarnation) -> bool:
        """Whether data in a learner's part may be in the part of another one, too, by now."""
        if self._state.data is None:
            return False
        learner = self._state.roster.current(learner_id, incarnation)
        return learner is None or learner.lease_lost or learner.state is LearnerState.LEFT

    def _end(self, global_step: int, failure: str) -> None:
        pending = self.pending
        if pending is None or pending.global_step != global_step:
            return
        self.pending = None
        self._state.effects.append(
            EndSnapshot(
                global_step=global_step,
                participants=tuple(sorted(pending.recorded)),
                left_out=dict(sorted(pending.left_out.items())),
                failure=failure,
            )
        )
