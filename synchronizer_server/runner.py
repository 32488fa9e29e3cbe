"""Where tensor work and storage run: off the event loop, one job at a time, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Runner(Protocol):
    """Runs jobs one at a time in the order in which they were submitted."""

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queues a job; the future belongs to the running loop."""

    def close(self) -> None:
        """Waits for the job under way and takes no more."""


class ThreadRunner:
    """One thread of its own, so that reports and streams are never behind a merge.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queues a job; the future belongs to the running loop."""
        return asyncio.get_running_loop().run_in_executor(self._pool, job)

    def close(self) -> None:
        """Waits for the job under way and takes no more."""
        self._pool.shutdown(wait=True)


class InlineRunner:
    """Runs every job at once, in the caller: scripted fleets are deterministic with it."""

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Runs the job; the future is done."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Has nothing to wait for."""
