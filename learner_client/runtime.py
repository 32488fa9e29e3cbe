"""What the background work needs of the world, so that scripted fleets can do without it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


def _loop_time() -> float:
    """The running loop's clock, which is virtual where its timers are."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Time, chance and threads.

    Attributes:
        sleep: waits between two attempts.
        rng: jitter and request ids.
        clock: seconds; never goes back, and goes on as ``sleep`` does.
        has_time: False where nothing may depend on time: no heartbeats and no time-outs.
        has_threads: False where tensor work is done in the event loop itself.
    """

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    rng: random.Random = field(default_factory=random.SystemRandom)
    clock: Callable[[], float] = _loop_time
    has_time: bool = True
    has_threads: bool = True

    @classmethod
    def scripted(cls, seed: int) -> Runtime:
        """For many learners in one event loop whose every run is the same."""

        async def next_turn(_seconds: float) -> None:
            await asyncio.sleep(0)

        rng = random.Random(seed)
        return cls(sleep=next_turn, rng=rng, has_time=False, has_threads=False)

    async def offload(self, work: Callable[[], T]) -> T:
        """Does tensor work where it does not hold up the event loop."""
        if self.has_threads:
            return await asyncio.to_thread(work)
        return work()

    def limit(self, seconds: float) -> asyncio.Timeout:
        """A time limit for an ``async with`` block; none where there is no time."""
        return asyncio.timeout(seconds if self.has_time else None)
