"""What a Redis holds of one group of one run, in memory, and how its users can lose it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership.base import stale_term


class Link(StrEnum):
    """How one user reaches the server."""

    UP = "up"
    CUT = "cut"
    """Nothing arrives."""
    MUTE = "mute"
    """What is asked is done, and the answer is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A lease that somebody took.

    Attributes:
        claim: who took it.
        address: where the holder is reached.
        ends_at: when it runs out, by the server's clock.
    """

    claim: Claim
    address: str
    ends_at: float


@dataclass(slots=True)
class MemoryLeaseServer:
    """The keeper that several ``MemoryLease`` and ``MemoryMembership`` of one run share.

    Attributes:
        clock: monotonic seconds.
        lease: the lease as last taken; it may have run out.
        term: highest term; 0 where none is known.
        in_sync: standbys in sync; None where nothing is known of the run.
        in_sync_revision: number of the write that set it, in this term.
        incarnations: the latest of every learner.
        heard: when each member was heard last, by the clock.
        quorum: K as last set.
        seeded_term: term that seeded the run.
    """

    clock: Callable[[], float] = time.monotonic
    lease: HeldLease | None = None
    term: int = 0
    in_sync: frozenset[str] | None = None
    in_sync_revision: int = 0
    incarnations: dict[str, Incarnation] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)
    quorum: int | None = None
    seeded_term: int | None = None

    def empty(self) -> None:
        """Forgets everything, as a Redis that restarts without its data."""
        self.lease = self.in_sync = self.quorum = self.seeded_term = None
        self.term = self.in_sync_revision = 0
        self.incarnations.clear()
        self.heard.clear()

    def held(self) -> HeldLease | None:
        """The lease, where it has not run out."""
        if self.lease is not None and self.clock() >= self.lease.ends_at:
            self.lease = None
        return self.lease

    def check_term(self, subject: str, term: int) -> None:
        """Refuses a write for a term that is over.

        Raises:
            DilocoError: ``STALE_TERM``.
        """
        if term < self.term:
            raise stale_term(subject, term, self.term)


class MemoryUser:
    """One process's way to the server; a base of what is kept there.

    Args:
        server: what is shared.

    Attributes:
        server: what is shared.
        link: whether calls get through; set it to lose them.
    """

    def __init__(self, server: MemoryLeaseServer) -> None:
        self.server = server
        self.link = Link.UP

    @contextlib.contextmanager
    def _asking(self) -> Iterator[MemoryLeaseServer]:
        """The server, for one call.

        Raises:
            DilocoError: ``MEMBERSHIP_UNAVAILABLE`` before or after the call, as the link says.
        """
        if self.link is Link.CUT:
            raise _unavailable()
        try:
            yield self.server
        finally:  # a refusal is an answer, too
            if self.link is Link.MUTE:
                raise _unavailable()


def _unavailable() -> DilocoError:
    return DilocoError(
        Reason.MEMBERSHIP_UNAVAILABLE, "the keeper in memory does not answer; try again later"
    )
