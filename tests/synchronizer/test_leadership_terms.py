"""What a process knew as the leader of one term does not reach into the next."""

from __future__ import annotations

import asyncio

import pytest

from synchronizer_server.core.lease import Role
from synchronizer_server.leadership import Bidder, Leadership
from synchronizer_server.membership import MemoryLease, MemoryLeaseServer
from synchronizer_server.membership.lease_base import LeaseView
from tests.synchronizer.fake_learner import until

KEY = b"a key of sixteen bytes"
TIMEOUT_S = 0.2


async def nobody() -> tuple[()]:
    return ()


def contender(server: MemoryLeaseServer) -> Leadership:
    bidder = Bidder(
        run_id="run", leader_id="a", store_id="store-a", address="a:1", key=KEY,
        timeout_s=TIMEOUT_S, num_peers=0,
    )  # fmt: skip
    return Leadership(bidder, keeper=MemoryLease(server), ask_peers=nobody, clock=server.clock)


@pytest.mark.asyncio
async def test_standbys_of_an_earlier_term_are_not_told_to_a_keeper_that_was_emptied() -> None:
    """A renewal of the next term, before its replication begins, names our own store alone."""
    server = MemoryLeaseServer()
    leadership = contender(server)
    views: list[LeaseView | None] = []
    ticking = asyncio.ensure_future(leadership.run())
    await leadership.until(Role.LEADING)
    leadership.in_sync = lambda: {"store-b"}
    leadership.revision = lambda: 7
    leadership.on_lease = views.append
    await until(lambda: views)
    await leadership.give_up("a test")
    views.clear()
    await leadership.until(Role.LEADING)
    server.empty()
    await until(lambda: server.lease is not None)
    assert leadership.core.role is Role.LEADING
    assert (server.in_sync, server.in_sync_revision) == (frozenset({"store-a"}), 0)
    assert views == []
    ticking.cancel()
