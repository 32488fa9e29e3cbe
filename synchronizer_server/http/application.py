"""The routes of the status page. Nothing here changes anything: GET and HEAD are all there is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Final

from aiohttp import web

from decoupled_diloco.channel import Address, is_local_name, is_loopback
from synchronizer_server.http.feed import GZIP_HEADER, Feed, Sparing, pack

logger = logging.getLogger(__name__)

_RETRY_S: Final = 2

_TYPES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    # Everything comes from here; no script, style or frame that the page does not bring along, and
    # no text that could become one.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_READ_ONLY: Final = ("GET", "HEAD")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on those who look.

    Attributes:
        max_connections: at once; the next ones are closed unheard.
        max_viewers: kept informed at once; the next ones are refused.
        request_s: how long a request and its answer may take, where nobody stays.
        slow_s: how long a viewer may take to receive a look.
        slow_bytes_per_s: how fast it is to be at least with a large one.
        pause_s: shortest time between two looks, for all of them together.
    """

    max_connections: int = 128
    max_viewers: int = 64
    request_s: float = 30.0
    slow_s: float = 5.0
    slow_bytes_per_s: float = 50_000.0
    pause_s: float = 1.0


DEFAULT_LIMITS: Final = Limits()


class Pages:
    """Answers requests.

    Args:
        feed: what is seen.
        metrics: what a scrape is answered with: body and content type.
        address: where the page listens; on a loopback address requests under other names are
            refused, which a page from elsewhere could make with a name that leads here.
        is_serving: False from the moment at which the process is to stop.
        stays: called with the request of a viewer that is kept informed from now on.
        limits: bounds on those who look.
    """

    def __init__(
        self,
        feed: Feed,
        metrics: Sparing[tuple[bytes, str]],
        address: Address,
        *,
        is_serving: Callable[[], bool],
        stays: Callable[[web.Request], None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._feed = feed
        self._metrics = metrics
        self._is_local = is_loopback(address)
        self._is_serving = is_serving
        self.stays = stays
        self._limits = limits
        self._failure = ""
        self.num_viewers = 0
        """Viewers that are kept informed now."""

    def application(self) -> web.Application:
        """Returns the application that serves them."""
        application = web.Application(middlewares=[self._guard])
        application.on_response_prepare.append(_secure)
        for asset in (resources.files(__package__) / "assets").iterdir():
            path = "/" if asset.name == "index.html" else f"/{asset.name}"
            content_type = _TYPES[PurePath(asset.name).suffix]
            application.router.add_get(path, _asset(asset.read_bytes(), content_type))
        application.router.add_get("/status.json", self._status)
        application.router.add_get("/events", self._events)
        application.router.add_get("/metrics", self._scrape)
        application.router.add_get("/healthz", self._health)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What holds for every request, whatever it asks for."""
        try:
            response = await self._answer(request, handler)
        except web.HTTPException as error:
            error.force_close()
            raise
        # One request per connection: nobody holds one without being served.
        response.force_close()
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in _READ_ONLY:
            raise web.HTTPMethodNotAllowed(request.method, _READ_ONLY, text="this page only shows")
        if self._is_local and not is_local_name(request.headers.get("Host", "")):
            raise web.HTTPMisdirectedRequest(text="ask for it as localhost or 127.0.0.1")
        try:
            return await handler(request)
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:
            self._failed(error)
            raise web.HTTPInternalServerError(text="see the synchronizer's log") from error

    def _failed(self, error: Exception) -> None:
        """Says once that a failure of ours keeps it from showing something."""
        if self._failure != repr(error):
            self._failure = repr(error)
            logger.error("the status page cannot show what it should", exc_info=error)

    async def _status(self, _: web.Request) -> web.Response:
        seen = await self._feed.newest()
        if seen is None:
            raise web.HTTPServiceUnavailable(text="the synchronizer stops")
        return web.Response(body=seen.body, content_type="application/json")

    async def _scrape(self, _: web.Request) -> web.Response:
        body, content_type = await self._metrics.get()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _health(self, _: web.Request) -> web.Response:
        if self._is_serving():
            return web.Response(text="serving\n")
        return web.Response(text="stopping\n", status=503)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Tells a viewer of every look, until one of the two is gone."""
        if self.num_viewers >= self._limits.max_viewers:
            raise web.HTTPServiceUnavailable(
                text=f"{self._limits.max_viewers} viewers are connected already; try again later",
                headers={"Retry-After": str(_RETRY_S)},
            )
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
        is_packed = "gzip" in request.headers.get("Accept-Encoding", "")
        if is_packed:
            headers["Content-Encoding"] = "gzip"
        if request.method == "HEAD":
            return web.Response(headers=headers)
        response = web.StreamResponse(headers=headers)
        response.force_close()
        self.num_viewers += 1
        self.stays(request)
        try:
            await response.prepare(request)
            await self._tell(request, response, is_packed=is_packed)
        except ConnectionError:
            pass  # it went away
        except Exception as error:
            self._failed(error)  # the stream is open: its end is all that can be said
        finally:
            self.num_viewers -= 1
        return response

    async def _tell(
        self, request: web.Request, response: web.StreamResponse, *, is_packed: bool
    ) -> None:
        first = b"retry: %d\n\n" % (_RETRY_S * 1000)
        await response.write(GZIP_HEADER + pack(first) if is_packed else first)
        number = 0
        while (seen := await self._feed.after(number)) is not None:
            number = seen.number
            said = seen.packed if is_packed else seen.event
            limit_s = max(self._limits.slow_s, len(said) / self._limits.slow_bytes_per_s)
            try:
                async with asyncio.timeout(limit_s):
                    await response.write(said)
            except TimeoutError:
                # Not closed but cut: what waits to be sent would keep the connection for ever.
                if request.transport is not None:
                    request.transport.abort()
                return


def _asset(body: bytes, content_type: str) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return answer


async def _secure(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
