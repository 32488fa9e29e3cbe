"""When a persisted round may be published: acknowledgements, standbys in sync, and the lease.

The leader's side of replication (design section 6). A store in ``in_sync`` may take over by
itself, so whoever may be in it must have every round before anybody sees it. To publish without
its acknowledgement, the keeper of the lease is told first that it is in sync no longer.

`may_be_in_sync` is the heart: every store that the keeper may still name. An id enters it before
the keeper is asked to add it, and leaves it only once the keeper has confirmed a set without it,
so an answer that was lost on the way never lets a stale standby lead.

A term begins with the list of the one before. Our store may hold a round that nobody published and
that others in the list lack, so nothing of it is served before the keeper has confirmed a list of
this term; and the keeper is told only once our store has begun the term: where it cannot, the
others may still lead.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Standby:
    """One standby that has connected.

    Attributes:
        standby_id: id of its store.
        connected: True while its stream is open.
        acked: last global step of this term that it has persisted; -1 for none.
        owes_since: since when it owes an acknowledgement, seconds; None where it owes none.
    """

    standby_id: str
    connected: bool = True
    acked: int = -1
    owes_since: float | None = None


@dataclass(frozen=True, slots=True)
class WriteInSync:
    """Tell the keeper which stores are in sync; answer with `ReplicationCore.written`.

    Attributes:
        standby_ids: the stores.
        revision: goes up: a write that was held up on its way must not undo a later one.
    """

    standby_ids: frozenset[str]
    revision: int


@dataclass(frozen=True, slots=True)
class TellStandby:
    """Tell a standby whether it is in sync."""

    standby_id: str
    in_sync: bool


@dataclass(frozen=True, slots=True)
class Release:
    """The waiting round may be published.

    Attributes:
        global_step: the round.
        safe: False where a take-over could lose it.
        acked: True where another process has persisted it.
    """

    global_step: int
    safe: bool
    acked: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """The waiting round is held back, or (reason empty) no longer.

    Attributes:
        reason: ``replica`` or ``lease``.
        detail: the same for people.
    """

    reason: str
    detail: str


Effect = WriteInSync | TellStandby | Release | Hold


@dataclass(slots=True, kw_only=True)
class ReplicationCore:
    """Decides what is published.

    Attributes:
        mode: ``off``, ``one`` or ``one-or-degrade``.
        store_id: id of our own store, which is always in sync.
        expects_standby: True where a standby is configured, or has ever connected.
        ack_timeout_s: time after which a standby that owes an acknowledgement is left out.
        position: last global step that is persisted here.
        published: last global step that was released.
        standbys: by id.
        may_be_in_sync: see the module; our own id is never in it.
        num_unsafe: rounds released that a take-over could lose.
        told: what each standby was last told: whether it is in sync.
        begun: whether what our store holds may be served.
    """

    mode: str
    store_id: str
    expects_standby: bool
    ack_timeout_s: float
    position: int
    published: int
    standbys: dict[str, Standby] = field(default_factory=dict)
    may_be_in_sync: set[str] = field(default_factory=set)
    num_unsafe: int = 0
    told: dict[str, bool] = field(default_factory=dict)
    begun: bool = False
    _begins_since: float | None = None
    _keeper_has: frozenset[str] | None = None
    _writing: frozenset[str] | None = None
    _revision: int = 0
    _retry_at: float = 0.0
    _waiting: int | None = None
    _waiting_since: float = 0.0
    _hold: str = ""

    @property
    def why_not_begun(self) -> str:
        """What the begun term waits for before it is served; empty where that is under way."""
        if self.begun or self.is_writing:
            return ""
        return "begins once the keeper of the lease confirms who is in sync"

    def makes_way(self, *, lease_held: bool) -> bool:
        """Whether a process that waits so lets others lead: without a lease it would in vain."""
        return bool(self.why_not_begun) and self.mode == "one" and not lease_held

    # -- events ----------------------------------------------------------------------------------

    def begin(self, *, lease_held: bool, now: float) -> list[Effect]:
        """Our store has begun the term; it is served from `begun` on."""
        self._begins_since = now
        return self.advance(lease_held=lease_held, now=now)

    def connected(self, standby_id: str, *, lease_held: bool, now: float) -> list[Effect]:
        """A standby's stream is open; what it lacks is on its way."""
        self.expects_standby = True
        self._forget_lost()
        self.standbys[standby_id] = Standby(standby_id=standby_id)
        self.told.pop(standby_id, None)
        return self.advance(lease_held=lease_held, now=now)

    def acked(
        self, standby_id: str, global_step: int, *, lease_held: bool, now: float
    ) -> list[Effect]:
        """A standby has persisted everything up to ``global_step``, in this term."""
        standby = self.standbys.get(standby_id)
        if standby is not None and standby.connected and global_step <= self.position:
            standby.acked = max(standby.acked, global_step)
        return self.advance(lease_held=lease_held, now=now)

    def lost(self, standby_id: str, *, lease_held: bool, now: float) -> list[Effect]:
        """A standby's stream is over."""
        standby = self.standbys.get(standby_id)
        if standby is not None:
            standby.connected = False
        return self.advance(lease_held=lease_held, now=now)

    def persisted(self, global_step: int, *, lease_held: bool, now: float) -> list[Effect]:
        """A round is persisted here, sent to the standbys, and waits to be published."""
        assert self._waiting is None, "rounds commit one after the other"
        assert global_step >= self.position, "rounds commit in order"
        self.position = global_step
        self._waiting, self._waiting_since = global_step, now
        return self.advance(lease_held=lease_held, now=now)

    def written(
        self, standby_ids: Collection[str], answer: bool | None, *, lease_held: bool, now: float
    ) -> list[Effect]:
        """The keeper answered a `WriteInSync`: True done, False refused, None not known."""
        self._writing = None
        if answer:
            self._keeper_has = frozenset(standby_ids)
            self.may_be_in_sync = set(self._keeper_has - {self.store_id})
        else:
            self._keeper_has = None
            self._retry_at = now + self.ack_timeout_s / 4
        return self.advance(lease_held=lease_held, now=now)

    def keeper_said(self, in_sync: Collection[str] | None) -> None:
        """What the keeper had when it was last read, under our lease; None: it was emptied.

        It may be older than what was written since, so it never shrinks `may_be_in_sync`; where
        it differs from what was confirmed, the keeper is told again.
        """
        if self._writing is not None or in_sync == self._keeper_has:
            return
        self._keeper_has = None
        self.may_be_in_sync |= frozenset(in_sync or ()) - {self.store_id}

    def advance(self, *, lease_held: bool, now: float) -> list[Effect]:
        """Moves on as far as it goes; call it also at `wake_at` and when the lease changes."""
        if self._begins_since is None:
            return []
        effects: list[Effect] = []
        self._note_debts(now)
        wanted = self._wanted(now)
        if self._should_write(wanted, now):
            self.may_be_in_sync |= wanted - {self.store_id}
            self._writing = wanted
            self._revision += 1
            effects.append(WriteInSync(wanted, self._revision))
        self.begun = self.begun or self._may_begin(self._begins_since, now)
        effects += self._release(lease_held=lease_held, now=now)
        effects += self._tell()
        return effects

    def wake_at(self, now: float) -> float | None:
        """When time alone may move something, seconds; None where it cannot."""
        times = [
            s.owes_since + self.ack_timeout_s
            for s in self.standbys.values()
            if s.owes_since is not None
        ]
        if self._writing is None:
            times.append(self._retry_at)
        if self._waiting is not None:
            times.append(self._waiting_since + self.ack_timeout_s)
        if self._begins_since is not None and not self.begun:
            times.append(self._begins_since + self.ack_timeout_s)
        return min((at for at in times if at > now), default=None)

    @property
    def revision(self) -> int:
        """Number of the newest `WriteInSync` of this term; 0 before the first."""
        return self._revision

    @property
    def is_writing(self) -> bool:
        """Whether the keeper has been told something and has not answered."""
        return self._writing is not None

    @property
    def has_successor(self) -> bool:
        """Whether a standby follows that may take over at once."""
        return any(s.connected and self.told.get(s.standby_id) for s in self.standbys.values())

    @property
    def lag(self) -> int:
        """Published rounds that the standby nearest to us does not have."""
        acked = [s.acked for s in self.standbys.values() if s.connected]
        return max(self.published - max(acked), 0) if acked else 0

    def _forget_lost(self) -> None:
        """Drops standbys that are gone and may not take over: ids may come and never return."""
        for standby in list(self.standbys.values()):
            if not standby.connected and standby.standby_id not in self.may_be_in_sync:
                del self.standbys[standby.standby_id]
                self.told.pop(standby.standby_id, None)

    # -- who is in sync --------------------------------------------------------------------------

    def _note_debts(self, now: float) -> None:
        for standby in self.standbys.values():
            owes = standby.connected and standby.acked < self.position
            if not owes:
                standby.owes_since = None
            elif standby.owes_since is None:
                standby.owes_since = now

    def _wanted(self, now: float) -> frozenset[str]:
        """Stores that the keeper should name: those that keep up."""
        return frozenset(
            {self.store_id} | {s.standby_id for s in self.standbys.values() if self._fits(s, now)}
        )

    def _fits(self, standby: Standby, now: float) -> bool:
        if not standby.connected:
            return False
        if self.mode == "off":
            return standby.acked >= 0
        if standby.owes_since is None:
            return True
        # Who is in it already gets time; who is not must have everything first.
        is_in = standby.standby_id in self.may_be_in_sync
        return is_in and now < standby.owes_since + self.ack_timeout_s

    def _should_write(self, wanted: frozenset[str], now: float) -> bool:
        if self._writing is not None or now < self._retry_at:
            return False
        if self._keeper_has is not None:
            return wanted != self._keeper_has
        return True

    def _tell(self) -> list[Effect]:
        """Whoever may be named counts as in sync; it hears so once per change."""
        effects: list[Effect] = []
        for standby in self.standbys.values():
            is_in = (
                self._keeper_has is not None
                and standby.standby_id in self._keeper_has
                and standby.standby_id in self.may_be_in_sync
            )
            if standby.connected and self.told.get(standby.standby_id) != is_in:
                self.told[standby.standby_id] = is_in
                effects.append(TellStandby(standby.standby_id, is_in))
        return effects

    def _may_begin(self, since: float, now: float) -> bool:
        if self._keeper_has is not None or self.mode == "off" or not self.expects_standby:
            return True
        return self.mode == "one-or-degrade" and now >= since + self.ack_timeout_s

    # -- the waiting round -----------------------------------------------------------------------

    def _release(self, *, lease_held: bool, now: float) -> list[Effect]:
        if self._waiting is None:
            return []
        acked = {s.standby_id for s in self.standbys.values() if s.acked >= self._waiting}
        missing = sorted(self.may_be_in_sync - acked)
        hold = self._why_held(missing, acked=bool(acked), lease_held=lease_held)
        gives_up = self.mode == "one-or-degrade" and now >= self._waiting_since + self.ack_timeout_s
        if hold is not None and not gives_up:
            changed = hold.reason != self._hold
            self._hold = hold.reason
            return [hold] if changed else []
        safe = hold is None and (self.mode != "off" or not missing)
        release = Release(self._waiting, safe, bool(acked))
        self.published, self._waiting = self._waiting, None
        self.num_unsafe += not safe
        effects: list[Effect] = [Hold("", "")] if self._hold else []
        self._hold = ""
        return [*effects, release]

    def _why_held(self, missing: list[str], *, acked: bool, lease_held: bool) -> Hold | None:
        """Why a round may not be published safely; None where it may."""
        if self.mode == "off" or not self.expects_standby:
            return None
        if missing:
            names = ", ".join(missing)
            return Hold("replica", f"{names} may take over and has not acknowledged")
        if lease_held or acked:
            return None
        return Hold("lease", "the lease is not held, and no standby acknowledges")
