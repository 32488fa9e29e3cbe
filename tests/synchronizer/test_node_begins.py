"""Synchronizer processes that win the lease: what they tell the keeper, and whom, and when."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.assembly import Outside
from synchronizer_server.election import Election
from synchronizer_server.leadership import Bidder, Leadership
from synchronizer_server.membership import MemoryLease, MemoryLeaseServer, MemoryMembership
from synchronizer_server.node import Node
from synchronizer_server.runner import InlineRunner
from synchronizer_server.service.switchboard import Switchboard
from synchronizer_server.settings import ServerSettings
from synchronizer_server.store.identity import StoreIdentity
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import make_settings, until

KEY = b"a key of sixteen bytes"
NOBODY = "127.0.0.1:9"


class FullDisk(MemoryStore):
    """No term can be begun while it is full."""

    full = True

    def begin_term(self, term: int, record: object = None) -> None:
        if self.full:
            raise DilocoError(Reason.DISK_FULL, "no room for the first record of the term")
        super().begin_term(term, record)  # type: ignore[arg-type]


class DeafLease(MemoryLease):
    """A keeper that does not answer who says which stores are in sync."""

    deaf = True

    async def set_in_sync(self, *args: object, **kwargs: object) -> bool:
        if self.deaf:
            raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "the keeper does not answer")
        return await super().set_in_sync(*args, **kwargs)  # type: ignore[arg-type]

    async def renew(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        if self.deaf == "altogether":
            raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "the keeper does not answer")
        return await super().renew(*args, **kwargs)  # type: ignore[arg-type]


class Process:
    """One synchronizer process without ports."""

    def __init__(
        self, path: Path, server: MemoryLeaseServer, lease: MemoryLease, store: MemoryStore
    ) -> None:
        run = make_settings(lease_timeout_s=0.4, replication="one")
        self.identity = StoreIdentity(path)
        runner = InlineRunner()
        bidder = Bidder(
            run_id=run.run_id, leader_id=path.name, store_id=self.identity.store_id,
            address=NOBODY, key=KEY, timeout_s=run.lease_timeout_s, num_peers=1,
        )  # fmt: skip
        self.leadership = Leadership(
            bidder, keeper=lease, ask_peers=self.ask_peers, clock=time.monotonic
        )
        election = Election(
            leadership=self.leadership, keeper=lease, identity=self.identity, address=NOBODY,
            peers=(NOBODY,), runner=runner, key=KEY,
        )  # fmt: skip
        outside = Outside(
            store=store, membership=MemoryMembership(server=server), tensors_runner=runner,
            store_runner=runner, clock=time.monotonic,
        )  # fmt: skip
        self.board = Switchboard()
        self.node = Node(
            run, ServerSettings(store=path, drain_s=0.1), outside, self.board, election
        )
        self.stopping = asyncio.Event()

    async def ask_peers(self) -> tuple[()]:
        return ()

    async def run(self) -> None:
        async def serve() -> None:
            """No ports are opened."""

        await self.node.run(self.stopping, serve)

    @property
    def leads(self) -> bool:
        return self.board.synchronizer is not None

    @property
    def waits(self) -> tuple[str, str]:
        (wait,) = self.board.follower_status().waits
        return wait.reason, wait.detail


class Keeper:
    """A keeper that knows the run and names two stores, and who runs beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = MemoryLeaseServer()
        self.tasks: list[asyncio.Task[None]] = []
        self.processes: list[Process] = []

    def process(self, name: str, *, lease: type[MemoryLease] = MemoryLease,
                store: MemoryStore | None = None) -> tuple[Process, MemoryLease]:  # fmt: skip
        keeper = lease(self.server)
        made = Process(self.path / name, self.server, keeper, store or MemoryStore())
        self.processes.append(made)
        return made, keeper

    def start(self, process: Process) -> None:
        self.tasks.append(asyncio.ensure_future(process.run()))

    def names(self, *processes: Process) -> None:
        self.server.term, self.server.in_sync_revision = 4, 17
        self.server.in_sync = frozenset(x.identity.store_id for x in processes)


@pytest_asyncio.fixture
async def keeper(tmp_path: Path) -> AsyncIterator[Keeper]:
    made = Keeper(tmp_path)
    yield made
    for process in made.processes:
        process.stopping.set()
    for task in made.tasks:
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(30):
                await task


pytestmark = pytest.mark.asyncio


async def test_who_has_no_room_to_begin_gives_the_lease_back_and_another_one_leads(
    keeper: Keeper,
) -> None:
    store = FullDisk()
    full, _ = keeper.process("full", store=store)
    other, _ = keeper.process("other")
    keeper.names(full, other)
    keeper.start(full)
    await until(lambda: "lets another store in sync lead: DISK_FULL" in full.waits[1])
    assert keeper.server.in_sync == {full.identity.store_id, other.identity.store_id}
    assert keeper.server.lease is None
    keeper.start(other)
    await until(lambda: other.leads)
    assert keeper.server.in_sync == {other.identity.store_id}
    assert not full.leads


async def test_who_alone_is_in_sync_begins_as_soon_as_there_is_room(keeper: Keeper) -> None:
    store = FullDisk()
    alone, _ = keeper.process("alone", store=store)
    keeper.names(alone)
    keeper.start(alone)
    await until(lambda: keeper.server.term > 4)
    store.full = False
    await until(lambda: alone.leads)
    assert keeper.server.in_sync == {alone.identity.store_id}


async def test_a_term_is_served_once_the_keeper_was_told_and_the_wait_says_so(
    keeper: Keeper,
) -> None:
    waiting, lease = keeper.process("waiting", lease=DeafLease)
    other, _ = keeper.process("other")
    keeper.names(waiting, other)
    keeper.start(waiting)
    await until(
        lambda: waiting.waits[0] == "beginning" and "confirms who is in sync" in waiting.waits[1]
    )
    assert not waiting.leads
    assert keeper.server.in_sync == {waiting.identity.store_id, other.identity.store_id}
    lease.deaf = False  # type: ignore[attr-defined]
    await until(lambda: waiting.leads)
    assert keeper.server.in_sync == {waiting.identity.store_id}


async def test_a_process_that_loses_the_keeper_before_it_has_begun_makes_way(
    keeper: Keeper,
) -> None:
    cut_off, lease = keeper.process("cut-off", lease=DeafLease)
    lease.deaf = "altogether"  # type: ignore[attr-defined]
    other, _ = keeper.process("other")
    keeper.names(cut_off, other)
    keeper.start(cut_off)
    await until(lambda: keeper.server.term > 4)
    keeper.start(other)
    await until(lambda: other.leads)
    assert not cut_off.leads
    assert keeper.server.in_sync == {other.identity.store_id}
