"""Membership in the synchronizer's own memory: the default where there is one synchronizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership.base import Member, check_quorum, stale_grant


class MemoryMembership:
    """A ``Membership`` that ends with the process; a restart takes over from the round record.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._incarnations: dict[str, Incarnation] = {}
        self._heard: dict[str, float] = {}
        self._quorum: int | None = None
        self._seeded_term: int | None = None

    async def grant_incarnation(
        self, learner_id: str, *, term: int, at_least: int = 0
    ) -> Incarnation:
        """See ``Membership.grant_incarnation``."""
        known = self._incarnations.get(learner_id, Incarnation(0, 0))
        if known.term > term:
            raise stale_grant(learner_id, term, known)
        granted = Incarnation(term, 1 + max(known.number, at_least))
        self._incarnations[learner_id] = granted
        self._heard[learner_id] = self._clock()
        return granted

    async def heartbeat(self, batch: Mapping[str, Incarnation]) -> None:
        """See ``Membership.heartbeat``."""
        now = self._clock()
        for learner_id, incarnation in batch.items():
            if incarnation >= self._incarnations.get(learner_id, incarnation):
                self._incarnations[learner_id] = incarnation
                self._heard[learner_id] = now

    async def members(self) -> list[Member]:
        """See ``Membership.members``."""
        now = self._clock()
        heard = sorted(self._heard.items(), key=lambda item: (item[1], item[0].encode()))
        return [
            Member(
                learner_id=learner_id,
                incarnation=self._incarnations[learner_id],
                age_s=max(0.0, now - at),
            )
            for learner_id, at in heard
        ]

    async def expired(self, older_than_s: float) -> list[Member]:
        """See ``Membership.expired``."""
        return [member for member in await self.members() if member.age_s > older_than_s]

    async def remove(self, learner_id: str, incarnation: Incarnation) -> bool:
        """See ``Membership.remove``."""
        if self._incarnations.get(learner_id) != incarnation:
            return False
        return self._heard.pop(learner_id, None) is not None

    async def get_quorum(self) -> int | None:
        """See ``Membership.get_quorum``."""
        return self._quorum

    async def set_quorum(self, quorum: int) -> None:
        """See ``Membership.set_quorum``."""
        check_quorum(quorum)
        self._quorum = quorum

    async def mark_seeded(self, term: int) -> bool:
        """See ``Membership.mark_seeded``."""
        if self._seeded_term is not None:
            return False
        self._seeded_term = term
        return True

    async def is_seeded(self) -> bool:
        """See ``Membership.is_seeded``."""
        return self._seeded_term is not None

    async def aclose(self) -> None:
        """See ``Membership.aclose``."""
