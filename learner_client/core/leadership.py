"""Which synchronizer leads, as far as this process has heard, and when to go and ask.

A learner follows the synchronizer of the highest term that it has heard of. One that leads a lower
term was cut off from its peers and does not know it: it never gets a learner back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

MAX_LEARNT: Final = 16
"""Addresses kept that no setting names; the oldest go first."""

_MAX_READ: Final = 64
_NUM_LEASES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a synchronizer says when it is asked who leads.

    Attributes:
        address: where it was asked.
        leads: True where it says that it leads.
        follows: True where it says that it does not; neither is true of one that does not answer.
        term: term of its claim, or of the highest that it has heard; 0 without one.
        detail: for people: why it does not lead.
    """

    address: str
    leads: bool = False
    follows: bool = False
    term: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """From one synchronizer to another.

    Attributes:
        left: address that was left.
        address: address now.
        term: term that is led there.
        why: why the other one was left.
    """

    left: str
    address: str
    term: int
    why: str


class Leadership:
    """Addresses and terms that were heard of.

    Args:
        configured: addresses from the settings, at least one; they are never dropped.
    """

    def __init__(self, configured: Sequence[str]) -> None:
        assert configured, "there is at least one address"
        self._configured = tuple(dict.fromkeys(configured))
        self._learnt: tuple[str, ...] = ()
        self._current = self._configured[0]
        self._term = 0
        self._highest = 0
        self._joined = 0
        self._is_declined = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that are known: those of the settings, then what was learnt, newest first."""
        return self._configured + self._learnt

    @property
    def current(self) -> str:
        """Address of the synchronizer that is followed."""
        return self._current

    @property
    def term(self) -> int:
        """Term that the current one leads, as it said itself; 0 before that."""
        return self._term

    @property
    def highest(self) -> int:
        """Highest term heard of; 0 before the first."""
        return self._highest

    @property
    def is_obeyed(self) -> bool:
        """Whether nobody was heard of who leads a later term than the current one."""
        return self._term >= self._highest

    def learnt(self, addresses: Iterable[str]) -> None:
        """Adds valid addresses that somebody named; bounded, whoever names however many."""
        named = (*islice(addresses, _MAX_READ), *self._learnt)
        new = [a for a in dict.fromkeys(named) if a not in self._configured]
        kept = new[:MAX_LEARNT]
        if self._current in new[MAX_LEARNT:]:
            kept[-1] = self._current
        self._learnt = tuple(kept)

    def heard(self, term: int) -> None:
        """Somebody named a term of leadership."""
        self._highest = max(self._highest, term)

    def chosen(self, answer: Answer) -> None:
        """The synchronizer that gave this answer is followed from now on."""
        if answer.address != self._current:
            self._is_declined = False
        self._current, self._term = answer.address, answer.term
        self.heard(answer.term)

    def joined(self, term: int) -> None:
        """The current synchronizer let this process in, as the leader of that term."""
        self._term = self._joined = term
        self._is_declined = False
        self.heard(term)

    def declined(self) -> None:
        """The current synchronizer said that it does not lead, whatever it claims when asked."""
        self._is_declined = True

    def disowned(self) -> None:
        """The highest claim was forged: what counts is who let this process in."""
        self._highest = self._joined

    def choose(self, answers: Sequence[Answer]) -> Answer | None:
        """Whom to follow after the current one was lost; None where nobody leads who may.

        The highest term counts; of several that claim the same, the current one, else the first.
        One that has just declined comes last.
        """
        own = -1 if self._is_declined else 1
        for answer in answers:
            self.heard(answer.term)
        return max(
            (a for a in answers if self.is_acceptable(a)),
            key=lambda a: (a.term, own if a.address == self._current else 0),
            default=None,
        )

    def is_acceptable(self, answer: Answer) -> bool:
        """Whether whoever answered so leads, and no later term was heard of."""
        return answer.leads and answer.term >= self._highest

    def stays(self, answers: Sequence[Answer]) -> bool:
        """Whether there is no reason to leave the current one, to which the connection holds.

        That nothing is published is none: the fleet may wait for a quorum.
        """
        for answer in answers:
            self.heard(answer.term)
        says_no = any(a.follows for a in answers if a.address == self._current)
        return self.is_obeyed and not says_no


class Stall:
    """Tells when nothing new was published for so long that others are to be asked.

    Only time in which the connection claims to hold counts: without one others are asked anyway.

    Args:
        lease_timeout_s: after this without a sign of its holder a lease of leadership is over.
    """

    def __init__(self, lease_timeout_s: float) -> None:
        self._limit_s = _NUM_LEASES * lease_timeout_s
        self._waited_s = 0.0
        self._looked_at: float | None = None
        self._num_versions = 0

    def is_due(self, now: float, *, online: bool, num_versions: int) -> bool:
        """Whether to ask now; after that it is due again once as much time has passed.

        Args:
            now: seconds, of a clock that never goes back.
            online: whether the connection claims to hold.
            num_versions: versions received so far.
        """
        before, self._looked_at = self._looked_at, now
        if num_versions != self._num_versions:
            self._num_versions, self._waited_s = num_versions, 0.0
        elif online and before is not None:
            self._waited_s += now - before
        if self._waited_s < self._limit_s:
            return False
        self._waited_s = 0.0
        return True
