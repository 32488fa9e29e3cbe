"""A synchronizer process: wiring, health, signals; what it does is decided by its node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from pathlib import Path
from typing import Final

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from decoupled_diloco.channel import (
    Address,
    add_port,
    parse_address,
    require_secure,
    server_options,
    tune_allocator,
)
from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import EXIT_DRAINED, EXIT_OK, Reason, UsageError
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import admin_pb2_grpc, replication_pb2_grpc, synchronizer_pb2_grpc
from synchronizer_server.assembly import Outside
from synchronizer_server.election import Election
from synchronizer_server.http.facts import Sources
from synchronizer_server.http.history import History
from synchronizer_server.http.listener import StatusPage
from synchronizer_server.leadership import Bidder, Leadership
from synchronizer_server.membership import (
    LeaseKeeper,
    Membership,
    MemoryMembership,
    RedisClient,
    RedisLease,
    RedisMembership,
)
from synchronizer_server.metrics import Metrics, Source, source_of
from synchronizer_server.node import Node
from synchronizer_server.peers import PeerAsker
from synchronizer_server.runner import ThreadRunner
from synchronizer_server.service.decoding import INTERCEPTORS
from synchronizer_server.service.replicate import ReplicationService
from synchronizer_server.service.switchboard import (
    Switchboard,
    SwitchedAdmin,
    SwitchedSynchronizer,
)
from synchronizer_server.settings import ServerSettings
from synchronizer_server.store.disk import DiskStore
from synchronizer_server.store.identity import StoreIdentity

logger = logging.getLogger(__name__)

SERVICES: Final = (
    "decoupled_diloco.v1.SynchronizerService",
    "decoupled_diloco.v1.AdminService",
    "decoupled_diloco.v1.ReplicationService",
    "",
)
STOP_GRACE_S: Final = 1.0
_MIN_KEY_BYTES: Final = 16


class Server:
    """One synchronizer process.

    Args:
        run: settings of the run.
        settings: settings of this process.
    """

    def __init__(self, run: RunSettings, settings: ServerSettings) -> None:
        self._run = run
        self._settings = settings
        self._health = health.aio.HealthServicer()
        self._stopping = asyncio.Event()
        self._replication_runner = ThreadRunner("replication")
        self._history = History()
        self._redis: RedisClient | None = None

    async def serve(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit code.

        Raises:
            DilocoError: why it cannot start or go on.
        """
        settings = self._settings
        require_secure(settings.address, insecure=settings.insecure)
        if settings.http_address is not None:
            require_secure(settings.http_address, insecure=settings.insecure)
        tune_allocator()
        torch.set_num_threads(settings.threads)
        membership, keeper = self._keepers()
        store = DiskStore(
            settings.store,
            self._run.run_id,
            durability=settings.durability,  # type: ignore[arg-type]
            snapshots=settings.snapshots,
        )
        outside = Outside(
            store=store,
            membership=membership,
            tensors_runner=ThreadRunner("tensors"),
            store_runner=ThreadRunner("store"),
            clock=time.monotonic,
            journal_path=settings.journal,
            on_event=None if settings.http_address is None else self._history.take,
        )
        try:
            election = None if keeper is None else self._election(keeper)
            return await self._serve(outside, election)
        finally:
            outside.tensors_runner.close()
            outside.store_runner.close()
            self._replication_runner.close()
            store.close()
            await membership.aclose()

    def _keepers(self) -> tuple[Membership, LeaseKeeper | None]:
        """Membership and lease; nobody else can lead where no peer is configured."""
        settings = self._settings
        if settings.redis is None:
            if settings.peers:
                raise UsageError(
                    Reason.CONFIG_CONFLICT,
                    "peers are given but no redis: who leads is decided there; give --redis",
                )
            return MemoryMembership(), None
        timeout_s = min(2.0, self._run.lease_timeout_s / 2)
        client = RedisClient(settings.redis, self._run.run_id, timeout_s=timeout_s)
        self._redis = client
        return RedisMembership(client), RedisLease(client) if settings.peers else None

    def _election(self, keeper: LeaseKeeper) -> Election:
        settings = self._settings
        peers = settings.peer_addresses
        identity = StoreIdentity(settings.store)
        bidder = Bidder(
            run_id=self._run.run_id,
            leader_id=secrets.token_hex(8),
            store_id=identity.store_id,
            address=settings.advertise or settings.address,
            key=read_key(settings.key_file),
            timeout_s=self._run.lease_timeout_s,
            num_peers=len(peers),
        )

        def heard(claim: Claim, address: str) -> bool:
            return leadership.heard(claim, address)

        asker = PeerAsker(
            peers,
            run_id=bidder.run_id,
            key=bidder.key,
            heard=heard,
            insecure=settings.insecure,
        )
        leadership = Leadership(bidder, keeper=keeper, ask_peers=asker.ask, clock=time.monotonic)
        return Election(
            leadership=leadership,
            keeper=keeper,
            identity=identity,
            key=bidder.key,
            address=bidder.address,
            peers=peers,
            runner=self._replication_runner,
        )

    async def _serve(self, outside: Outside, election: Election | None) -> int:
        board = Switchboard()
        node = Node(self._run, self._settings, outside, board, election)
        servers, port = self._servers(board)
        page = self._page(source_of(node, board, election, self._run.run_id), election, port)

        async def serve() -> None:
            for server in servers:
                await server.start()
            if page is not None:
                await page.start()
            await self._set_health(serving=True)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        ending = asyncio.ensure_future(self._ending())
        try:
            await node.run(self._stopping, serve)
        finally:
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ending
            for server in servers:
                await server.stop(STOP_GRACE_S)
            if page is not None:
                await page.stop()
        return EXIT_OK if node.finished else EXIT_DRAINED

    async def _ending(self) -> None:
        """Whoever asks for health hears of the end before the rounds in flight are finished."""
        await self._stopping.wait()
        await self._set_health(serving=False)

    def _servers(self, board: Switchboard) -> tuple[list[grpc.aio.Server], int]:
        """The gRPC servers, and the port of the first."""
        server = grpc.aio.server(options=server_options(), interceptors=INTERCEPTORS)
        synchronizer_pb2_grpc.add_SynchronizerServiceServicer_to_server(
            SwitchedSynchronizer(board), server
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(SwitchedAdmin(board), server)
        replication_pb2_grpc.add_ReplicationServiceServicer_to_server(
            ReplicationService(lambda: board.replication, board.no_replication), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = add_port(server, self._settings.address, insecure=self._settings.insecure)
        logger.info("serves run %s on port %d", self._run.run_id, port)
        if self._settings.health_address is None:
            return [server], port
        plain = grpc.aio.server(options=server_options())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, plain)
        add_port(plain, self._settings.health_address, insecure=True)
        return [server, plain], port

    def _page(self, source: Source, election: Election | None, port: int) -> StatusPage | None:
        settings = self._settings
        if settings.http_address is None:
            return None
        host = parse_address(settings.address).host
        sources = Sources(
            source=source,
            metrics=Metrics(source).look,
            history=self._history,
            address=settings.advertise or str(Address(host, port)),
            peers=settings.peer_addresses,
            store=settings.store,
            durability=settings.durability,
            redis=self._redis,
            leadership=None if election is None else election.leadership,
        )
        return StatusPage(
            settings.http_address,
            sources,
            is_serving=lambda: not self._stopping.is_set(),
            insecure=settings.insecure,
        )

    async def _set_health(self, *, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if serving else response.NOT_SERVING
        for name in SERVICES:
            await self._health.set(name, status)


def read_key(path: Path | None) -> bytes:
    """The secret that signs claims of leadership.

    Raises:
        UsageError: CONFIG_CONFLICT where there is none, CONFIG_INVALID for one too short.
    """
    if path is None:
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            "peers are given but no key_file: claims of leadership must be signed; give every "
            "synchronizer of the run the same file with a secret, such as `openssl rand -hex 32`",
        )
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(
            Reason.CONFIG_INVALID, f"key_file {path} cannot be read: {error.strerror}"
        ) from error
    if len(key) < _MIN_KEY_BYTES:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"key_file {path} holds {len(key)} bytes; give a secret of {_MIN_KEY_BYTES} at least",
        )
    return key
