"""The seam between the library and the network."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from decoupled_diloco.v1 import admin_pb2, synchronizer_pb2


class Transport(Protocol):
    """Calls of one synchronizer, in protobuf messages.

    Every method raises ``DilocoError`` and nothing else that comes from the network: errors are
    mapped here, at this one border. An unreachable peer is ``UNAVAILABLE``. Used within one event
    loop. Response streams are closed by ``aclose()``, which ends the call.
    """

    async def get_run(self, request: admin_pb2.GetRunRequest) -> admin_pb2.GetRunResponse:
        """Settings and layout of the run."""

    async def join(self, request: synchronizer_pb2.JoinRequest) -> synchronizer_pb2.JoinResponse:
        """Asks to take part."""

    def report(
        self, requests: AsyncIterator[synchronizer_pb2.ReportRequest]
    ) -> AsyncGenerator[synchronizer_pb2.ReportResponse, None]:
        """Opens the report stream."""

    async def push(
        self, requests: AsyncIterator[synchronizer_pb2.PushRequest]
    ) -> synchronizer_pb2.PushResponse:
        """Sends one outer gradient; the answer may come before all was sent."""

    def watch(
        self, request: synchronizer_pb2.WatchRequest
    ) -> AsyncGenerator[synchronizer_pb2.WatchResponse, None]:
        """Opens the stream of updates."""

    async def lease_data(
        self, request: synchronizer_pb2.LeaseDataRequest
    ) -> synchronizer_pb2.LeaseDataResponse:
        """Asks for a range of the training data."""

    async def leave(self, request: synchronizer_pb2.LeaveRequest) -> synchronizer_pb2.LeaveResponse:
        """Says goodbye."""

    async def aclose(self) -> None:
        """Closes the connections; calls in flight end with ``UNAVAILABLE``."""
