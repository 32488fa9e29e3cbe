"""A transport that leads to one synchronizer at a time and can be pointed at another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from decoupled_diloco.v1 import admin_pb2, synchronizer_pb2
from learner_client.transport.base import Transport


class SwitchingTransport:
    """See ``Transport``. What leads to an address is opened at its first call, closed when left.

    Args:
        connect: opens the transport to an address, within the event loop.
        address: where calls go first.
    """

    def __init__(self, connect: Callable[[str], Transport], address: str) -> None:
        self._connect = connect
        self._address = address
        self._calls: Transport | None = None

    @property
    def address(self) -> str:
        """Where calls go now."""
        return self._address

    def open(self, address: str) -> Transport:
        """Opens a transport of the caller's own to an address."""
        return self._connect(address)

    async def switch(self, address: str, calls: Transport) -> None:
        """Sends calls elsewhere; those under way end with ``UNAVAILABLE``.

        Args:
            address: where they go from now on.
            calls: open transport to it; it is closed with this one.
        """
        left, self._calls, self._address = self._calls, calls, address
        if left is not None:
            await left.aclose()

    async def get_run(self, request: admin_pb2.GetRunRequest) -> admin_pb2.GetRunResponse:
        """See ``Transport``."""
        return await self._opened().get_run(request)

    async def join(self, request: synchronizer_pb2.JoinRequest) -> synchronizer_pb2.JoinResponse:
        """See ``Transport``."""
        return await self._opened().join(request)

    def report(
        self, requests: AsyncIterator[synchronizer_pb2.ReportRequest]
    ) -> AsyncGenerator[synchronizer_pb2.ReportResponse, None]:
        """See ``Transport``."""
        return self._opened().report(requests)

    async def push(
        self, requests: AsyncIterator[synchronizer_pb2.PushRequest]
    ) -> synchronizer_pb2.PushResponse:
        """See ``Transport``."""
        return await self._opened().push(requests)

    def watch(
        self, request: synchronizer_pb2.WatchRequest
    ) -> AsyncGenerator[synchronizer_pb2.WatchResponse, None]:
        """See ``Transport``."""
        return self._opened().watch(request)

    async def lease_data(
        self, request: synchronizer_pb2.LeaseDataRequest
    ) -> synchronizer_pb2.LeaseDataResponse:
        """See ``Transport``."""
        return await self._opened().lease_data(request)

    async def leave(self, request: synchronizer_pb2.LeaveRequest) -> synchronizer_pb2.LeaveResponse:
        """See ``Transport``."""
        return await self._opened().leave(request)

    async def aclose(self) -> None:
        """See ``Transport``."""
        left, self._calls = self._calls, None
        if left is not None:
            await left.aclose()

    def _opened(self) -> Transport:
        if self._calls is None:
            self._calls = self._connect(self._address)
        return self._calls
