"""The membership view: which learners there are, which are live, which are fresh.

Live and progressing are separate states: heartbeats keep a learner live, only reports make it
fresh. Time is the synchronizer's monotonic clock, given in (design section 6).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.events import LearnerJoined, StepReported
from synchronizer_server.core.records import DrainRecord

_INTERVALS: Final = 5
_MOST_ABOVE_LOW: Final = 1.1
_RATE_SMOOTHING: Final = 0.2
_FEWEST_TO_COMPARE: Final = 3
_FASTEST: Final = 32.0

MOST_TOKENS: Final = 2**53
"""Tokens of one learner, reported or merged, are counted up to here: who reports absurd numbers
must not bring a sum into a record that no record can hold."""


class LearnerState(StrEnum):
    """Where a learner stands."""

    EXPECTED = "expected"
    JOINED = "joined"
    LIVE = "live"
    DISCONNECTED = "disconnected"
    GONE = "gone"
    LEFT = "left"
    DRAINED = "drained"

    @property
    def has_left(self) -> bool:
        """True where it said goodbye: nobody waits for it, and nothing of this life comes."""
        return self in {LearnerState.LEFT, LearnerState.DRAINED}


@dataclass(slots=True, kw_only=True)
class Learner:
    """What the synchronizer knows of one learner.

    Attributes:
        learner_id: its id.
        incarnation: newest life.
        shard: its data shard.
        state: where it stands.
        heard_at: when it was last heard, seconds.
        local_step: last reported local step.
        asked_step: local step at which it was last asked; it is fresh above it.
        reported_at: when the last report of this stream came, seconds.
        intervals: durations of its last inner steps as seen here, seconds.
        step_s: their median; None before the first.
        stepped: True once it has reported a step in this incarnation.
        known_global_steps: global step of the version it has applied, by fragment.
        loss: last reported training loss, nats per token.
        num_tokens: tokens reported in all lives.
        tokens_per_second: moving average.
        transfer_s: usual time from being asked to being staged, seconds; None before the first.
        num_accepted: pushes accepted.
        num_dropped: pushes dropped.
        num_refused: pushes refused.
        last_reason: why the last push that was not accepted was not.
        num_tokens_merged: sum of the tokens of its contributions, over all fragments.
        lease_lost: True once its data is handed out to others: nothing of this life is merged.
        most_tokens_per_step: the most that it ever reported.
        merged_steps: by fragment, its local step at its last contribution.
        counters_cut: True while its pushes claim more than it can have.
        quarantine: why it is left out for a while; empty where it is not.
        drain: why an operator asked it to leave; empty where nobody did. It holds until it has
            left: a process that died first, and was started again, is asked anew.
        records_parts: True where it records its part of snapshots.
    """

    learner_id: str
    incarnation: Incarnation
    shard: int
    heard_at: float
    state: LearnerState = LearnerState.JOINED
    local_step: int = 0
    asked_step: int = 0
    reported_at: float | None = None
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS))
    step_s: float | None = None
    stepped: bool = False
    known_global_steps: tuple[int, ...] = ()
    loss: float | None = None
    num_tokens: int = 0
    tokens_per_second: float = 0.0
    transfer_s: float | None = None
    num_accepted: int = 0
    num_dropped: int = 0
    num_refused: int = 0
    last_reason: str = ""
    num_tokens_merged: int = 0
    lease_lost: bool = False
    most_tokens_per_step: float = 0.0
    merged_steps: dict[int, int] = field(default_factory=dict)
    counters_cut: bool = False
    quarantine: str = ""
    drain: str = ""
    records_parts: bool = True

    @property
    def live(self) -> bool:
        """True while its report stream is open and it was heard in time."""
        return self.state is LearnerState.LIVE

    @property
    def takes_part(self) -> bool:
        """True while it is live and not left out."""
        return self.live and not self.quarantine

    @property
    def fresh(self) -> bool:
        """True where it has stepped since it was last asked: one local step serves one round."""
        return self.takes_part and self.local_step > self.asked_step

    def observe_transfer(self, seconds: float) -> None:
        """Updates the usual transfer time with one push."""
        if self.transfer_s is None:
            self.transfer_s = seconds
        else:
            self.transfer_s += _RATE_SMOOTHING * (seconds - self.transfer_s)


class Roster:
    """All learners that were ever granted an incarnation, by id."""

    def __init__(self) -> None:
        self._learners: dict[str, Learner] = {}
        self._live: list[Learner] | None = None
        self._has_expected = False
        self._taking_part: list[Learner] | None = None
        self._taken: dict[str, int] = {}

    def __iter__(self) -> Iterator[Learner]:
        return iter(self._learners.values())

    def __len__(self) -> int:
        return len(self._learners)

    def find(self, learner_id: str) -> Learner | None:
        """Returns the learner, whatever its incarnation."""
        return self._learners.get(learner_id)

    def current(self, learner_id: str, incarnation: Incarnation) -> Learner | None:
        """Returns the learner if that is its newest incarnation; None when unknown or fenced."""
        learner = self._learners.get(learner_id)
        return learner if learner is not None and learner.incarnation == incarnation else None

    def why_not_current(
        self, learner_id: str, incarnation: Incarnation, term: int
    ) -> tuple[Reason, str] | None:
        """Why this incarnation may not act now; None where it may.

        FENCED where a later one has joined, and that process must stop; STALE_TERM and
        UNKNOWN_LEARNER where the same process is to join again; LEASE_LOST where it is to do so
        without what it has trained and is not merged.
        """
        known = self._learners.get(learner_id)
        if known is None or known.incarnation < incarnation:
            return Reason.UNKNOWN_LEARNER, f"{learner_id[:40]} has not joined; join again"
        if known.incarnation > incarnation:
            return Reason.FENCED, (
                f"{learner_id} lives on as incarnation {known.incarnation}; this one "
                f"({incarnation}) is fenced and must stop"
            )
        if incarnation.term != term:
            return Reason.STALE_TERM, (
                f"incarnation {incarnation} is of an earlier term, {term} leads; join again"
            )
        if known.lease_lost:
            return Reason.LEASE_LOST, (
                f"{learner_id} was silent for too long, or held too much that was not merged, and "
                "its data is handed out again; join again, without what is not merged"
            )
        return None

    def next_incarnation(self, learner_id: str, term: int) -> Incarnation:
        """The life that this learner begins next.

        The same again until it has joined: whatever copy of it is entered elsewhere, and however
        late, is what this leader grants.
        """
        learner = self._learners.get(learner_id)
        number = learner.incarnation.number if learner is not None else 0
        return Incarnation(term, 1 + max(number, self._taken.get(learner_id, 0)))

    def is_taken(self, learner_id: str, number: int) -> None:
        """The membership knows a life of that number, of a time that the record does not know."""
        self._taken[learner_id] = max(number, self._taken.get(learner_id, 0))

    def live(self) -> Sequence[Learner]:
        """Live learners, by id."""
        if self._live is None:
            self._live = sorted((x for x in self if x.live), key=lambda x: x.learner_id)
        return self._live

    def taking_part(self) -> Sequence[Learner]:
        """Live learners that are not left out, by id: they are asked, and waited for."""
        if self._taking_part is None:
            self._taking_part = [x for x in self.live() if x.takes_part]
        return self._taking_part

    def move(self, learner: Learner, state: LearnerState) -> None:
        """Changes where a learner stands."""
        learner.state = state
        self._live = self._taking_part = None

    def leave_out(self, learner: Learner, reason: str) -> None:
        """Leaves a learner out, or (reason empty) no longer."""
        learner.quarantine = reason
        self._taking_part = None

    def restore(self, learner_id: str, *, incarnation: Incarnation, shard: int, local_step: int,
                num_tokens: int, num_tokens_merged: int, heard_at: float,
                expected: bool, drain: DrainRecord | None) -> None:  # fmt: skip
        """Puts a learner back that a record knows.

        Drained, where it was; expected, where the membership heard it not long ago, else
        disconnected, until it joins again.
        """
        state = LearnerState.EXPECTED if expected else LearnerState.DISCONNECTED
        if drain is not None and drain.has_left:
            state = LearnerState.DRAINED
        self._has_expected = self._has_expected or state is LearnerState.EXPECTED
        self._learners[learner_id] = Learner(
            learner_id=learner_id,
            incarnation=incarnation,
            shard=shard,
            heard_at=heard_at,
            state=state,
            local_step=local_step,
            asked_step=local_step,
            num_tokens=num_tokens,
            num_tokens_merged=num_tokens_merged,
            drain=drain.reason if drain is not None else "",
        )

    def join(self, event: LearnerJoined, now: float) -> Learner:
        """Enters a new life, which fences every earlier one.

        The new incarnation is fresh at its first step: local steps count over all lives, so the
        step at which it was last asked becomes the one at which it joins.
        """
        before = self._learners.get(event.learner_id)
        learner = Learner(
            learner_id=event.learner_id,
            incarnation=event.incarnation,
            shard=event.shard,
            heard_at=now,
            records_parts=event.records_parts,
        )
        if before is not None:
            if before.state is not LearnerState.DRAINED:
                learner.drain = before.drain
            learner.local_step = learner.asked_step = before.local_step
            learner.num_tokens = before.num_tokens
            learner.num_tokens_merged = before.num_tokens_merged
            learner.transfer_s = before.transfer_s
            learner.num_accepted = before.num_accepted
            learner.num_dropped = before.num_dropped
            learner.num_refused = before.num_refused
            learner.last_reason = before.last_reason
            learner.most_tokens_per_step = before.most_tokens_per_step
            learner.merged_steps = before.merged_steps
            learner.counters_cut = before.counters_cut
            learner.quarantine = before.quarantine
        self._learners[event.learner_id] = learner
        self._taken.pop(event.learner_id, None)
        self._live = self._taking_part = None
        return learner

    def opened(self, learner: Learner, now: float) -> None:
        """Its report stream is open."""
        self.move(learner, LearnerState.LIVE)
        learner.heard_at = now
        learner.reported_at = None

    def reported(self, learner: Learner, event: StepReported, now: float) -> bool:
        """Takes a report; returns False for one that is not newer than what is known."""
        learner.heard_at = now
        if event.local_step <= 0 or event.num_steps <= 0:
            return False
        if not learner.stepped:
            # Its user may have gone back to an older state: the first step of a life counts.
            learner.asked_step = min(learner.asked_step, event.local_step - 1)
        elif event.local_step <= learner.local_step:
            return False
        if learner.reported_at is not None:
            interval = max(now - learner.reported_at, 1e-9)
            learner.intervals.append(interval / event.num_steps)
            learner.step_s = statistics.median(learner.intervals)
            rate = event.num_tokens / interval
            if learner.tokens_per_second == 0.0:
                learner.tokens_per_second = rate
            else:
                learner.tokens_per_second += _RATE_SMOOTHING * (rate - learner.tokens_per_second)
        learner.reported_at = now
        learner.stepped = True
        learner.local_step = event.local_step
        learner.num_tokens = min(learner.num_tokens + event.num_tokens, MOST_TOKENS)
        learner.most_tokens_per_step = max(
            learner.most_tokens_per_step, event.num_tokens / event.num_steps
        )
        if event.known_global_steps:
            learner.known_global_steps = event.known_global_steps
        learner.loss = event.loss if event.loss is not None else learner.loss
        return True

    def expected(self) -> list[Learner]:
        """Learners that the membership heard under the leader before, and that are not back yet."""
        return [x for x in self if x.state is LearnerState.EXPECTED] if self._has_expected else []

    def silent(self, now: float, timeout_s: float) -> list[Learner]:
        """Live and expected learners that were not heard for ``timeout_s`` or longer."""
        here = [*self.live(), *self.expected()]
        return [x for x in here if now >= x.heard_at + timeout_s]

    def silent_at(self, timeout_s: float) -> float | None:
        """When the next one counts as silent, seconds; None where nobody is there."""
        here = [*self.live(), *self.expected()]
        return min([x.heard_at for x in here]) + timeout_s if here else None

    def median_step_s(self) -> float | None:
        """Median over the learners that take part of their own recent step time, seconds.

        None before any. Of an even number the mean of the two in the middle, but hardly above the
        faster one: else one slow learner of two would set the pace of the fleet. Of three and more
        each counts with no less than 1/32 of the median: nobody steps that much faster, and who
        says so must not set the pace.
        """
        recent = [x.step_s for x in self.taking_part() if x.step_s is not None]
        if not recent:
            return None
        if len(recent) >= _FEWEST_TO_COMPARE:
            shortest = statistics.median(recent) / _FASTEST
            recent = [max(x, shortest) for x in recent]
        return min(statistics.median(recent), _MOST_ABOVE_LOW * statistics.median_low(recent))
