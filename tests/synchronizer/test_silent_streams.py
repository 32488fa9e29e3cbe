"""Streams that never say hello, of standbys and of recovering learners: bounded and sent away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from decoupled_diloco.channel import error_from_rpc, open_channel
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import replication_pb2_grpc as rpc
from synchronizer_server import limits
from tests.synchronizer.fake_learner import serving, until
from tests.synchronizer.replication_kit import Lineage, Standby, leading

pytestmark = pytest.mark.asyncio


async def silence() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


async def ending(call: Any) -> DilocoError:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    raise AssertionError("a plain end")


async def test_silent_replication_streams_are_bounded_and_keep_no_standby_out() -> None:
    lineage = Lineage()
    async with leading(lineage) as led:
        channel = open_channel(led.address, "hostile")
        stub = rpc.ReplicationServiceStub(channel)
        ends = [asyncio.ensure_future(ending(stub.Replicate(silence()))) for _ in range(300)]
        await until(lambda: sum(x.done() for x in ends) >= 300 - limits.MAX_SILENT)
        assert {x.result().reason for x in ends if x.done()} == {Reason.TOO_MANY_STREAMS}
        async with Standby().following(led.address) as standby:
            await standby.has(lineage)
        for end in ends:
            end.cancel()
        await channel.close()


async def test_a_recovery_or_replication_that_says_nothing_is_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HELLO_S", 0.05)
    async with serving() as fleet, leading(Lineage()) as led:
        channel = open_channel(led.address, "hostile")
        stub = rpc.ReplicationServiceStub(channel)
        for call in (fleet.stub.Recover(silence()), stub.Replicate(silence())):
            error = await asyncio.wait_for(ending(call), 20.0)
            assert error.reason is Reason.NO_PROGRESS
        await channel.close()


async def test_silent_recoveries_are_bounded() -> None:
    async with serving() as fleet:
        channel = fleet.channel("hostile")
        stub = type(fleet.stub)(channel)
        ends = [asyncio.ensure_future(ending(stub.Recover(silence()))) for _ in range(300)]
        await until(lambda: sum(x.done() for x in ends) >= 300 - limits.MAX_SILENT)
        assert {x.result().reason for x in ends if x.done()} == {Reason.TOO_MANY_STREAMS}
        for end in ends:
            end.cancel()
        await channel.close()
