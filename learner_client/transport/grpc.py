"""Over gRPC: control on a connection of its own, so that bulk never delays it (design 5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc.aio

from decoupled_diloco.channel import (
    ADMIN_DEADLINE_S,
    JOIN_DEADLINE_S,
    LEASE_DEADLINE_S,
    LEAVE_DEADLINE_S,
    error_from_rpc,
    open_channel,
)
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    synchronizer_pb2,
    synchronizer_pb2_grpc,
)
from learner_client.transport.calls import count_call

T = TypeVar("T")


class GrpcTransport:
    """Two TCP connections: reports, Join and Leave on one, pushes and updates on the other.

    Create it within the event loop that uses it. gRPC does not survive a fork: start DataLoader
    workers before, or with ``multiprocessing_context="spawn"``.

    Args:
        address: ``host:port`` of the synchronizer.
        insecure: True where plaintext to another machine was asked for.

    Raises:
        UsageError: ``CONFIG_INVALID`` for no address, ``CONFIG_CONFLICT`` for plaintext elsewhere.
    """

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        self._control = open_channel(address, "control", insecure=insecure)
        self._bulk = open_channel(address, "bulk", insecure=insecure)
        self._control_stub = synchronizer_pb2_grpc.SynchronizerServiceStub(self._control)
        self._bulk_stub = synchronizer_pb2_grpc.SynchronizerServiceStub(self._bulk)
        self._admin_stub = admin_pb2_grpc.AdminServiceStub(self._control)

    async def get_run(self, request: admin_pb2.GetRunRequest) -> admin_pb2.GetRunResponse:
        """See ``Transport``."""
        return await _mapped(self._admin_stub.GetRun(request, timeout=ADMIN_DEADLINE_S))

    async def join(self, request: synchronizer_pb2.JoinRequest) -> synchronizer_pb2.JoinResponse:
        """See ``Transport``."""
        return await _mapped(self._control_stub.Join(request, timeout=JOIN_DEADLINE_S))

    async def report(
        self, requests: AsyncIterator[synchronizer_pb2.ReportRequest]
    ) -> AsyncGenerator[synchronizer_pb2.ReportResponse, None]:
        """See ``Transport``."""
        call = self._control_stub.Report(requests)
        async for response in _stream(call):
            yield response

    async def push(
        self, requests: AsyncIterator[synchronizer_pb2.PushRequest]
    ) -> synchronizer_pb2.PushResponse:
        """See ``Transport``. Deadlines are the caller's, who knows the size."""
        return await _mapped(self._bulk_stub.Push(requests))

    async def watch(
        self, request: synchronizer_pb2.WatchRequest
    ) -> AsyncGenerator[synchronizer_pb2.WatchResponse, None]:
        """See ``Transport``."""
        async for response in _stream(self._bulk_stub.Watch(request)):
            yield response

    async def lease_data(
        self, request: synchronizer_pb2.LeaseDataRequest
    ) -> synchronizer_pb2.LeaseDataResponse:
        """See ``Transport``."""
        return await _mapped(self._control_stub.LeaseData(request, timeout=LEASE_DEADLINE_S))

    async def leave(self, request: synchronizer_pb2.LeaveRequest) -> synchronizer_pb2.LeaveResponse:
        """See ``Transport``."""
        return await _mapped(self._control_stub.Leave(request, timeout=LEAVE_DEADLINE_S))

    async def aclose(self) -> None:
        """See ``Transport``."""
        await self._control.close()
        await self._bulk.close()


async def _mapped(call: Awaitable[T]) -> T:
    count_call()
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    except asyncio.CancelledError:
        _raise_closed()
        raise


async def _stream(
    call: grpc.aio.UnaryStreamCall[Any, T] | grpc.aio.StreamStreamCall[Any, T],
) -> AsyncGenerator[T, None]:
    count_call()
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    except asyncio.CancelledError:
        _raise_closed()
        raise
    finally:
        call.cancel()


def _raise_closed() -> None:
    """Raises ``UNAVAILABLE`` where the channel was closed and nobody cancelled this task."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise DilocoError(Reason.UNAVAILABLE, "the connection was closed") from None
