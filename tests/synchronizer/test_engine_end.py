"""How an engine ends: whatever runs beside, nobody waits for it for ever."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from synchronizer_server import engine as engine_module
from tests.synchronizer.fake_learner import serving

pytestmark = pytest.mark.asyncio


async def test_a_task_that_swallowed_its_cancellation_is_cancelled_again() -> None:
    """Some libraries do; one that went on for ever would hold up the end, and keep the lease."""
    async with serving() as fleet:
        num_cancelled = 0

        async def beside() -> None:
            nonlocal num_cancelled
            while num_cancelled < 2:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    num_cancelled += 1

        fleet.engine.spawn(beside())
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await fleet.engine.close()
        assert num_cancelled == 2


async def test_a_task_that_never_ends_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "_CLOSE_TRY_S", 0.01)
    over = asyncio.Event()

    async def obstinate() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    async with serving() as fleet:
        fleet.engine.spawn(obstinate())
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await fleet.engine.close()
        assert "obstinate" in caplog.text
        over.set()
