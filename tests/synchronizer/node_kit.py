"""Synchronizer processes without ports, on one keeper of the lease."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from synchronizer_server.assembly import Outside
from synchronizer_server.election import Election
from synchronizer_server.http.history import History
from synchronizer_server.leadership import Bidder, Leadership
from synchronizer_server.membership import MemoryLease, MemoryLeaseServer, MemoryMembership
from synchronizer_server.node import Node
from synchronizer_server.runner import InlineRunner
from synchronizer_server.service.switchboard import Switchboard
from synchronizer_server.settings import ServerSettings
from synchronizer_server.store.identity import StoreIdentity
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import make_settings

KEY = b"a key of sixteen bytes"
NOBODY = "127.0.0.1:9"


class Process:
    """One synchronizer process without ports."""

    def __init__(
        self, path: Path, server: MemoryLeaseServer, lease: MemoryLease, store: MemoryStore
    ) -> None:
        run = make_settings(lease_timeout_s=0.4, replication="one")
        self.identity = StoreIdentity(path)
        self.history = History()
        runner = InlineRunner()
        bidder = Bidder(
            run_id=run.run_id, leader_id=path.name, store_id=self.identity.store_id,
            address=NOBODY, key=KEY, timeout_s=run.lease_timeout_s, num_peers=1,
        )  # fmt: skip
        self.leadership = Leadership(
            bidder, keeper=lease, ask_peers=self.ask_peers, clock=time.monotonic
        )
        self.election = Election(
            leadership=self.leadership, keeper=lease, identity=self.identity, address=NOBODY,
            peers=(NOBODY,), runner=runner, key=KEY,
        )  # fmt: skip
        outside = Outside(
            store=store, membership=MemoryMembership(server=server), tensors_runner=runner,
            store_runner=runner, clock=time.monotonic, on_event=self.history.take,
        )  # fmt: skip
        self.board = Switchboard()
        self.node = Node(
            run, ServerSettings(store=path, drain_s=0.1), outside, self.board, self.election
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


@contextlib.asynccontextmanager
async def keeping(path: Path) -> AsyncIterator[Keeper]:
    """A keeper, and at the end nobody who is still at work."""
    made = Keeper(path)
    try:
        yield made
    finally:
        for process in made.processes:
            process.stopping.set()
        for task in made.tasks:
            with contextlib.suppress(asyncio.CancelledError):
                async with asyncio.timeout(30):
                    await task
