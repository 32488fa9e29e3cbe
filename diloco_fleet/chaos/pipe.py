"""One direction of a link: bytes that are delayed, paced or held, and never lost or reordered."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

CHUNK_BYTES: Final = 64 << 10
"""Most bytes that are read at once."""

_SLICE_S: Final = 0.02
_SLICE_BYTES: Final = 512

BUFFER_BYTES: Final = 4 << 20
"""Bytes of one connection and direction that are on their way at most; then its sender waits.

With a delay, a connection therefore carries at most this much per delay.
"""


@dataclass(slots=True)
class Direction:
    """What happens to the bytes of all connections of a link in one direction.

    Attributes:
        delay_s: from the arrival of a byte to its departure, seconds.
        bytes_per_s: rate that all connections share; None for no limit.
        held: True where nothing gets through: a black hole until it is healed.
        num_bytes: bytes that have got through.
        changed: set, and replaced, whenever the above changes.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    held: bool = False
    num_bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _free_at: float = 0.0

    def set(self, *, delay_s: float, bytes_per_s: float | None, held: bool) -> None:
        """Changes what happens, to bytes on their way too."""
        self.delay_s, self.bytes_per_s, self.held = delay_s, bytes_per_s, held
        self._free_at = 0.0
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def slice_bytes(self) -> int:
        """Most bytes that depart at once: what the rate lets through in a moment."""
        if self.bytes_per_s is None:
            return CHUNK_BYTES
        return min(max(int(self.bytes_per_s * _SLICE_S), _SLICE_BYTES), CHUNK_BYTES)

    async def until_open(self) -> None:
        """Waits until something may get through."""
        while self.held:
            await self.changed.wait()

    async def admit(self, arrived: float, num_bytes: int) -> None:
        """Waits until bytes that arrived at a time may depart.

        Args:
            arrived: time of the event loop.
            num_bytes: how many; 0 for the end of the stream.
        """
        loop = asyncio.get_running_loop()
        while self.held or (wait_s := arrived + self.delay_s - loop.time()) > 0.0:
            await self._changes_within(None if self.held else wait_s)
        while num_bytes and self.bytes_per_s is not None:
            # One after the other: a connection takes its turn, then waits for it.
            turn = max(self._free_at, loop.time())
            self._free_at = turn + num_bytes / self.bytes_per_s
            if not await self._changes_within(self._free_at - loop.time()):
                break
        await self.until_open()

    async def _changes_within(self, wait_s: float | None) -> bool:
        """Waits; returns True where the rules have changed meanwhile."""
        try:
            async with asyncio.timeout(wait_s):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True


class Pipe:
    """Carries the bytes of one connection in one direction, to the end of the stream.

    Args:
        source: socket that is read; not blocking.
        sink: socket that is written; not blocking.
        direction: what happens on the way.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        self._source = source
        self._sink = sink
        self._direction = direction
        self._queue: deque[tuple[float, bytes | OSError]] = deque()
        self._queued_bytes = 0
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Carries until the source has ended, and passes the end on: the other way stays open.

        Raises:
            OSError: where one of the sockets broke.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read())
            group.create_task(self._write())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._until(lambda: self._queued_bytes < BUFFER_BYTES)
            data: bytes | OSError
            try:
                data = await loop.sock_recv(self._source, CHUNK_BYTES)
            except OSError as error:
                data = error  # it travels behind the bytes that came before it
            else:
                self._queued_bytes += len(data)
            self._queue.append((loop.time(), data))
            self._moved.set()
            if not data or isinstance(data, OSError):
                return

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._until(lambda: bool(self._queue))
            arrived, data = self._queue[0]
            if isinstance(data, OSError):
                await self._direction.admit(arrived, 0)
                raise data
            if not data:
                await self._direction.admit(arrived, 0)
                self._sink.shutdown(socket.SHUT_WR)
                return
            begin = 0
            while part := data[begin : begin + self._direction.slice_bytes]:
                await self._direction.admit(arrived, len(part))
                await loop.sock_sendall(self._sink, part)
                self._direction.num_bytes += len(part)
                begin += len(part)
            self._queue.popleft()
            self._queued_bytes -= len(data)
            self._moved.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on the queue; one of reader and writer waits at a time."""
        while not condition():
            self._moved.clear()
            await self._moved.wait()
