"""Who leads: the lease of leadership as a state machine (design section 6).

One of these runs in every synchronizer process that has a keeper of leases. It reads the keeper,
bids when it may, renews while it leads and steps down when somebody else does. It knows no keys
and no network: whoever drives it passes on only claims whose signature was checked.

    FOLLOWING --bid granted--> LEADING --another holder, or a higher term heard--> FOLLOWING
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_POLLS_PER_TIMEOUT: Final = 4
_JUST_AFTER_S: Final = 0.02


class Role(StrEnum):
    """What a synchronizer process does."""

    FOLLOWING = "following"
    LEADING = "leading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A claim of leadership that was found signed.

    Attributes:
        term: its term.
        leader_id: id of the leading process.
        address: where it is reached; empty where that is not known.
    """

    term: int
    leader_id: str
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the keeper said.

    Attributes:
        holder: who holds the lease; None where nobody does.
        term: highest term that the keeper knows.
        in_sync: stores by whose take-over nothing is lost; None where it knows nothing of the run.
        asked_at: when it was asked, seconds: a lease counts from there.
        remaining_s: how long the holder has it still; a standby looks again when it is over.
    """

    holder: Holder | None
    term: int
    in_sync: frozenset[str] | None
    asked_at: float
    remaining_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What another synchronizer of the run says of itself.

    Attributes:
        position: (term, global step) of the newest record in its store; (0, 0) for none.
        leads: its claim, where it leads.
    """

    position: tuple[int, int]
    leads: Holder | None = None


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Ask the keeper; answer with `LeaseCore.seen` or `LeaseCore.unanswered`."""


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Renew the lease of `LeaseCore.claim`; answer as `ReadLease`."""


@dataclass(frozen=True, slots=True)
class Bid:
    """Try to acquire the lease with this term; answer as `ReadLease`."""

    term: int


@dataclass(frozen=True, slots=True)
class AskPeers:
    """Ask the other synchronizers where they stand; answer with `LeaseCore.peers`."""


