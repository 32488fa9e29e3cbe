"""The seam between the synchronizer and the keeper of membership (design section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A learner that is known to live, or did so not long ago.

    Attributes:
        learner_id: the learner.
        incarnation: its latest incarnation.
        age_s: seconds since its last heartbeat, by the membership's own clock.
    """

    learner_id: str
    incarnation: Incarnation
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """What a new leader reads before the first learner joins again.

    Attributes:
        members: all members, the longest unheard first.
        quorum: K as an operator last set it; None when nobody did.
        seeded: whether the run was ever marked as seeded.
    """

    members: tuple[Member, ...]
    quorum: int | None
    seeded: bool


class Membership(Protocol):
    """Members, incarnations, quorum and the seeded mark of one group of one run.

    The synchronizer heartbeats for the learners it hears; learners never come here. Every call is
    one round trip. Every call may raise ``DilocoError``: ``MEMBERSHIP_UNAVAILABLE`` when the
    keeper does not answer (call again later; nothing else is lost by it), ``MALFORMED`` when what
    it holds is not ours. Every call that writes says for which ``term``, and raises
    ``STALE_TERM``, with nothing written, where the keeper of the lease knows a higher one; where
    it knows none (no lease, or the keeper was emptied), everybody may write.
    """

    async def grant_incarnation(self, learner_id: str, proposed: Incarnation) -> Incarnation:
        """Enters a new life of a learner as its leader proposes it; counts as its first heartbeat.

        Nothing but what is proposed is ever entered. So a call that is carried out after its
        leader gave it up, or twice, leaves what the leader granted by itself meanwhile, or went
        beyond; it never makes a life that nobody lives.

        Args:
            learner_id: the learner.
            proposed: under the term of the leader that grants.

        Returns:
            ``proposed``, entered now or before; or, with nothing written, the known one whose
            number is taken or passed: propose a higher one.

        Raises:
            DilocoError: ``STALE_TERM``, also when a later term has granted one already.
        """

    async def heartbeat(self, batch: Mapping[str, Incarnation], term: int) -> None:
        """Marks learners as alive now.

        An incarnation that is not known (the keeper was emptied) is entered, an older one than
        the known is ignored. An empty batch asks nobody.
        """

    async def members(self) -> list[Member]:
        """All members, the longest unheard first."""

    async def expire(self, older_than_s: float, term: int) -> list[Member]:
        """Ends the membership of whoever is unheard for more than ``older_than_s`` seconds.

        Incarnations stay known, and a heartbeat makes a member again.

        Returns:
            Who was removed, the longest unheard first.
        """

    async def remove(self, learner_id: str, incarnation: Incarnation, term: int) -> bool:
        """Ends a membership if that incarnation is the latest; True when a member was removed.

        The incarnation stays known, so its number is never granted again.
        """

    async def set_quorum(self, quorum: int, term: int) -> None:
        """Sets K.

        Raises:
            UsageError: ``CONFIG_INVALID`` when it is below 1.
        """

    async def mark_seeded(self, term: int) -> bool:
        """Marks the run as seeded; True for the first caller only."""

    async def is_seeded(self) -> bool:
        """Tells whether the run was ever marked as seeded."""

    async def read_back(self) -> Roll:
        """Everything that a take-over needs, as of one instant."""

    async def aclose(self) -> None:
        """Releases what the membership holds open. Calling it again does nothing."""


def check_quorum(quorum: int) -> None:
    """Refuses a K below 1.

    Raises:
        UsageError: ``CONFIG_INVALID``.
    """
    if quorum < 1:
        raise UsageError(Reason.CONFIG_INVALID, f"quorum is {quorum}; it must be at least 1")


def stale_term(subject: str, term: int, known: int) -> DilocoError:
    """The error for a write by a leader whose term is over."""
    return DilocoError(
        Reason.STALE_TERM,
        f"{subject} of term {term}: the lease knows term {known} already; term {term} is over",
        term=term,
        known_term=known,
    )


def stale_grant(learner_id: str, term: int, known: Incarnation) -> DilocoError:
    """The error for a grant by a leader whose term is over."""
    return DilocoError(
        Reason.STALE_TERM,
        f"learner {learner_id!r} has incarnation {known} of a later term; term {term} is over",
        learner=learner_id,
        term=term,
    )
