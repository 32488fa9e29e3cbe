"""Pushes: which are staged, accepted, dropped or refused, and why (design section 4, steps 4-5).

A refused push leaves no trace in any sum: nothing is accumulated before it is staged, validated
whole and accepted here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.counters import credible
from synchronizer_server.core.effects import (
    AcceptPush,
    AnswerPush,
    CountersCut,
    Outcome,
    QuarantineChanged,
    StagePush,
)
from synchronizer_server.core.events import (
    PullDeclined,
    PushFailed,
    PushKey,
    PushOpened,
    PushProgressed,
    PushStaged,
)
from synchronizer_server.core.lineage import Place
from synchronizer_server.core.records import ContributionRecord
from synchronizer_server.core.roster import MOST_TOKENS, Learner
from synchronizer_server.core.rounds import Pending, Round, RoundState
from synchronizer_server.core.state import CoreState
from synchronizer_server.core.weights import contribution_weight

_MAX_ANSWERS: Final = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a push is not accepted."""

    outcome: Outcome
    reason: Reason
    message: str


def dropped(reason: Reason, message: str) -> Verdict:
    """The verdict on a push that is left out, nothing being wrong with it."""
    return Verdict(Outcome.DROPPED, reason, message)


def _refused(reason: Reason, message: str) -> Verdict:
    return Verdict(Outcome.REFUSED, reason, message)


