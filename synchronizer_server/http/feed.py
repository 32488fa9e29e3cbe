"""One description of the fleet for all viewers, made at most once in a while and only if asked for.

The event loop belongs to the learners: what a look costs decides how soon the next one may come.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from synchronizer_server.http.facts import Seen, Sources, encode, look

_MAX_LOAD: Final = 0.05
"""Share of the time that looks, and that scrapes may take."""
_MAX_BYTES_PER_S: Final = 1_000_000
"""What one viewer is sent."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """The fleet at one moment.

    Attributes:
        number: counts the looks, from 1.
        body: JSON in one line.
        event: the same as a server-sent event; made once, whoever gets it.
        packed: the event as a part of a gzip stream that began with `GZIP_HEADER`: a sixth of the
            size. It refers to no part before it, so that all viewers may be sent the same.
    """

    number: int
    body: bytes
    event: bytes
    packed: bytes


GZIP_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


def pack(text: bytes) -> bytes:
    """Returns a text as a part of a gzip stream; whoever got it can read it at once."""
    packer = zlib.compressobj(level=1, wbits=-zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush(zlib.Z_FULL_FLUSH)


class Sparing(Generic[T]):
    """Has something made when it is asked for, and repeats it for a while.

    Args:
        look: takes what it is made of, in the event loop; what it returns makes it, in a thread.
        pause_s: shortest time between two of them.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        look: Callable[[], Callable[[], T]],
        pause_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._pause_s = pause_s
        self._clock = clock
        self._work: asyncio.Task[T] | None = None
        self._next_at = clock()

    async def get(self) -> T:
        """Returns the last one where it is recent, or under way, else a new one."""
        if self._work is None or (self._work.done() and self._clock() >= self._next_at):
            self._work = asyncio.get_running_loop().create_task(self._make())
        # Whoever goes away meanwhile takes it from nobody.
        return await asyncio.shield(self._work)

    async def _make(self) -> T:
        begun = self._clock()
        finish = self._look()
        cost_s = self._clock() - begun
        made = await asyncio.to_thread(finish)
        self._next_at = begun + cost_s + max(self._pause_s, cost_s / _MAX_LOAD)
        return made


class Feed:
    """Looks when somebody wants to see, and shares what it saw.

    Args:
        sources: where the facts are from.
        pause_s: shortest time between two looks.
        clock: monotonic seconds.

    Attributes:
        pause_s: time from the last look to the next one at the earliest.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        pause_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._shortest_s = self.pause_s = pause_s
        self._clock = clock
        self._next_at = clock()
        self._newest = Look(0, b"", b"", b"")
        self._work: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def num_looks(self) -> int:
        """How often it has looked."""
        return self._newest.number

    async def newest(self) -> Look | None:
        """Returns the last look where it is recent, else a new one; None once it is closed."""
        seen = self._newest.number
        is_recent = seen > 0 and self._clock() < self._next_at
        return await self.after(seen - 1 if is_recent else seen)

    async def after(self, number: int) -> Look | None:
        """Returns the first look after one that was seen; None once it is closed."""
        while not self._closed and self._newest.number <= number:
            if self._work is None:
                self._work = asyncio.get_running_loop().create_task(self._look())
            work = self._work
            await asyncio.wait((work,))
            if not work.cancelled():
                work.result()
        return None if self._closed else self._newest

    def close(self) -> None:
        """Ends every wait."""
        self._closed = True
        if self._work is not None:
            self._work.cancel()

    async def _look(self) -> None:
        try:
            await asyncio.sleep(max(self._next_at - self._clock(), 0.0))
            self._next_at = self._clock() + self.pause_s  # also where it fails
            begun = self._clock()
            seen = look(self._sources)
            cost_s = self._clock() - begun
            made = await asyncio.to_thread(self._make, seen, cost_s / _MAX_LOAD)
            self._newest, self.pause_s = made
            self._next_at = self._clock() + self.pause_s
        finally:
            self._work = None

    def _make(self, seen: Seen, least_s: float) -> tuple[Look, float]:
        """What viewers are sent, and how long the next one is away; for a thread."""
        body = encode(self._sources, seen)
        pause_s = max(self._shortest_s, least_s, len(body) / _MAX_BYTES_PER_S)
        body = b'{"pause_s":%.3f,%b' % (pause_s, body[1:])
        event = b"event: status\ndata: %b\n\n" % body
        return Look(self._newest.number + 1, body, event, pack(event)), pause_s
