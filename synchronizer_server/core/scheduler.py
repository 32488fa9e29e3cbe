"""Moves rounds on: opening, quorum, grace window, pulling, commit order (design section 4)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from decoupled_diloco.errors import Reason
from synchronizer_server.core.effects import (
    Completed,
    MergeRound,
    PersistRound,
    PublishRound,
    RollBackFailed,
    RoundSummary,
    SendPull,
    SendSchedule,
    SendStop,
)
from synchronizer_server.core.events import PersistFailed, PushKey, RoundMerged, RoundPersisted
from synchronizer_server.core.pushes import PushDesk, dropped
from synchronizer_server.core.roster import Learner
from synchronizer_server.core.rounds import Pending, Round, RoundInput, RoundState
from synchronizer_server.core.state import CoreState


@dataclass(slots=True)
class Scheduler:
    """Decides what every round does next."""

    state: CoreState
    desk: PushDesk

    def advance(self, now: float) -> None:
        """Moves everything on as far as it goes at ``now``."""
        self.desk.drop_late(now)
        while self._advance_one(now):
            pass
        self._complete()

    def _advance_one(self, now: float) -> bool:
        """Takes one transition, oldest round first; False where nothing can move."""
        state = self.state
        for round_ in state.rounds:
            if self._roll_back(round_, now):
                return True
            if round_.state is RoundState.PULLING and not round_.pending:
                self._settle_pulling(round_)
                return True
            if self._in_turn(round_, now):
                round_.move(RoundInput.IN_TURN)
                round_.persisted_as = self._summary(round_)
                state.effects.append(PersistRound(summary=round_.persisted_as))
                return True
        if state.draining:
            self._abandon_collecting()
        active = self._collecting_round()
        if active is None:
            return self._try_open(now)
        if active.state is RoundState.COLLECTING:
            return self._try_quorum(active, now)
        return self._try_end_grace(active, now)

    def _summary(self, round_: Round) -> RoundSummary:
        """What is persisted; from here on its contributions count for the data that they hold."""
        state = self.state
        if state.data is not None:
            round_.merged_data += state.data.committed(
                round_.accepted.values(), round_.fragment, state.num_fragments
            )
            round_.data_totals = state.data.totals
        return round_.summary(state.pace.step_s or 0.0)

    def _collecting_round(self) -> Round | None:
        """The one round that collects: the oldest; later ones are suspended meanwhile."""
        open_rounds = [r for r in self.state.rounds if r.collecting]
        for round_ in open_rounds[1:]:
            if round_.state is not RoundState.SUSPENDED:
                round_.move(RoundInput.EARLIER_COLLECTS)
        if not open_rounds:
            return None
        if open_rounds[0].state is RoundState.SUSPENDED:
            open_rounds[0].move(RoundInput.RESUMED)
        return open_rounds[0]

    # -- opening ---------------------------------------------------------------------------------

    def why_not_open(self, now: float) -> str | None:
        """Why the next round does not open, as a stable word; None where it may."""
        state = self.state
        if not state.seeded:
            return "seed"
        if state.draining:
            return "draining"
        if state.last_step is not None and state.last_opened >= state.last_step:
            return "complete"
        if len(state.rounds) >= state.settings.overlap:
            return "in_flight"
        if any(r.collecting for r in state.rounds):
            return "collecting"
        if now < state.opens_at:
            return "pace"
        return None

    def _try_open(self, now: float) -> bool:
        state = self.state
        if self.why_not_open(now) is not None:
            return False
        state.last_opened += 1
        round_ = Round(
            global_step=state.last_opened,
            fragment=state.fragment_of(state.last_opened),
            opened_at=now,
            startup=not state.started,
        )
        state.started = state.started or round_.fragment not in state.roll_backs
        state.rounds.append(round_)
        # Against a plan rather than against the opening before: a round that opened late because
        # it waited for a learner must not put off all later ones, or H would drift upwards.
        interval = state.pace.opening_interval_s()
        state.opens_at = max(state.opens_at, now - 0.5 * interval) + interval
        self._send_schedule()
        return True

    def _send_schedule(self) -> None:
        state = self.state
        state.effects.append(
            SendSchedule(global_step=state.committed, due_fragments=state.due_fragments())
        )

    # -- quorum and grace ------------------------------------------------------------------------

    def candidates(self, round_: Round) -> list[Learner]:
        """Fresh learners that this round has not accepted yet.

        One that is tried again after a quarantine is asked for one push at a time.
        """
        return [
            x
            for x in self.state.roster.taking_part()
            if x.fresh and x.learner_id not in round_.accepted and not self._on_trial(x)
        ]

    def _on_trial(self, learner: Learner) -> bool:
        return self.state.quarantine.probing(learner.learner_id) and any(
            learner.learner_id in r.pending for r in self.state.rounds
        )

    def absent(self, round_: Round) -> list[Learner]:
        """Learners that take part, are not fresh, and that this round has not accepted."""
        return [
            x
            for x in self.state.roster.taking_part()
            if not x.fresh and x.learner_id not in round_.accepted
        ]

    def _try_quorum(self, round_: Round, now: float) -> bool:
        if not self._quorum_is_there(round_):
            return False
        first = round_.quorum_at is None
        round_.startup = (round_.startup and first) or self.state.pace.step_s is None
        if first:
            round_.quorum_s = now - round_.opened_at
            if not round_.startup:
                self.state.pace.observe_quorum(round_.quorum_s)
        round_.quorum_at = now
        round_.grace_s = self._grace_s(round_)
        round_.move(RoundInput.QUORUM_REACHED)
        return True

    def _quorum_is_there(self, round_: Round) -> bool:
        return len(round_.accepted) + len(self.candidates(round_)) >= self.state.quorum

    def _grace_s(self, round_: Round) -> float:
        settings = self.state.settings
        if not settings.grace:
            return 0.0
        if not round_.startup:
            return self.state.pace.grace_s()
        # After a restart the learners are at work already: they are back soon, or not at all.
        return (
            settings.startup_wait_s if self.state.committed == 0 else settings.heartbeat_timeout_s
        )

    def _try_end_grace(self, round_: Round, now: float) -> bool:
        everybody = not self.absent(round_) and not self.missing_at_start(round_)
        if not everybody and now < round_.grace_until:
            return False
        if not self._quorum_is_there(round_):
            # Somebody died in the grace window; nobody is asked before there is a quorum again.
            round_.move(RoundInput.QUORUM_LOST)
            return True
        self._ask(round_, self.candidates(round_), now)
        return True

    def missing_at_start(self, round_: Round) -> int:
        """How many learners the very first round still waits for; 0 in all others.

        Those that were alive under the leader before, where that is known, else the planned ones.
        """
        state = self.state
        if not round_.startup or round_.global_step != state.first_step:
            return 0
        if state.knows_members:
            return len(state.roster.expected())
        here = sum(x.live or x.state.has_left for x in state.roster)
        return max(state.settings.num_learners - here, 0)

    def _ask(self, round_: Round, candidates: list[Learner], now: float) -> None:
        state = self.state
        round_.move(RoundInput.GRACE_OVER)
        round_.grace_ended_at = now
        if not round_.live:  # not when asking again after falling back
            round_.measured_h = self._measure_h(round_)
        round_.live = tuple(x.learner_id for x in state.roster.taking_part())
        for learner in candidates:
            learner.asked_step = learner.local_step
            round_.dropped.pop(learner.learner_id, None)
            round_.pending[learner.learner_id] = Pending(
                incarnation=learner.incarnation,
                asked_at=now,
                limit_s=state.pace.push_limit_s(learner.transfer_s),
            )
            self.desk.forget(
                PushKey(
                    learner.learner_id, learner.incarnation, round_.global_step, round_.fragment
                )
            )
            state.effects.append(
                SendPull(
                    learner_id=learner.learner_id,
                    incarnation=learner.incarnation,
                    global_step=round_.global_step,
                    fragment=round_.fragment,
                )
            )

    def _measure_h(self, round_: Round) -> float | None:
        """Inner steps of the median live learner since this fragment was merged before.

        Of an even number the faster one, as for the pace.
        """
        state = self.state
        before = state.steps_at_merge.get(round_.fragment, {})
        now = {x.learner_id: (x.incarnation, x.local_step) for x in state.roster.taking_part()}
        steps = [
            step - before[learner_id][1]
            for learner_id, (incarnation, step) in now.items()
            if learner_id in before and before[learner_id][0] == incarnation
        ]
        state.steps_at_merge[round_.fragment] = now
        return float(statistics.median_high(steps)) if steps else None

    # -- an operator's round -----------------------------------------------------------------------

    def _roll_back(self, round_: Round, now: float) -> bool:
        """Turns a round into one that puts its fragment back; False where nobody wants that.

        One that has accepted somebody stays what it is: acceptance is never undone. The next round
        of its fragment puts it back then, further behind.
        """
        state = self.state
        order = state.roll_backs.get(round_.fragment)
        free = round_.collecting or round_.state is RoundState.PULLING
        if order is None or round_.accepted or not free:
            return False
        del state.roll_backs[round_.fragment]
        if not state.lineage.retains(round_.fragment, order.target):
            message = f"version {order.target} of fragment {round_.fragment} is no longer retained"
            state.effects.append(RollBackFailed(fragment=round_.fragment, message=message))
            return True
        for learner_id in list(round_.pending):
            why = f"an operator puts fragment {round_.fragment} back: {order.reason}"
            self.desk.drop(round_, learner_id, dropped(Reason.ROLLED_BACK, why))
        self._measure_h(round_)
        round_.move(RoundInput.ROLL_BACK)
        round_.rolled_back = order.reason
        round_.grace_ended_at = now
        state.effects.append(
            MergeRound(
                global_step=round_.global_step,
                fragment=round_.fragment,
                roll_back_to=order.target,
            )
        )
        return True

    # -- pulling, merging, committing ------------------------------------------------------------

    def _settle_pulling(self, round_: Round) -> None:
        if len(round_.accepted) >= self.state.quorum:
            round_.move(RoundInput.FULL)
            self.state.effects.append(
                MergeRound(global_step=round_.global_step, fragment=round_.fragment)
            )
        else:
            round_.move(RoundInput.TOO_FEW_ACCEPTED)
            self._send_schedule()

    def merged(self, event: RoundMerged) -> None:
        """The outer step of a round is computed."""
        round_ = self._in_flight(event.global_step)
        round_.version = event.version
        round_.move(RoundInput.MERGED)

    def persisted(self, event: RoundPersisted, now: float) -> None:
        """A round is persisted: publish it."""
        state = self.state
        state.held = ("", "")
        round_ = self._in_flight(event.global_step)
        round_.move(RoundInput.PERSISTED)
        assert round_.version is not None, "merged before persisted"
        assert round_.persisted_as is not None, "persisting when persisted"
        state.rounds.remove(round_)
        state.committed = round_.global_step
        sync_s = now - round_.grace_ended_at
        if round_.rolled_back:
            state.lineage.restart(round_.fragment, round_.version)
        else:
            state.lineage.advance(round_.fragment, round_.version)
            state.pace.observe_sync(sync_s)
        state.effects.append(PublishRound(summary=round_.persisted_as, sync_s=sync_s))
        self._send_schedule()

    def persist_failed(self, event: PersistFailed, now: float) -> None:
        """A round could not be persisted: it is tried again, and nothing is published."""
        round_ = self._in_flight(event.global_step)
        round_.retry_at = now + event.retry_after_s
        round_.move(RoundInput.PERSIST_FAILED)

    def _in_flight(self, global_step: int) -> Round:
        round_ = self.state.round(global_step)
        assert round_ is not None, f"round {global_step} is not in flight"
        return round_

    def _in_turn(self, round_: Round, now: float) -> bool:
        """Rounds commit in order of t: only the oldest in flight is persisted."""
        return (
            round_.state is RoundState.MERGED
            and round_ is self.state.rounds[0]
            and now >= round_.retry_at
        )

    # -- the end ---------------------------------------------------------------------------------

    def _abandon_collecting(self) -> None:
        # Only the newest: abandoning an older one would leave a gap below what is committed.
        while self.state.rounds and self.state.rounds[-1].collecting:
            self.state.rounds.pop().move(RoundInput.ABANDON)

    def _complete(self) -> None:
        state = self.state
        if state.complete or state.rounds or state.seed_persisting:
            return
        if not state.finished and not state.draining:
            return
        state.complete = True
        if state.finished:
            state.effects.append(SendStop(global_step=state.committed))
        state.effects.append(Completed(global_step=state.committed))

    def deadlines(self, now: float) -> Iterator[float]:
        """Times at which something may move without an event, seconds."""
        state = self.state
        if self.why_not_open(now) == "pace":
            yield state.opens_at
        for round_ in state.rounds:
            if round_.state is RoundState.GRACE:
                yield round_.grace_until
            elif round_.state is RoundState.MERGED and round_ is state.rounds[0]:
                yield round_.retry_at
            for pending in round_.pending.values():
                yield pending.late_at()
