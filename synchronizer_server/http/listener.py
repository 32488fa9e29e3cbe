"""Listens for those who look, beside the gRPC server and never in its way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Final

from aiohttp import web

from decoupled_diloco.channel import Address, not_bound, parse_address, require_secure
from synchronizer_server.http.application import DEFAULT_LIMITS, Limits, Pages
from synchronizer_server.http.facts import Sources
from synchronizer_server.http.feed import Feed, Sparing

logger = logging.getLogger(__name__)

_SEND_BUFFER_BYTES: Final = 256 * 1024
"""What the kernel keeps for a viewer that does not read."""
_BACKLOG: Final = 64
_STOP_S: Final = 1.0

# What others send wrong is no news of ours: aiohttp would log a traceback for each.
_SILENT: Final = logging.getLogger(f"{__name__}.requests")
_SILENT.disabled = True


class StatusPage:
    """The status page of one process. The port is taken at once, requests are answered later.

    Args:
        address: host:port to listen on; port 0 takes any.
        sources: where the facts are from.
        is_serving: False from the moment at which the process is to stop.
        insecure: True where plaintext beyond this machine was asked for.
        limits: bounds on those who look.

    Raises:
        UsageError: PORT_IN_USE where the address cannot be bound, CONFIG_INVALID for no address,
            CONFIG_CONFLICT for plaintext to elsewhere.
    """

    def __init__(
        self,
        address: str,
        sources: Sources,
        *,
        is_serving: Callable[[], bool],
        insecure: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        require_secure(address, insecure=insecure)
        self._limits = limits
        self._socket = _listen(parse_address(address))
        self.address = Address(*self._socket.getsockname()[:2])
        self.feed = Feed(sources, pause_s=limits.pause_s)
        self.pages = Pages(
            self.feed,
            Sparing(sources.metrics, limits.pause_s),
            parse_address(address),
            is_serving=is_serving,
            stays=self._stays,
            limits=limits,
        )
        self._runner = web.AppRunner(
            self.pages.application(), access_log=None, logger=_SILENT, shutdown_timeout=_STOP_S
        )
        self._server: asyncio.Server | None = None
        self._open: dict[web.RequestHandler, asyncio.TimerHandle | None] = {}
        """Everybody who is connected, with the end of those who do not stay; the oldest first."""

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://{self.address}/"

    @property
    def num_connections(self) -> int:
        """How many are connected."""
        return len(self._open)

    async def start(self) -> None:
        """Answers from now on; once."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connected, sock=self._socket)
        logger.info("status page at %s", self.url)

    async def stop(self) -> None:
        """Ends every connection and gives the port back; for a page that never started, too."""
        self.feed.close()
        if self._server is not None:
            self._server.close()
            await self._runner.cleanup()
        self._socket.close()
        for timer in self._open.values():
            if timer is not None:
                timer.cancel()
        self._open.clear()

    def _connected(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None or not self._has_room():
            return _Refusal()
        handler = server()
        timer = asyncio.get_running_loop().call_later(
            self._limits.request_s, self._cut_off, handler
        )
        self._open[handler] = timer
        return _Watched(handler, self._forget)

    def _has_room(self) -> bool:
        """Whether one more may come; where there is none, the oldest that does not stay makes it.

        So nobody keeps others from looking who only holds connections: whoever has something to ask
        is answered and gone before being the oldest.
        """
        if len(self._open) < self._limits.max_connections:
            return True
        passing = (x for x, timer in self._open.items() if timer is not None and x.transport)
        oldest = next(passing, None)
        if oldest is not None:
            self._cut_off(oldest)
        return oldest is not None

    def _stays(self, request: web.Request) -> None:
        if request.protocol in self._open:  # else it is over already
            self._forget(request.protocol)
            self._open[request.protocol] = None

    def _forget(self, handler: web.RequestHandler) -> None:
        timer = self._open.pop(handler, None)
        if timer is not None:
            timer.cancel()

    def _cut_off(self, handler: web.RequestHandler) -> None:
        self._forget(handler)
        if handler.transport is not None:  # else it is over
            handler.transport.abort()


class _Watched(asyncio.Protocol):
    """A connection of which somebody hears when it is over."""

    def __init__(
        self, handler: web.RequestHandler, over: Callable[[web.RequestHandler], None]
    ) -> None:
        self._handler = handler
        self._over = over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(self._handler)
        self._handler.connection_lost(exc)


class _Refusal(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _listen(address: Address) -> socket.socket:
    """Returns a socket that takes connections.

    Raises:
        UsageError: PORT_IN_USE.
    """
    with contextlib.ExitStack() as stack:
        try:
            kind = socket.SOCK_STREAM
            (family, *_, where), *_ = socket.getaddrinfo(*address, type=kind)
            listening = stack.enter_context(socket.socket(family, kind))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            listening.bind(where)
            listening.listen(_BACKLOG)
        except OSError as error:
            raise not_bound(address) from error
        stack.pop_all()
    return listening
