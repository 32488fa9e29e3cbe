"""Membership in the synchronizer's own memory: the default where there is one synchronizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership.base import Member, Roll, check_quorum, stale_grant
from synchronizer_server.membership.memory_server import MemoryLeaseServer, MemoryUser


class MemoryMembership(MemoryUser):
    """A ``Membership`` that ends with the process; a restart takes over from the round record.

    Args:
        clock: monotonic seconds.
        server: what several synchronizers share, lease and all, with a clock of its own; None for
            one synchronizer alone.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        server: MemoryLeaseServer | None = None,
    ) -> None:
        super().__init__(server if server is not None else MemoryLeaseServer(clock))

    async def grant_incarnation(self, learner_id: str, proposed: Incarnation) -> Incarnation:
        """See ``Membership.grant_incarnation``."""
        with self._asking() as server:
            server.check_term(f"an incarnation of {learner_id}", proposed.term)
            known = server.incarnations.get(learner_id, Incarnation(0, 0))
            if known.term > proposed.term:
                raise stale_grant(learner_id, proposed.term, known)
            if known.number >= proposed.number and known != proposed:
                return known
            server.incarnations[learner_id] = proposed
            server.heard[learner_id] = server.clock()
            return proposed

    async def heartbeat(self, batch: Mapping[str, Incarnation], term: int) -> None:
        """See ``Membership.heartbeat``."""
        if not batch:
            return
        with self._asking() as server:
            server.check_term(f"heartbeats of {len(batch)} learners", term)
            now = server.clock()
            for learner_id, incarnation in batch.items():
                if incarnation >= server.incarnations.get(learner_id, incarnation):
                    server.incarnations[learner_id] = incarnation
                    server.heard[learner_id] = now

    async def members(self) -> list[Member]:
        """See ``Membership.members``."""
        with self._asking() as server:
            return _members(server)

    async def expire(self, older_than_s: float, term: int) -> list[Member]:
        """See ``Membership.expire``."""
        with self._asking() as server:
            server.check_term("an expiry", term)
            silent = [member for member in _members(server) if member.age_s > older_than_s]
            for member in silent:
                del server.heard[member.learner_id]
            return silent

    async def remove(self, learner_id: str, incarnation: Incarnation, term: int) -> bool:
        """See ``Membership.remove``."""
        with self._asking() as server:
            server.check_term(f"the end of {learner_id}", term)
            if server.incarnations.get(learner_id) != incarnation:
                return False
            return server.heard.pop(learner_id, None) is not None

    async def set_quorum(self, quorum: int, term: int) -> None:
        """See ``Membership.set_quorum``."""
        check_quorum(quorum)
        with self._asking() as server:
            server.check_term(f"quorum {quorum}", term)
            server.quorum = quorum

    async def mark_seeded(self, term: int) -> bool:
        """See ``Membership.mark_seeded``."""
        with self._asking() as server:
            server.check_term("the seed", term)
            if server.seeded_term is not None:
                return False
            server.seeded_term = term
            return True

    async def is_seeded(self) -> bool:
        """See ``Membership.is_seeded``."""
        with self._asking() as server:
            return server.seeded_term is not None

    async def read_back(self) -> Roll:
        """See ``Membership.read_back``."""
        with self._asking() as server:
            return Roll(
                members=tuple(_members(server)),
                quorum=server.quorum,
                seeded=server.seeded_term is not None,
            )

    async def aclose(self) -> None:
        """See ``Membership.aclose``."""


def _members(server: MemoryLeaseServer) -> list[Member]:
    now = server.clock()
    heard = sorted(server.heard.items(), key=lambda item: (item[1], item[0].encode()))
    return [
        Member(
            learner_id=learner_id,
            incarnation=server.incarnations[learner_id],
            age_s=max(0.0, now - at),
        )
        for learner_id, at in heard
    ]
