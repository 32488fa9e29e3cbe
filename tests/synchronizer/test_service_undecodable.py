"""Bytes that are no protobuf: every rpc that is served refuses them with our reason."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor

from decoupled_diloco.channel import error_from_rpc, open_channel
from decoupled_diloco.errors import Reason
from decoupled_diloco.v1 import admin_pb2, synchronizer_pb2
from tests.synchronizer.fake_learner import make_settings, serving

pytestmark = pytest.mark.asyncio

NO_MESSAGE = b"\xff\xfe garbage \x00"
METHODS: list[MethodDescriptor] = [
    method
    for file in (synchronizer_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def called(channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes) -> grpc.aio.Call:
    """Calls a method with bytes that nobody has looked at."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    kinds = {
        (False, False): channel.unary_unary, (False, True): channel.unary_stream,
        (True, False): channel.stream_unary, (True, True): channel.stream_stream,
    }  # fmt: skip
    call = kinds[method.client_streaming, method.server_streaming](name)
    return call(iter([data]) if method.client_streaming else data)


async def ends(call: grpc.aio.Call) -> None:
    """Reads an answer, or a stream of them, to its end."""
    if isinstance(call, (grpc.aio.UnaryUnaryCall, grpc.aio.StreamUnaryCall)):
        await call
    else:
        async for _ in call:
            """What comes before the end does not count."""


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.full_name))
async def test_bytes_that_are_no_message_are_malformed(method: MethodDescriptor) -> None:
    async with serving(settings=make_settings(num_learners=1)) as fleet:
        await fleet.seeded("a")
        channel = open_channel(fleet.address, "test")
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ends(called(channel, method, NO_MESSAGE))
        finally:
            await channel.close()
        error = error_from_rpc(caught.value)
        assert error.reason is Reason.MALFORMED, error
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_every_kind_of_rpc_is_among_them() -> None:
    assert {(m.client_streaming, m.server_streaming) for m in METHODS} == {
        (False, False), (False, True), (True, False), (True, True),
    }  # fmt: skip