@dataclass(frozen=True, slots=True)
class Lead:
    """The lease is ours: begin this term."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """Somebody else leads, or may: nothing is published under our term any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Tell the keeper again to forget what we led; answer with `LeaseCore.forgotten`."""

    term: int


Effect = ReadLease | RenewLease | Bid | AskPeers | Lead | StepDown | Forget


@dataclass(slots=True, kw_only=True)
class Standing:
    """What the rest of the process knows that a bid depends on; kept up to date by who drives.

    Attributes:
        position: (term, global step) of the newest complete record in our store; (0, 0) for none.
        begun_term: highest term that ever began in our store, also without a record; 0 for none.
        in_sync: whether our store had all published rounds when we last heard; True for the store
            of a leader and for one that never followed.
        leader_heard_at: when the leader was last heard on the replication stream, seconds; None
            where no stream is open.
        may_lead: False while the store cannot serve, or on an operator's word.
    """

    position: tuple[int, int] = (0, 0)
    begun_term: int = 0
    in_sync: bool = True
    leader_heard_at: float | None = None
    may_lead: bool = True


class LeaseCore:
    """Decides about leadership.

    Args:
        store_id: stable id of our store: what ``in_sync`` is about.
        leader_id: random id of this process.
        timeout_s: time-out of the lease.
        num_peers: other synchronizers of the run that are configured.
        now: seconds of a monotonic clock.

    Attributes:
        standing: what a bid depends on; kept up to date by who drives.
        role: what we do.
        term: the term that we lead, or led last.
        highest: the claim of the highest term that was heard.
        held_until: until when the lease is ours for sure, seconds.
        why_waiting: why we do not lead, or do not serve our term yet.
        is_alone: whether our store alone was in sync when our term was granted.
    """

    def __init__(
        self, *, store_id: str, leader_id: str, timeout_s: float, num_peers: int, now: float
    ) -> None:
        self.standing = Standing()
        self.role = Role.FOLLOWING
        self.term = 0
        self.highest = Holder(term=0, leader_id="")
        self.held_until = now
        self.why_waiting = "the keeper of the lease is asked"
        self._store_id = store_id
        self._leader_id = leader_id
        self._timeout_s = timeout_s
        self._num_peers = num_peers
        self._bid_term = self._led_term = self._forget_term = 0
        self._empty_since: float | None = None
        self._peers: tuple[Peer, ...] | None = None
        self._keeper_term = 0
        self._back_until, self._back_reason = now, ""
        self.is_alone = False
        self._next_at = now
        self._asking_since: float | None = None

    # -- queries ---------------------------------------------------------------------------------

    @property
    def leader(self) -> Holder | None:
        """Who leads as far as we know: ourselves, or the highest claim heard; None for nobody."""
        if self.role is Role.LEADING:
            return Holder(term=self.term, leader_id=self._leader_id)
        return self.highest if self.highest.term else None

    def holds(self, now: float) -> bool:
        """Whether the lease is ours for sure at ``now``."""
        return self.role is Role.LEADING and now < self.held_until

    def wake_at(self) -> float:
        """When `tick` is due."""
        return self._next_at if self._asking_since is None else self._asking_since + self._timeout_s

    # -- events ----------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Asks the keeper when it is time; one question at a time."""
        if self._asking_since is not None and now < self._asking_since + self._timeout_s:
            return []
        if now < self._next_at:
            return []
        return [self._ask(RenewLease() if self.role is Role.LEADING else ReadLease(), now)]

    def unanswered(self, now: float) -> list[Effect]:
        """The keeper did not answer; whether it did what was asked is not known."""
        self._rest(now)
        if self.role is Role.FOLLOWING:
            self.why_waiting = "the keeper of the lease does not answer"
        return []

    def seen(self, seen: Seen, now: float) -> list[Effect]:
        """The keeper answered."""
        self._rest(now)
        self._keeper_term = seen.term
        if self.role is Role.LEADING:
            return self._renewed(seen)
        return [*self._remind(seen), *self._follow(seen, now)]

    def _follow(self, seen: Seen, now: float) -> list[Effect]:
        if seen.holder is not None and seen.holder.leader_id == self._leader_id:
            return self._granted(seen)
        self._empty_since = self._empty_since if seen.in_sync is None else None
        if seen.holder is not None:
            self.hear(seen.holder)
            self.why_waiting = f"{seen.holder.leader_id} leads in term {seen.holder.term}"
            self._next_at = min(self._next_at, now + seen.remaining_s + _JUST_AFTER_S)
            return []
        return self._may_bid(seen, now)

    def peers(self, peers: Collection[Peer], now: float) -> list[Effect]:
        """The other synchronizers that answered said where they stand."""
        for peer in peers:
            if peer.leads is not None:
                self.hear(peer.leads)
        self._peers = tuple(peers)
        # Decided at the next answer of the keeper, which may know more by then.
        self._next_at = min(self._next_at, now)
        return []

    def hear(self, holder: Holder) -> list[Effect]:
        """A signed claim was heard, from the keeper, a peer or a learner."""
        if holder.leader_id == self._leader_id:
            return []  # our own word, relayed
        # A claim of our own that we gave up stands in nobody's way: in a keeper that was emptied,
        # its term may be granted again, or the leader of an earlier one may be back. That one must
        # hear from us that a later term has begun, or it leads on for ever and we follow ourselves.
        is_ours = self.role is Role.FOLLOWING and self.highest.leader_id == self._leader_id
        says_more = holder.address and not self.highest.address
        is_same = holder.term == self.highest.term
        if is_ours or holder.term > self.highest.term or (is_same and says_more):
            self.highest = holder
        if self.role is Role.LEADING and holder.term > self.term:
            return self._step_down(f"{holder.leader_id} leads in term {holder.term}")
        if self.role is Role.LEADING and holder.term == self.term:
            # Nobody can tell the two apart by their term: whoever bids next takes a higher one.
            return self._step_down(f"{holder.leader_id} claims term {holder.term}, too")
        return []

    def stand_back(self, reason: str, now: float) -> None:
        """A term could not be begun here: for one time-out, others in sync have their turn."""
        if self._num_peers:
            self._back_until, self._back_reason = now + self._timeout_s, reason

    def leads(self, term: int) -> bool:
        """Whether we lead this very term."""
        return self.role is Role.LEADING and self.term == term

    def step_down(self, reason: str, *, forget: bool = False) -> list[Effect]:
        """The process cannot lead on; to ``forget``, the keeper is told again until `forgotten`."""
        if self.role is not Role.LEADING:
            return []
        self._forget_term = self.term if forget else 0
        return self._step_down(reason)

    def forgotten(self) -> None:
        """The keeper has forgotten."""
        self._forget_term = 0

    def _remind(self, seen: Seen) -> list[Effect]:
        """A keeper that did not hear of it names our store alone, and nobody could ever lead."""
        if seen.term != self._forget_term:
            self._forget_term = 0
        is_free = seen.holder is None or seen.holder.leader_id == self._leader_id
        if not self._forget_term or not is_free or seen.in_sync != frozenset({self._store_id}):
            return []
        return [Forget(self._forget_term)]

    # -- following -------------------------------------------------------------------------------

    def _may_bid(self, seen: Seen, now: float) -> list[Effect]:
        """Nobody holds the lease."""
        standing = self.standing
        if not standing.may_lead:
            self.why_waiting = "this synchronizer may not lead now"
            return []
        heard_at = standing.leader_heard_at
        if heard_at is not None and now < heard_at + self._timeout_s:
            # It publishes with our acknowledgement: a bid would only fence a healthy leader.
            self.why_waiting = "the leader lost its lease, but its records still come"
            return []
        if now < self._back_until and seen.in_sync != frozenset({self._store_id}):
            self.why_waiting = f"lets another store in sync lead: {self._back_reason}"
            self._next_at = min(self._next_at, self._back_until)
            return []
        if seen.in_sync is None:
            return self._bid_on_empty(now)
        if self._store_id not in seen.in_sync:
            names = ", ".join(sorted(seen.in_sync)) or "nobody"
            self.why_waiting = f"our store misses published rounds; in sync: {names}"
            return []
        return self._bid(now)

    def _bid_on_empty(self, now: float) -> list[Effect]:
        """The keeper knows nothing of the run: new, or emptied while somebody leads."""
        if self._empty_since is None:
            self._empty_since, self._peers = now, None
        if now < self._empty_since + self._timeout_s:
            self.why_waiting = "the keeper knows nothing of the run; a leader may yet tell it"
            return [] if self._peers is not None else [AskPeers()]
        peers = self._peers or ()
        if any(peer.position > self.standing.position for peer in peers):
            self.why_waiting = "another synchronizer has more rounds"
            self._peers = None
            return [AskPeers()]
        if not self.standing.in_sync and len(peers) < self._num_peers:
            self.why_waiting = "our store may miss rounds, and not every synchronizer answers"
            self._peers = None
            return [AskPeers()]
        return self._bid(now)

    def _bid(self, now: float) -> list[Effect]:
        self._bid_term = max(1 + max(self._keeper_term, self._used_term()), self._bid_term)
        self.why_waiting = f"bids for term {self._bid_term}"
        return [self._ask(Bid(self._bid_term), now)]

    def _granted(self, seen: Seen) -> list[Effect]:
        assert seen.holder is not None, "granted to us"
        if seen.holder.term <= self._used_term() or not self.standing.may_lead:
            # A term that was used already, or overtaken: the bid came too late.
            self.why_waiting = f"term {seen.holder.term} is over; its lease runs out"
            return []
        self.role, self.term = Role.LEADING, seen.holder.term
        self.is_alone = seen.in_sync == frozenset({self._store_id})
        self.why_waiting = f"begins term {self.term}"
        self._led_term = self.term
        self.highest = seen.holder
        self.held_until = seen.asked_at + self._timeout_s
        self._empty_since = self._peers = None
        return [Lead(self.term)]

    def _used_term(self) -> int:
        """The highest term that we know to have been led, whatever the keeper forgot."""
        standing = self.standing
        return max(standing.position[0], standing.begun_term, self.highest.term, self._led_term)

    # -- leading ---------------------------------------------------------------------------------

    def _renewed(self, seen: Seen) -> list[Effect]:
        holder = seen.holder
        ours = holder is not None and (holder.term, holder.leader_id) == (
            self.term,
            self._leader_id,
        )
        if ours:
            self.held_until = max(self.held_until, seen.asked_at + self._timeout_s)
            return []
        if holder is not None and holder.term > self.term:
            return self.hear(holder)
        if seen.term > self.term:
            return self._step_down(f"term {seen.term} has begun")
        if holder is not None:
            return self._step_down(f"{holder.leader_id} holds the lease in term {holder.term}")
        return []

    def _step_down(self, reason: str) -> list[Effect]:
        self.role = Role.FOLLOWING
        self.why_waiting = reason
        return [StepDown(reason)]

    # -- asking ----------------------------------------------------------------------------------

    def _ask(self, question: Effect, now: float) -> Effect:
        self._asking_since = now
        return question

    def _rest(self, now: float) -> None:
        self._asking_since = None
        self._next_at = now + self._timeout_s / _POLLS_PER_TIMEOUT
