"""Membership in Redis: it outlives the synchronizer; a standby can read it (design section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import scripts
from synchronizer_server.membership.base import (
    Member,
    Roll,
    check_quorum,
    stale_grant,
    stale_term,
)
from synchronizer_server.membership.redis_client import RedisClient, Script


class RedisMembership:
    """A ``Membership`` in Redis.

    Args:
        client: connections to Redis, shared with whatever else of this process uses them; closed
            by ``aclose``.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        names = ("incarnations", "heartbeats", "term", "quorum", "seeded")
        self._keys = [client.key(name) for name in names]
        self._grant = client.script(scripts.GRANT)
        self._heartbeat = client.script(scripts.HEARTBEAT)
        self._members = client.script(scripts.MEMBERS)
        self._expire = client.script(scripts.EXPIRE)
        self._remove = client.script(scripts.REMOVE)
        self._set_quorum = client.script(scripts.SET_QUORUM)
        self._mark_seeded = client.script(scripts.MARK_SEEDED)
        self._read_back = client.script(scripts.READ_BACK)

    async def grant_incarnation(self, learner_id: str, proposed: Incarnation) -> Incarnation:
        """See ``Membership.grant_incarnation``."""
        subject = f"an incarnation of {learner_id}"
        answer = await self._fenced(
            self._grant, proposed.term, [learner_id, proposed.number], subject
        )
        known = self._client.incarnation(answer)
        if known.term > proposed.term:
            raise stale_grant(learner_id, proposed.term, known)
        return known

    async def heartbeat(self, batch: Mapping[str, Incarnation], term: int) -> None:
        """See ``Membership.heartbeat``."""
        if not batch:
            return
        args: list[str | int] = []
        for learner_id, incarnation in batch.items():
            args += [learner_id, incarnation.term, incarnation.number]
        await self._fenced(self._heartbeat, term, args, f"heartbeats of {len(batch)} learners")

    async def members(self) -> list[Member]:
        """See ``Membership.members``."""
        return self._listed(await self._members(self._keys, []))

    async def expire(self, older_than_s: float, term: int) -> list[Member]:
        """See ``Membership.expire``."""
        age_us = round(older_than_s * 1e6)
        return self._listed(await self._fenced(self._expire, term, [age_us], "an expiry"))

    async def remove(self, learner_id: str, incarnation: Incarnation, term: int) -> bool:
        """See ``Membership.remove``."""
        args = [learner_id, str(incarnation)]
        return bool(await self._fenced(self._remove, term, args, f"the end of {learner_id}"))

    async def set_quorum(self, quorum: int, term: int) -> None:
        """See ``Membership.set_quorum``."""
        check_quorum(quorum)
        await self._fenced(self._set_quorum, term, [quorum], f"quorum {quorum}")

    async def mark_seeded(self, term: int) -> bool:
        """See ``Membership.mark_seeded``."""
        return bool(await self._fenced(self._mark_seeded, term, [], "the seed"))

    async def is_seeded(self) -> bool:
        """See ``Membership.is_seeded``."""
        return self._seeded(await self._client.get("seeded"))

    async def read_back(self) -> Roll:
        """See ``Membership.read_back``."""
        answer = await self._read_back(self._keys, [])
        if not isinstance(answer, list) or len(answer) != 3:
            raise self._client.malformed("heartbeats", answer)
        return Roll(
            members=tuple(self._listed(answer[2])),
            quorum=self._quorum(answer[0]),
            seeded=self._seeded(answer[1]),
        )

    async def aclose(self) -> None:
        """See ``Membership.aclose``."""
        await self._client.aclose()

    async def _fenced(
        self, script: Script, term: int, args: Sequence[str | int], subject: str
    ) -> object:
        """What a script that writes for a term answers.

        Raises:
            DilocoError: ``STALE_TERM``.
        """
        answer = await script(self._keys, [term, *args])
        if not isinstance(answer, list) or len(answer) != 2:
            raise self._client.malformed("value", answer)
        if answer[0] != 1:
            raise stale_term(subject, term, self._client.term("term", answer[1]))
        return answer[1]

    def _quorum(self, value: object) -> int | None:
        return None if value is None else self._client.number("quorum", value, at_least=1)

    def _seeded(self, value: object) -> bool:
        return value is not None and self._client.term("seeded", value) > 0

    def _listed(self, answer: object) -> list[Member]:
        client = self._client
        if not isinstance(answer, list) or len(answer) % 3:
            raise client.malformed("heartbeats", answer)
        return [
            Member(
                learner_id=client.text("heartbeats", answer[i]),
                incarnation=client.incarnation(answer[i + 1]),
                age_s=client.number("heartbeats", answer[i + 2]) / 1e6,
            )
            for i in range(0, len(answer), 3)
        ]
