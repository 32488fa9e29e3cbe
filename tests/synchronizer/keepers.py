"""One keeper of membership and lease for tests, in memory or in a real Redis, with many users."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import redis as redis_client

from decoupled_diloco.claims import Claim
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import (
    LeaseKeeper,
    LeaseView,
    Membership,
    MemoryLease,
    MemoryLeaseServer,
    MemoryMembership,
    RedisClient,
    RedisLease,
    RedisMembership,
)
from tests.synchronizer.redis_server import RedisServer

RUNS = itertools.count()
LONG_S = 3600.0


@dataclass
class MemoryKeeper:
    """A keeper in memory."""

    run_id: str = "run"
    server: MemoryLeaseServer = field(default_factory=MemoryLeaseServer)

    def membership(self) -> Membership:
        return MemoryMembership(server=self.server)

    def lease(self) -> LeaseKeeper:
        return MemoryLease(self.server)

    def empty(self) -> None:
        self.server.empty()

    def run_out(self) -> None:
        """The lease ends now, as if its time had passed."""
        self.server.lease = None

    async def aclose(self) -> None:
        pass


@dataclass
class RedisKeeper:
    """A run of its own in a Redis server; every user has connections of its own."""

    address: str
    timeout_s: float = 10.0
    run_id: str = field(default_factory=lambda: f"run-{next(RUNS)}")
    clients: list[RedisClient] = field(default_factory=list)

    def client(self) -> RedisClient:
        made = RedisClient(self.address, self.run_id, timeout_s=self.timeout_s)
        self.clients.append(made)
        return made

    def membership(self) -> RedisMembership:
        return RedisMembership(self.client())

    def lease(self) -> RedisLease:
        return RedisLease(self.client())

    @contextlib.contextmanager
    def raw(self):
        host, port = self.address.split(":")
        with redis_client.Redis(host=host, port=int(port)) as made:
            yield made

    def key(self, name: str) -> str:
        return f"diloco:{{{self.run_id}}}:g0:{name}"

    def empty(self) -> None:
        with self.raw() as raw:
            for key in raw.keys(self.key("*")):
                raw.delete(key)

    def run_out(self) -> None:
        with self.raw() as raw:
            raw.delete(self.key("lease"))

    async def aclose(self) -> None:
        for client in self.clients:
            await client.aclose()


Keeper = MemoryKeeper | RedisKeeper


@contextlib.asynccontextmanager
async def keeper_in(server: RedisServer | None) -> AsyncIterator[Keeper]:
    """A keeper in that server; in memory without one."""
    made: Keeper = MemoryKeeper() if server is None else RedisKeeper(server.address)
    try:
        yield made
    finally:
        await made.aclose()


def claim_of(keeper: Keeper, term: int, leader_id: str = "a") -> Claim:
    return Claim(run_id=keeper.run_id, term=term, leader_id=leader_id).signed_with(b"key")


async def take(
    lease: LeaseKeeper, claim: Claim, *, timeout_s: float = LONG_S, standby_id: str = ""
) -> LeaseView:
    """Bids under the leader's own id as a standby."""
    return await lease.acquire(
        claim,
        address=f"{claim.leader_id}:1",
        timeout_s=timeout_s,
        standby_id=standby_id or claim.leader_id,
    )


async def prolong(
    lease: LeaseKeeper, claim: Claim, *, timeout_s: float = LONG_S, in_sync: tuple[str, ...] = (),
    revision: int = 0,
) -> LeaseView:  # fmt: skip
    return await lease.renew(
        claim,
        address=f"{claim.leader_id}:1",
        timeout_s=timeout_s,
        in_sync=in_sync,
        revision=revision,
    )


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - the other side has no event to wait for
            await asyncio.sleep(0.005)


@dataclass
class Process:
    """What one synchronizer process has of Redis: one client, membership and lease on it."""

    client: RedisClient
    membership: RedisMembership
    lease: RedisLease

    def claim(self, term: int = 1, leader_id: str = "a") -> Claim:
        return Claim(run_id=self.client.run_id, term=term, leader_id=leader_id).signed_with(b"key")


@contextlib.asynccontextmanager
async def process_at(
    address: str, run_id: str | None = None, timeout_s: float = 10.0
) -> AsyncIterator[Process]:
    client = RedisClient(address, run_id or f"run-{next(RUNS)}", timeout_s=timeout_s)
    made = Process(client, RedisMembership(client), RedisLease(client))
    try:
        yield made
    finally:
        await made.membership.aclose()
        await made.lease.aclose()


ONE = Incarnation(1, 1)
MEMBERSHIP_CALLS: dict[str, Callable[[Process], Awaitable[object]]] = {
    "grant_incarnation": lambda p: p.membership.grant_incarnation("a", ONE),
    "heartbeat": lambda p: p.membership.heartbeat({"a": ONE}, 1),
    "members": lambda p: p.membership.members(),
    "expire": lambda p: p.membership.expire(1.0, 1),
    "remove": lambda p: p.membership.remove("a", ONE, 1),
    "set_quorum": lambda p: p.membership.set_quorum(2, 1),
    "mark_seeded": lambda p: p.membership.mark_seeded(1),
    "is_seeded": lambda p: p.membership.is_seeded(),
    "read_back": lambda p: p.membership.read_back(),
}
LEASE_CALLS: dict[str, Callable[[Process], Awaitable[object]]] = {
    "read": lambda p: p.lease.read(),
    "acquire": lambda p: take(p.lease, p.claim()),
    "renew": lambda p: prolong(p.lease, p.claim()),
    "set_in_sync": lambda p: p.lease.set_in_sync(p.claim(), ["b"], revision=1),
    "release": lambda p: p.lease.release(p.claim()),
}
CALLS = MEMBERSHIP_CALLS | LEASE_CALLS
