"""A scripted synchronizer behind a real port of the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import grpc.aio
from scripted_synchronizer import ScriptedSynchronizer, until

from decoupled_diloco.channel import add_port, server_options
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import admin_pb2_grpc, synchronizer_pb2_grpc


class Served:
    """A scripted synchronizer behind a real port, in a thread of its own."""

    def __init__(self, service: ScriptedSynchronizer) -> None:
        self.service = service
        self.address = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)

    def do(self, action) -> None:
        """Does something in the server's loop, and waits for it."""

        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(20)

    def wait(self, condition) -> None:
        asyncio.run(until(condition))

    def away(self) -> None:
        """Stops the server; its port is refused from then on."""
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self.loop).result(20)

    def back(self) -> None:
        """Starts a server on the same port."""
        asyncio.run_coroutine_threadsafe(self._start(self.address), self.loop).result(20)

    async def _start(self, address: str) -> None:
        self._server = grpc.aio.server(options=server_options())
        synchronizer_pb2_grpc.add_SynchronizerServiceServicer_to_server(self.service, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.service, self._server)
        port = add_port(self._server, address)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        await self._start("127.0.0.1:0")
        self._ready.set()
        await self._ended.wait()
        await self._server.stop(0)


@contextlib.contextmanager
def served(**settings) -> Iterator[Served]:
    defaults = {"num_fragments": 3, "overlap": 1, "codec_up": "fp32"}
    running = Served(ScriptedSynchronizer(RunSettings(**(defaults | settings))))
    running.start()
    try:
        yield running
    finally:
        running.stop()
