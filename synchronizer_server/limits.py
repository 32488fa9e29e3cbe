"""Bounds on what strangers and hostile peers may hold open, and how fast anybody may talk."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from decoupled_diloco.errors import DilocoError, Reason

T = TypeVar("T")

MAX_SILENT: Final = 64
"""Streams that have not said yet who they are."""

HELLO_S: Final = 10.0
"""How long they may take to say it, seconds."""

MAX_PER_PEER: Final = 16
"""Streams of one kind that one learner or observer has open; more than one only while an earlier
connection of it is not yet known to be dead, or for pushes."""

MAX_OBSERVERS: Final = 64
"""Watches of all observers together."""

MESSAGES_PER_S: Final = 500.0
BURST_MESSAGES: Final = 5000


class StreamLimits:
    """Counts the open streams of one synchronizer process."""

    def __init__(self) -> None:
        self._silent: OrderedDict[int, asyncio.Future[None]] = OrderedDict()
        self._serial = 0
        self._open: Counter[tuple[str, str]] = Counter()

    @property
    def num_silent(self) -> int:
        """Streams that have not said yet who they are."""
        return len(self._silent)

    async def first(self, requests: AsyncIterator[T]) -> T | None:
        """Reads the first message of a stream; None where it ends without one.

        Where too many streams are silent the one that has been so for longest is given up: whoever
        has something to say says it at once, and a thousand silent streams keep nobody out.

        Raises:
            DilocoError: TOO_MANY_STREAMS, or NO_PROGRESS where nothing came in time.
        """
        self._serial += 1
        key = self._serial
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._silent[key] = given_up
        if len(self._silent) > MAX_SILENT:
            self._silent.popitem(last=False)[1].set_result(None)
        reading = asyncio.ensure_future(_next(requests))
        try:
            waiting: list[asyncio.Future[Any]] = [reading, given_up]
            await asyncio.wait(waiting, timeout=HELLO_S, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
        finally:
            reading.cancel()
            self._silent.pop(key, None)
        if given_up.done():
            raise DilocoError(
                Reason.TOO_MANY_STREAMS,
                f"more than {MAX_SILENT} streams are open that say nothing; this one was silent "
                "for longest: say hello at once",
            )
        raise DilocoError(
            Reason.NO_PROGRESS, f"nothing was said within {HELLO_S:g} s of opening the stream"
        )

    @contextmanager
    def hold(self, kind: str, who: str, most: int = MAX_PER_PEER) -> Iterator[None]:
        """Counts a stream while it is open.

        Args:
            kind: word for the stream.
            who: its peer.
            most: streams of that kind that it may have open.

        Raises:
            DilocoError: TOO_MANY_STREAMS.
        """
        key = (kind, who)
        if self._open[key] >= most:
            raise DilocoError(
                Reason.TOO_MANY_STREAMS,
                f"{most} {kind} streams of {who or 'observers'} are open, as many as there may be; "
                "close some, or wait until the broken ones are noticed",
            )
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


async def _next(requests: AsyncIterator[T]) -> T | None:
    return await anext(aiter(requests), None)


class Throttle:
    """How fast one stream may talk: a burst at once, then so many messages per second.

    Nothing is lost: what comes faster is read later, and the sender's own flow control holds it.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._left = float(BURST_MESSAGES)

    def delay_s(self) -> float:
        """Takes a message; returns how long to wait before the next is read, seconds."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * MESSAGES_PER_S, BURST_MESSAGES) - 1.0
        self._at = now
        return 0.0 if self._left >= 0.0 else math.ceil(-self._left) / MESSAGES_PER_S
