"""The lease of leadership in Redis (design section 6)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Final

from decoupled_diloco.claims import Claim
from synchronizer_server.membership import lease_scripts
from synchronizer_server.membership.lease_base import LeaseView
from synchronizer_server.membership.redis_client import MAX_EXACT, RedisClient, Script

_SIGNATURE: Final = re.compile(r"(?:[0-9a-f]{2}){0,64}")
_NUM_HELD: Final = 6
_MAX_TEXT: Final = 1000
"""Longest leader id and address that are believed."""


class RedisLease:
    """A ``LeaseKeeper`` in Redis; leases run out by Redis' own clock.

    Args:
        client: connections to Redis, shared with whatever else of this process uses them; closed
            by ``aclose``.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._keys = [client.key(name) for name in ("lease", "term", "in_sync", "in_sync_revision")]
        self._read = client.script(lease_scripts.READ)
        self._acquire = client.script(lease_scripts.ACQUIRE)
        self._renew = client.script(lease_scripts.RENEW)
        self._set_in_sync = client.script(lease_scripts.SET_IN_SYNC)
        self._release = client.script(lease_scripts.RELEASE)

    async def read(self) -> LeaseView:
        """See ``LeaseKeeper.read``."""
        return self._view(await self._read(self._keys, []))

    async def acquire(
        self, claim: Claim, *, address: str, timeout_s: float, standby_id: str
    ) -> LeaseView:
        """See ``LeaseKeeper.acquire``."""
        args = [*self._claimed(claim), address, _milliseconds(timeout_s), standby_id]
        return self._view(await self._acquire(self._keys, args))

    async def renew(
        self, claim: Claim, *, address: str, timeout_s: float, in_sync: Collection[str],
        revision: int,
    ) -> LeaseView:  # fmt: skip
        """See ``LeaseKeeper.renew``."""
        assert 0 <= revision <= MAX_EXACT, f"revision {revision}"
        args = [*self._claimed(claim), address, _milliseconds(timeout_s)]
        args += [_listed(in_sync), revision]
        return self._view(await self._renew(self._keys, args))

    async def set_in_sync(
        self, claim: Claim, standby_ids: Collection[str], *, revision: int
    ) -> bool:
        """See ``LeaseKeeper.set_in_sync``."""
        assert 1 <= revision <= MAX_EXACT, f"revision {revision}"
        return await self._told(self._set_in_sync, claim, _listed(standby_ids), revision) == 1

    async def release(self, claim: Claim, *, forget: bool = False) -> None:
        """See ``LeaseKeeper.release``."""
        await self._told(self._release, claim, "forget" if forget else "", 0)

    async def aclose(self) -> None:
        """See ``LeaseKeeper.aclose``."""
        await self._client.aclose()

    async def _told(self, script: Script, claim: Claim, ids: str, revision: int) -> object:
        """What a script answers that neither takes nor prolongs the lease."""
        return await script(self._keys, [*self._claimed(claim), "", 0, ids, revision])

    def _claimed(self, claim: Claim) -> list[str | int]:
        assert claim.run_id == self._client.run_id, "a lease serves one run"
        assert 1 <= claim.term <= MAX_EXACT, f"term {claim.term}"
        assert 0 < len(claim.leader_id) <= _MAX_TEXT, "a leader has an id"
        return [claim.run_id, claim.term, claim.leader_id, claim.signature.hex()]

    def _view(self, answer: object) -> LeaseView:
        client = self._client
        if not isinstance(answer, list) or len(answer) != 3:
            raise client.malformed("lease", answer)
        held, term, in_sync = answer
        holder, address, remaining_s = (None, "", 0.0) if held is None else self._holder(held)
        known = 0 if term is None else client.term("term", term)
        ids = self._ids(in_sync)
        if in_sync is None and (holder is not None or known):
            ids = frozenset()  # nobody may rely on what is lost
        return LeaseView(
            holder=holder, address=address, remaining_s=remaining_s, term=known, in_sync=ids
        )

    def _holder(self, held: object) -> tuple[Claim, str, float]:
        client = self._client
        if not isinstance(held, list) or len(held) != _NUM_HELD or not isinstance(held[5], int):
            raise client.malformed("lease", held)
        run_id, leader_id, signature, address = (
            client.text("lease", held[i]) for i in (0, 2, 3, 4)
        )
        is_ours = run_id == client.run_id and leader_id and _SIGNATURE.fullmatch(signature)
        if not is_ours or max(len(leader_id), len(address)) > _MAX_TEXT:
            raise client.malformed("lease", held)
        claim = Claim(
            run_id=run_id,
            term=client.term("lease", held[1]),
            leader_id=leader_id,
            signature=bytes.fromhex(signature),
        )
        return claim, address, held[5] / 1e3

    def _ids(self, value: object) -> frozenset[str] | None:
        if value is None:
            return None
        text = self._client.text("in_sync", value)
        if text == lease_scripts.FORGOTTEN:
            return None
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError):
            raise self._client.malformed("in_sync", text) from None
        if not isinstance(ids, list) or not all(isinstance(x, str) for x in ids):
            raise self._client.malformed("in_sync", text)
        return frozenset(ids)


def _milliseconds(timeout_s: float) -> int:
    assert timeout_s > 0, f"a lease of {timeout_s} s"
    return max(1, round(timeout_s * 1e3))


def _listed(ids: Collection[str]) -> str:
    # Redis compares the ids as they come; no escapes, so that both sides read the same bytes
    return json.dumps(sorted(set(ids)), ensure_ascii=False)
