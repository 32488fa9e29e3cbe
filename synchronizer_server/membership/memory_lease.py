"""The lease of leadership in memory: for synchronizers that share a process, as in simulation."""

from __future__ import annotations

from collections.abc import Collection

from decoupled_diloco.claims import Claim
from synchronizer_server.membership.lease_base import LeaseView
from synchronizer_server.membership.memory_server import HeldLease, MemoryLeaseServer, MemoryUser


class MemoryLease(MemoryUser):
    """A ``LeaseKeeper`` in memory; one per contender, all on one server."""

    async def read(self) -> LeaseView:
        """See ``LeaseKeeper.read``."""
        with self._asking() as server:
            return _view(server)

    async def acquire(
        self, claim: Claim, *, address: str, timeout_s: float, standby_id: str
    ) -> LeaseView:
        """See ``LeaseKeeper.acquire``."""
        with self._asking() as server:
            held = server.held()
            if held is not None and held.claim == claim and server.term <= claim.term:
                _take(server, claim, address, timeout_s)
            elif held is None and server.term < claim.term and _may_follow(server, standby_id):
                _take(server, claim, address, timeout_s)
                named = (standby_id,) if server.in_sync is None else server.in_sync
                _write(server, claim, named, 0)
            return _view(server)

    async def renew(
        self, claim: Claim, *, address: str, timeout_s: float, in_sync: Collection[str],
        revision: int,
    ) -> LeaseView:  # fmt: skip
        """See ``LeaseKeeper.renew``."""
        with self._asking() as server:
            if _is_free_for(server, claim) and server.term <= claim.term:
                _take(server, claim, address, timeout_s)
                if server.term < claim.term:
                    _write(server, claim, in_sync, revision)
            return _view(server)

    async def set_in_sync(
        self, claim: Claim, standby_ids: Collection[str], *, revision: int
    ) -> bool:
        """See ``LeaseKeeper.set_in_sync``."""
        with self._asking() as server:
            is_new = server.in_sync is None and server.term < claim.term
            if not _is_free_for(server, claim) or (not is_new and server.term != claim.term):
                return False
            if server.in_sync_revision > revision:
                return False
            _write(server, claim, standby_ids, revision)
            return True

    async def release(self, claim: Claim, *, forget: bool = False) -> None:
        """See ``LeaseKeeper.release``."""
        with self._asking() as server:
            held = server.held()
            is_ours = held is not None and held.claim == claim
            is_last = held is None and server.term == claim.term
            if is_ours:
                server.lease = None
            if forget and (is_ours or is_last):
                server.term, server.in_sync, server.in_sync_revision = claim.term + 1, None, 0

    async def aclose(self) -> None:
        """See ``LeaseKeeper.aclose``."""


def _take(server: MemoryLeaseServer, claim: Claim, address: str, timeout_s: float) -> None:
    server.lease = HeldLease(claim=claim, address=address, ends_at=server.clock() + timeout_s)


def _write(
    server: MemoryLeaseServer, claim: Claim, in_sync: Collection[str], revision: int
) -> None:
    server.term, server.in_sync = claim.term, frozenset(in_sync)
    server.in_sync_revision = revision


def _is_free_for(server: MemoryLeaseServer, claim: Claim) -> bool:
    held = server.held()
    return held is None or held.claim == claim


def _may_follow(server: MemoryLeaseServer, standby_id: str) -> bool:
    return server.in_sync is None or standby_id in server.in_sync


def _view(server: MemoryLeaseServer) -> LeaseView:
    held = server.held()
    return LeaseView(
        holder=None if held is None else held.claim,
        address="" if held is None else held.address,
        remaining_s=0.0 if held is None else held.ends_at - server.clock(),
        term=server.term,
        in_sync=server.in_sync,
    )
