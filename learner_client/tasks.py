"""Tasks that end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits for their end; what they raise is nobody's any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def together(*streams: Coroutine[Any, Any, None]) -> None:
    """Runs all; the first that fails ends the others, and is raised."""
    tasks = [asyncio.get_running_loop().create_task(stream) for stream in streams]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel(*tasks)
    for task in tasks:
        if task in done:
            task.result()
