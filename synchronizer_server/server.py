"""A synchronizer process: wiring, heartbeats to the membership, health, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from decoupled_diloco.channel import add_port, require_secure, server_options, tune_allocator
from decoupled_diloco.errors import EXIT_DRAINED, EXIT_OK, DilocoError
from decoupled_diloco.logs import ChangeLogger
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import admin_pb2_grpc, synchronizer_pb2_grpc
from synchronizer_server.assembly import Assembled, Outside, assemble
from synchronizer_server.core import events as ev
from synchronizer_server.membership.base import Membership
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.membership.redis import RedisMembership
from synchronizer_server.membership.redis_client import RedisClient
from synchronizer_server.runner import ThreadRunner
from synchronizer_server.service.admin import AdminService
from synchronizer_server.service.synchronizer import SynchronizerService
from synchronizer_server.settings import ServerSettings
from synchronizer_server.store.disk import DiskStore

logger = logging.getLogger(__name__)

SERVICES = (
    "decoupled_diloco.v1.SynchronizerService",
    "decoupled_diloco.v1.AdminService",
    "",
)
STOP_GRACE_S = 1.0


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

    async def serve(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit code.

        Raises:
            DilocoError: why it cannot start or go on.
        """
        settings = self._settings
        require_secure(settings.address, insecure=settings.insecure)
        tune_allocator()
        torch.set_num_threads(settings.threads)
        membership = self._membership()
        store = DiskStore(settings.store, self._run.run_id, durability=settings.durability)  # type: ignore[arg-type]
        outside = Outside(
            store=store,
            membership=membership,
            tensors_runner=ThreadRunner("tensors"),
            store_runner=ThreadRunner("store"),
            clock=time.monotonic,
            journal_path=settings.journal,
        )
        try:
            assembled = await assemble(
                self._run, outside, max_staged_bytes=settings.max_staged_mb << 20
            )
            return await self._run_until_stopped(assembled, membership)
        finally:
            outside.tensors_runner.close()
            outside.store_runner.close()
            store.close()
            await membership.aclose()

    def _membership(self) -> Membership:
        if self._settings.redis is None:
            return MemoryMembership()
        return RedisMembership(RedisClient(self._settings.redis, self._run.run_id))

    async def _run_until_stopped(self, assembled: Assembled, membership: Membership) -> int:
        engine = assembled.engine
        servers = self._servers(assembled)
        for server in servers:
            await server.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        engine.spawn(engine.run_timer())
        engine.spawn(self._heartbeat(assembled, membership))
        await self._set_health(serving=True)
        engine.handle(ev.Tick())
        waiting = [asyncio.ensure_future(e.wait()) for e in (self._stopping, engine.fatal)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        code = await self._drain(assembled, servers)
        if engine.failure is not None:
            raise engine.failure
        return code

    def _servers(self, assembled: Assembled) -> list[grpc.aio.Server]:
        server = grpc.aio.server(options=server_options())
        synchronizer = SynchronizerService(assembled.engine, assembled.joins)
        admin = AdminService(assembled.engine, assembled.joins)
        synchronizer_pb2_grpc.add_SynchronizerServiceServicer_to_server(synchronizer, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = add_port(server, self._settings.address, insecure=self._settings.insecure)
        logger.info("serves run %s on port %d", self._run.run_id, port)
        if self._settings.health_address is None:
            return [server]
        plain = grpc.aio.server(options=server_options())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, plain)
        add_port(plain, self._settings.health_address, insecure=True)
        return [server, plain]

    async def _set_health(self, *, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if serving else response.NOT_SERVING
        for name in SERVICES:
            await self._health.set(name, status)

    async def _heartbeat(self, assembled: Assembled, membership: Membership) -> None:
        """Heartbeats for the learners that are live, in one batch; nothing waits for it.

        The mark of a seeded run goes along, so that a keeper that was emptied knows it again.
        """
        changes = ChangeLogger(logger)
        engine = assembled.engine
        while True:
            await asyncio.sleep(self._run.heartbeat_interval_s)
            try:
                state = engine.core.state
                await membership.heartbeat(engine.live_incarnations(), state.term)
                if state.seeded:
                    await membership.mark_seeded(state.term)
            except DilocoError as error:
                changes.log("membership", str(error.reason), error.message, level=logging.WARNING)
            else:
                if changes.reason("membership") is not None:
                    changes.log("membership", "reachable")

    async def _drain(self, assembled: Assembled, servers: list[grpc.aio.Server]) -> int:
        """Finishes the rounds in flight, then stops; learners train on meanwhile."""
        engine = assembled.engine
        await self._set_health(serving=False)
        finished = engine.complete.is_set()
        if engine.failure is None:
            engine.handle(ev.DrainStarted())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.complete.wait(), self._settings.drain_s)
        engine.parts.journal.write("stop", global_step=engine.core.state.committed)
        await engine.close()
        for server in servers:
            await server.stop(STOP_GRACE_S)
        engine.parts.journal.close()
        logger.info("stopped at global step %d", engine.core.state.committed)
        return EXIT_OK if finished else EXIT_DRAINED