@dataclass(slots=True)
class PushDesk:
    """Handles every event about a push; remembers the first answer of each key."""

    state: CoreState
    _answers: OrderedDict[PushKey, Verdict] = field(default_factory=OrderedDict)

    def opened(self, event: PushOpened) -> None:
        """A header came: stage it, or answer at once."""
        key = event.key
        if (first := self._answers.get(key)) is not None:
            self.settle(key, first)
            return
        round_, pending = self._asked(key)
        verdict = self._check(event)
        if round_ is None or pending is None:
            self.settle(key, verdict or self._not_wanted(key))
            return
        if verdict is not None:
            self.drop(round_, key.learner_id, verdict)
            return
        if pending.header not in {None, event}:
            # Which of the two were staged could not be told: neither is merged.
            message = "another push of the same round is open; send one and wait for its answer"
            self.drop(round_, key.learner_id, _refused(Reason.MALFORMED, message))
            return
        pending.header = event
        pending.staged_bytes = 0
        self.state.effects.append(StagePush(key=key))

    def progressed(self, event: PushProgressed) -> None:
        """More bytes are staged."""
        _, pending = self._asked(event.key)
        if pending is not None and pending.header is not None:
            pending.staged_bytes = max(pending.staged_bytes, event.staged_bytes)

    def staged(self, event: PushStaged, now: float) -> None:
        """A push is whole and valid: this is the instant that decides."""
        key = event.key
        if key in self._answers:
            return
        round_, pending = self._asked(key)
        if round_ is None or pending is None:
            self.settle(key, self._not_wanted(key))
            return
        if pending.header is None:
            return  # an earlier push of this round, answered before the learner was asked again
        bound = self.state.scale.bound(key.fragment, pending.header.num_steps)
        if bound is not None and event.norm > bound:
            message = (
                f"norm {event.norm:.6g} of the outer gradient is above {bound:.6g}, "
                f"{self.state.settings.norm_bound_factor:g} times what is usual for fragment "
                f"{key.fragment}; look at the learner's loss and inner learning rate, or raise "
                "norm_bound_factor"
            )
            self.drop(round_, key.learner_id, _refused(Reason.NORM_BOUND, message))
            return
        # Checked with its header; a fragment changes by its own round alone, so it still holds.
        self._accept(round_, pending.header, event.norm, now)

    def failed(self, event: PushFailed) -> None:
        """A push was found wrong, or did not come."""
        if event.key in self._answers:
            return
        make = _refused if event.refused else dropped
        verdict = make(event.reason, event.message)
        round_, pending = self._asked(event.key)
        if round_ is None or pending is None:
            self.settle(event.key, verdict)
        else:
            self.drop(round_, event.key.learner_id, verdict)

    def declined(self, event: PullDeclined) -> None:
        """The learner has nothing to push in this round."""
        round_ = self.state.round(event.global_step)
        pending = round_.pending.get(event.learner_id) if round_ else None
        if round_ is not None and pending is not None and pending.incarnation == event.incarnation:
            self.drop(round_, event.learner_id, dropped(event.reason, "the learner declined"))

    def drop_late(self, now: float) -> None:
        """Drops every contributor that is too late."""
        for round_ in self.state.rounds:
            for learner_id, pending in list(round_.pending.items()):
                if now < pending.late_at():
                    continue
                reason = Reason.TOO_LATE if pending.staged_bytes else Reason.NO_PROGRESS
                learner = self.state.roster.current(learner_id, pending.incarnation)
                if learner is not None and pending.staged_bytes:
                    # It does progress: the transfer takes at least that long, so next time it
                    # gets more. Without this a slow link could never show its usual time.
                    learner.transfer_s = max(learner.transfer_s or 0.0, pending.limit_s)
                message = f"not complete within {pending.limit_s:.2f} s of being asked"
                self.drop(round_, learner_id, dropped(reason, message))

    def drop_learner(self, learner_id: str, reason: Reason, message: str) -> None:
        """A learner is gone or fenced: drops it from every round at once."""
        for round_ in self.state.rounds:
            if learner_id in round_.pending:
                self.drop(round_, learner_id, dropped(reason, message))

    def drop(self, round_: Round, learner_id: str, verdict: Verdict) -> None:
        """Takes a learner out of a round and answers its push, if it has one or sends one yet."""
        pending = round_.drop(learner_id, verdict.reason)
        key = PushKey(learner_id, pending.incarnation, round_.global_step, round_.fragment)
        self.settle(key, verdict)
        quarantine = self.state.quarantine
        learner = self.state.roster.current(learner_id, pending.incarnation)
        if learner is not None and quarantine.counts(verdict.reason, pending.limit_s):
            seconds = quarantine.failed(learner_id, self.state.now)
            if seconds is not None:
                self._leave_out(learner, verdict.reason, seconds)

    def _leave_out(self, learner: Learner, reason: Reason, seconds: float) -> None:
        """It failed to deliver too often in a row: nobody asks it, or waits for it, for a while."""
        num_failures = self.state.quarantine.num_failures(learner.learner_id)
        detail = f"{reason} was the last of {num_failures} pushes in a row that did not come right"
        self.state.roster.leave_out(learner, detail)
        self.state.effects.append(
            QuarantineChanged(
                learner_id=learner.learner_id,
                incarnation=learner.incarnation,
                reason=detail,
                seconds=seconds,
            )
        )
        self.drop_learner(learner.learner_id, Reason.QUARANTINED, detail)

    def settle(self, key: PushKey, verdict: Verdict) -> None:
        """Answers a push that is not accepted, counts it, remembers the answer."""
        first = key not in self._answers
        learner = self.state.roster.current(key.learner_id, key.incarnation)
        if first and learner is not None:
            learner.last_reason = str(verdict.reason)
            if verdict.outcome is Outcome.REFUSED:
                learner.num_refused += 1
            else:
                learner.num_dropped += 1
        known = self.state.roster.find(key.learner_id) is not None
        if first and known and verdict.reason is not Reason.STALE_TERM:
            # Of learners only: what strangers send must not fill the memory.
            self._remember(key, verdict)
        self.state.effects.append(
            AnswerPush(
                key=key, outcome=verdict.outcome, reason=verdict.reason, message=verdict.message
            )
        )

    def _asked(self, key: PushKey) -> tuple[Round | None, Pending | None]:
        """The round of this push and what is known of it there, if it still waits for it."""
        round_ = self.state.round(key.global_step)
        pending = round_.pending.get(key.learner_id) if round_ else None
        if round_ is None or pending is None:
            return round_, None
        wanted = pending.incarnation == key.incarnation and round_.fragment == key.fragment
        return round_, pending if wanted else None

    def forget(self, key: PushKey) -> None:
        """The learner is asked again in the same round: its next push is a new one."""
        self._answers.pop(key, None)

    def _remember(self, key: PushKey, verdict: Verdict) -> None:
        self._answers[key] = verdict
        while len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _accept(self, round_: Round, claimed: PushOpened, norm: float, now: float) -> None:
        key = claimed.key
        pending = round_.pending.pop(key.learner_id)
        learner = self.state.roster.current(key.learner_id, key.incarnation)
        assert learner is not None, "checked"
        header = self._bounded(claimed, learner, now)
        weight = contribution_weight(header.num_tokens, header.num_steps)
        round_.dropped.pop(key.learner_id, None)
        round_.accepted[key.learner_id] = ContributionRecord(
            learner_id=key.learner_id,
            incarnation=key.incarnation,
            base=header.base,
            local_step=header.local_step,
            num_tokens=header.num_tokens,
            num_steps=header.num_steps,
            weight=weight,
        )
        learner.observe_transfer(now - pending.asked_at)
        learner.num_accepted += 1
        learner.num_tokens_merged = min(learner.num_tokens_merged + header.num_tokens, MOST_TOKENS)
        learner.merged_steps[key.fragment] = header.local_step
        self.state.scale.observe(key.fragment, key.learner_id, norm, header.num_steps)
        self.state.quarantine.accepted(key.learner_id)
        self.state.lineage.contribute(key.fragment, key.learner_id, key.global_step)
        rebase = self.state.lineage.place(key.fragment, header.base) is Place.RETAINED
        again = Verdict(Outcome.ACCEPTED, Reason.DUPLICATE, "this push was accepted before")
        self._remember(key, again)
        self.state.effects.append(AcceptPush(key=key, weight=weight, rebase=rebase))

    def _bounded(self, claimed: PushOpened, learner: Learner, now: float) -> PushOpened:
        """The header with counters that can be; tells once where its learner claims others."""
        state = self.state
        header = credible(
            claimed, learner, state.roster.taking_part(), step_s=state.pace.step_s, now=now
        )
        cut = header != claimed
        if cut and not learner.counters_cut:
            learner.last_reason = str(Reason.BAD_COUNTERS)
            detail = (
                f"{Reason.BAD_COUNTERS}: claims {claimed.num_tokens} tokens in "
                f"{claimed.num_steps} steps at local step {claimed.local_step}; by its reports "
                f"{header.num_tokens} in {header.num_steps} at {header.local_step} count"
            )
            state.effects.append(
                CountersCut(
                    learner_id=learner.learner_id, incarnation=learner.incarnation, detail=detail
                )
            )
        learner.counters_cut = cut
        return header

    def _check(self, event: PushOpened) -> Verdict | None:
        """Returns why this push cannot be accepted, or None."""
        key, state = event.key, self.state
        stranger = state.roster.why_not_current(key.learner_id, key.incarnation, state.term)
        if stranger is not None:
            return _refused(*stranger)
        if event.term != state.term:
            return _refused(
                Reason.STALE_TERM, f"term {event.term} is over, {state.term} leads; join again"
            )
        if not 0 <= key.fragment < state.lineage.num_fragments:
            return _refused(
                Reason.UNKNOWN_FRAGMENT,
                f"fragment {key.fragment} of {state.lineage.num_fragments}",
            )
        round_ = state.round(key.global_step)
        pending = round_.pending.get(key.learner_id) if round_ else None
        if round_ is None or pending is None or round_.state is not RoundState.PULLING:
            return self._not_wanted(key)
        if round_.fragment != key.fragment:
            return _refused(
                Reason.UNKNOWN_FRAGMENT,
                f"round {key.global_step} is of fragment {round_.fragment}, not {key.fragment}",
            )
        return _check_counters(event) or self._check_base(event)

    def _check_base(self, event: PushOpened) -> Verdict | None:
        lineage, key = self.state.lineage, event.key
        place = lineage.place(key.fragment, event.base)
        ours = lineage.current(key.fragment)
        if place is Place.FOREIGN:
            return dropped(
                Reason.BASE_MISMATCH, f"base {event.base} is not on our lineage ({ours}); watch"
            )
        if place is Place.STALE:
            return dropped(
                Reason.STALE_BASE, f"base {event.base} is no longer retained, now {ours}; watch"
            )
        if lineage.contributed_since(key.fragment, key.learner_id, event.base):
            return _refused(
                Reason.ALREADY_MERGED,
                f"local work since base {event.base} is already merged, wholly or in part",
            )
        return None

    def _not_wanted(self, key: PushKey) -> Verdict:
        round_ = self.state.round(key.global_step)
        asked = round_ is None or not round_.collecting
        if asked and 0 < key.global_step <= self.state.last_opened:
            return dropped(Reason.TOO_LATE, f"round {key.global_step} no longer waits for it")
        return _refused(Reason.NOT_ASKED, f"nobody asked for round {key.global_step}")


def _check_counters(event: PushOpened) -> Verdict | None:
    tokens, steps = event.num_tokens, event.num_steps
    if steps == 0 or tokens == 0:
        return dropped(Reason.NOT_READY, "no tokens trained since the last update")
    if steps > event.local_step:
        return _refused(
            Reason.BAD_COUNTERS, f"{steps} steps at local step {event.local_step} cannot be"
        )
    try:
        contribution_weight(tokens, steps)
    except DilocoError as error:
        return _refused(error.reason, error.message)
    return None
