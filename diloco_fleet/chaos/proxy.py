"""A TCP proxy between real processes: links that are cut, held, delayed, paced and healed.

::

    with Proxies() as proxies:
        link = proxies.link("learner-0", target="127.0.0.1:50051")
        ...                       # the learner is given link.address
        link.delay(0.05)          # 50 ms each way
        link.cut(Cut.BLACKHOLE)   # silence: nothing arrives, no connection breaks
        link.heal()               # what was held arrives; nothing is lost

All links of a `Proxies` share one thread with an event loop of its own, so that the process that
controls them may block. TCP stays TCP: what cannot be imitated above the kernel is the loss of
single packets, so a black hole acknowledges what fits into the buffers of proxy and kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from decoupled_diloco.channel import Address, parse_address
from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.chaos.pipe import Direction, Pipe

T = TypeVar("T")

_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 128
_RESET: Final = struct.pack("ii", 1, 0)
_CALL_S: Final = 30.0


class Cut(StrEnum):
    """How a link is cut."""

    RESET = "reset"
    """Every connection breaks at once, and so does every new one: a process or host that is gone
    and says so."""
    BLACKHOLE = "blackhole"
    """Nothing arrives and nothing breaks: a network that drops packets. New connections are taken
    and hear nothing."""


class Way(StrEnum):
    """Direction of the bytes."""

    UP = "up"
    """From who connects to who listens."""
    DOWN = "down"
    """Back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """What a link does now.

    Attributes:
        num_connections: open connections.
        num_accepted: connections since the beginning.
        bytes_up: bytes that got through to who listens.
        bytes_down: bytes that got back.
    """

    num_connections: int
    num_accepted: int
    bytes_up: int
    bytes_down: int


class Link:
    """A way to one target that can be disturbed; its methods are safe in every thread.

    Made by `Proxies.link`.
    """

    def __init__(self, name: str, address: str, core: _LinkCore, call: _Caller) -> None:
        self.name = name
        self.address = address
        self._core = core
        self._call = call

    def cut(self, how: Cut, way: Way | None = None) -> None:
        """Cuts the link.

        Args:
            how: with a word or without.
            way: the direction that is cut; None for both. A reset has no direction.

        Raises:
            UsageError: CONFIG_INVALID for a reset of one direction.
        """
        if how is Cut.RESET:
            if way is not None:
                raise UsageError(
                    Reason.CONFIG_INVALID, "a reset breaks both directions; leave the way out"
                )
            self._call(self._core.break_all)
        else:
            self._call(lambda: self._core.change(way, held=True))

    def heal(self) -> None:
        """Ends cut, delay and rate; what was held arrives."""
        self._call(self._core.heal)

    def delay(self, seconds: float, way: Way | None = None) -> None:
        """Delays every byte, also those on their way.

        Raises:
            UsageError: CONFIG_INVALID where it is negative or not finite.
        """
        if not 0.0 <= seconds < math.inf:
            raise UsageError(Reason.CONFIG_INVALID, f"delay is {seconds}; seconds, at least 0")
        self._call(lambda: self._core.change(way, delay_s=seconds))

    def limit(self, bytes_per_s: float | None, way: Way | None = None) -> None:
        """Bounds the rate that all connections of the link share; None for no bound.

        Raises:
            UsageError: CONFIG_INVALID where it is not above 0.
        """
        if bytes_per_s is not None and not 0.0 < bytes_per_s < math.inf:
            raise UsageError(Reason.CONFIG_INVALID, f"rate is {bytes_per_s}; bytes/s, above 0")
        self._call(lambda: self._core.change(way, rate=(bytes_per_s,)))

    def state(self) -> LinkState:
        """Returns what the link does now."""
        return self._call(self._core.state)


class _LinkCore:
    """A link inside the thread of its loop."""

    def __init__(self, listener: socket.socket, target: Address) -> None:
        self.listener = listener
        self._target = target
        self._ways = {Way.UP: Direction(), Way.DOWN: Direction()}
        self._broken = False
        self._num_accepted = 0
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Takes connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self.listener)
            self._num_accepted += 1
            if self._broken:
                _reset(client)
                continue
            task = loop.create_task(self._carry(client))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        """Breaks every connection and stops listening."""
        self.break_all()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self.listener.close()

    def break_all(self) -> None:
        self._broken = True
        for task in self._connections:
            task.cancel()

    def heal(self) -> None:
        self._broken = False
        for direction in self._ways.values():
            direction.set(delay_s=0.0, bytes_per_s=None, held=False)

    def change(
        self,
        way: Way | None,
        *,
        delay_s: float | None = None,
        rate: tuple[float | None] | None = None,
        held: bool | None = None,
    ) -> None:
        """Changes what is given, in one direction or both."""
        for direction in self._ways.values() if way is None else [self._ways[way]]:
            direction.set(
                delay_s=direction.delay_s if delay_s is None else delay_s,
                bytes_per_s=direction.bytes_per_s if rate is None else rate[0],
                held=direction.held if held is None else held,
            )

    def state(self) -> LinkState:
        return LinkState(
            num_connections=len(self._connections),
            num_accepted=self._num_accepted,
            bytes_up=self._ways[Way.UP].num_bytes,
            bytes_down=self._ways[Way.DOWN].num_bytes,
        )

    async def _carry(self, client: socket.socket) -> None:
        """One connection, to the end of both directions; an end without a word is passed on."""
        server: socket.socket | None = None
        ended = False
        try:
            _prepare(client)
            # A target that is cut off does not hear of new connections either.
            await self._ways[Way.UP].until_open()
            server = await _connect(self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(Pipe(client, server, self._ways[Way.UP]).run())
                group.create_task(Pipe(server, client, self._ways[Way.DOWN]).run())
            ended = True
        except* OSError:
            pass  # one end broke: so does the other one, below
        finally:
            if ended and server is not None:
                client.close()
                server.close()
            else:
                _reset(client, server)


def _prepare(end: socket.socket) -> None:
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _connect(target: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        _prepare(end)
        await asyncio.get_running_loop().sock_connect(end, (target.host, target.port))
    except BaseException:
        _reset(end)  # the target may have taken it already
        raise
    return end


def _reset(*ends: socket.socket | None) -> None:
    """Closes sockets so that the other side gets a reset and not the end of a stream."""
    for end in ends:
        if end is not None:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()


class _Caller:
    """Runs functions in the thread of a loop and waits for their results."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self.wait(run())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)


class Proxies:
    """Links, and the thread that carries them. Use as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._call = _Caller(self._loop)
        self._cores: list[tuple[_LinkCore, asyncio.Task[None]]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call.wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()

    def link(self, name: str, target: str, port: int = 0) -> Link:
        """Opens a link, undisturbed.

        Args:
            name: for people who look.
            target: host:port of a numeric address or of this machine; it need not be there yet.
            port: of the loopback interface to listen on; 0 for any.

        Raises:
            UsageError: CONFIG_INVALID for no address, PORT_IN_USE.
        """
        where = parse_address(target)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        try:
            listener.bind((_HOST, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise UsageError(
                Reason.PORT_IN_USE, f"port {port} of {_HOST} cannot be used ({error.strerror})"
            ) from error
        core = _LinkCore(listener, where)

        def begin() -> None:
            self._cores.append((core, self._loop.create_task(core.serve())))

        self._call(begin)
        return Link(name, f"{_HOST}:{listener.getsockname()[1]}", core, self._call)

    async def _close(self) -> None:
        for core, task in self._cores:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await core.close()
