"""The in-memory twin: the servicers of a synchronizer called directly, in one event loop.

No threads, no sockets and no time: what happens depends on nothing but the order of the loop's
ready queue, so fleets that are scripted in one loop run the same every time. Errors take the same
way as over gRPC: an aborted call becomes an ``AioRpcError`` and is mapped at the same border.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from decoupled_diloco.channel import error_from_rpc
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import admin_pb2, synchronizer_pb2

T = TypeVar("T")

_MAX_WAITING: Final = 16
"""Messages of one stream that wait to be taken, before the sender has to wait."""

_Context = Any
_Requests = Any
# Servicers annotate these with private types of the generated stubs.

Metadata = Sequence[tuple[str, str | bytes]]


class SynchronizerService(Protocol):
    """What is called of a synchronizer: method shapes of a ``grpc.aio`` servicer."""

    async def Join(  # noqa: N802
        self,
        request: synchronizer_pb2.JoinRequest,
        context: _Context,
    ) -> synchronizer_pb2.JoinResponse:
        """See the proto."""

    def Report(  # noqa: N802
        self,
        request_iterator: _Requests,
        context: _Context,
    ) -> AsyncIterator[synchronizer_pb2.ReportResponse]:
        """See the proto."""

    async def Push(  # noqa: N802
        self,
        request_iterator: _Requests,
        context: _Context,
    ) -> synchronizer_pb2.PushResponse:
        """See the proto."""

    def Watch(  # noqa: N802
        self,
        request: synchronizer_pb2.WatchRequest,
        context: _Context,
    ) -> AsyncIterator[synchronizer_pb2.WatchResponse]:
        """See the proto."""

    async def LeaseData(  # noqa: N802
        self,
        request: synchronizer_pb2.LeaseDataRequest,
        context: _Context,
    ) -> synchronizer_pb2.LeaseDataResponse:
        """See the proto."""

    def Recover(  # noqa: N802
        self,
        request_iterator: _Requests,
        context: _Context,
    ) -> AsyncIterator[synchronizer_pb2.RecoverResponse]:
        """See the proto."""

    async def Leave(  # noqa: N802
        self,
        request: synchronizer_pb2.LeaveRequest,
        context: _Context,
    ) -> synchronizer_pb2.LeaveResponse:
        """See the proto."""


class AdminService(Protocol):
    """What is called of the admin service."""

    async def GetRun(  # noqa: N802
        self,
        request: admin_pb2.GetRunRequest,
        context: _Context,
    ) -> admin_pb2.GetRunResponse:
        """See the proto."""


class _AbortedError(Exception):
    """Ends a handler, as ``grpc.aio`` does it."""


class MemoryContext:
    """Twin of ``grpc.aio.ServicerContext`` for calls in memory; no deadline, no peer's identity."""

    def __init__(self, metadata: Metadata = ()) -> None:
        self._invocation_metadata = tuple(metadata)
        self._trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._callbacks: list[Callable[[MemoryContext], None]] = []
        self._done = False
        self._cancelled = False

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """Ends the call with an error; always raises."""
        self._code, self._details = code, details
        self._trailing_metadata = tuple(trailing_metadata) or self._trailing_metadata
        raise _AbortedError

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """Ends the call with an error; always raises."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    async def send_initial_metadata(self, _initial_metadata: Metadata) -> None:
        """Has no effect in memory."""

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        """Sets what accompanies the status."""
        self._trailing_metadata = tuple(trailing_metadata)

    def trailing_metadata(self) -> Metadata:
        """What accompanies the status."""
        return self._trailing_metadata

    def invocation_metadata(self) -> Metadata:
        """What accompanies the request."""
        return self._invocation_metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the status of the call."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Sets the message of the status."""
        self._details = details

    def code(self) -> grpc.StatusCode:
        """Status of the call."""
        return self._code

    def details(self) -> str:
        """Message of the status."""
        return self._details

    def peer(self) -> str:
        """Where the call comes from."""
        return "memory:"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Nobody is authenticated in memory."""
        return {}

    def time_remaining(self) -> float | None:
        """There is no deadline."""
        return None

    def cancelled(self) -> bool:
        """Whether the caller gave the call up."""
        return self._cancelled

    def done(self) -> bool:
        """Whether the call is over."""
        return self._done

    def add_done_callback(self, callback: Callable[[MemoryContext], None]) -> None:
        """Calls ``callback`` with this context when the call is over."""
        self._callbacks.append(callback)

    def finish(self, *, cancelled: bool = False) -> None:
        """The call is over."""
        self._done, self._cancelled = True, cancelled
        for callback in self._callbacks:
            callback(self)

    def error(self) -> DilocoError:
        """The error with which the call ended, as a caller over gRPC would get it."""
        metadata = grpc.aio.Metadata(*self._trailing_metadata)
        return error_from_rpc(
            grpc.aio.AioRpcError(
                self._code,
                initial_metadata=grpc.aio.Metadata(),
                trailing_metadata=metadata,
                details=self._details,
            )
        )


class InMemoryTransport:
    """Calls servicer objects as if over a network; see ``Transport``.

    Messages are handed over, not copied: neither side may change one after sending it.

    Args:
        service: the synchronizer's servicer.
        admin: its admin servicer; None where ``get_run`` is not needed.
    """

    def __init__(self, service: SynchronizerService, admin: AdminService | None = None) -> None:
        self._service = service
        self._admin = admin
        self._handlers: set[asyncio.Task[Any]] = set()

    async def get_run(self, request: admin_pb2.GetRunRequest) -> admin_pb2.GetRunResponse:
        """See ``Transport``."""
        if self._admin is None:
            raise DilocoError(Reason.UNIMPLEMENTED, "this transport has no admin service")
        admin = self._admin
        return await self._unary(lambda context: admin.GetRun(request, context))

    async def join(self, request: synchronizer_pb2.JoinRequest) -> synchronizer_pb2.JoinResponse:
        """See ``Transport``."""
        return await self._unary(lambda context: self._service.Join(request, context))

    def report(
        self, requests: AsyncIterator[synchronizer_pb2.ReportRequest]
    ) -> AsyncGenerator[synchronizer_pb2.ReportResponse, None]:
        """See ``Transport``."""
        return self._stream(lambda context: self._service.Report(requests, context), requests)

    async def push(
        self, requests: AsyncIterator[synchronizer_pb2.PushRequest]
    ) -> synchronizer_pb2.PushResponse:
        """See ``Transport``."""
        return await self._unary(lambda context: self._service.Push(requests, context), requests)

    def watch(
        self, request: synchronizer_pb2.WatchRequest
    ) -> AsyncGenerator[synchronizer_pb2.WatchResponse, None]:
        """See ``Transport``."""
        return self._stream(lambda context: self._service.Watch(request, context))

    async def lease_data(
        self, request: synchronizer_pb2.LeaseDataRequest
    ) -> synchronizer_pb2.LeaseDataResponse:
        """See ``Transport``."""
        return await self._unary(lambda context: self._service.LeaseData(request, context))

    def recover(
        self, requests: AsyncIterator[synchronizer_pb2.RecoverRequest]
    ) -> AsyncGenerator[synchronizer_pb2.RecoverResponse, None]:
        """See ``Transport``."""
        return self._stream(lambda context: self._service.Recover(requests, context), requests)

    async def leave(self, request: synchronizer_pb2.LeaveRequest) -> synchronizer_pb2.LeaveResponse:
        """See ``Transport``."""
        return await self._unary(lambda context: self._service.Leave(request, context))

    async def aclose(self) -> None:
        """See ``Transport``."""
        for handler in list(self._handlers):
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _unary(
        self,
        call: Callable[[MemoryContext], Coroutine[Any, Any, T]],
        requests: AsyncIterator[Any] | None = None,
    ) -> T:
        """Runs a handler in a task of its own, as a server does."""
        context = MemoryContext()
        handler = self._start(call(context), context)
        try:
            await asyncio.wait((handler,))
        finally:
            await _end(handler, requests)
        _raise_outcome(handler, context)
        return handler.result()

    async def _stream(
        self,
        call: Callable[[MemoryContext], AsyncIterator[T]],
        requests: AsyncIterator[Any] | None = None,
    ) -> AsyncGenerator[T, None]:
        """Runs a handler in a task of its own; at most ``_MAX_WAITING`` responses wait."""
        context = MemoryContext()
        responses: asyncio.Queue[T | None] = asyncio.Queue(_MAX_WAITING)

        async def handle() -> None:
            try:
                async for response in call(context):
                    await responses.put(response)
            finally:
                with contextlib.suppress(asyncio.QueueFull):
                    responses.put_nowait(None)

        handler = self._start(handle(), context)
        try:
            while not (responses.empty() and handler.done()):
                response = await responses.get()
                if response is not None:
                    yield response
        finally:
            await _end(handler, requests)
        _raise_outcome(handler, context)

    def _start(self, handle: Coroutine[Any, Any, T], context: MemoryContext) -> asyncio.Task[T]:
        handler = asyncio.get_running_loop().create_task(handle)
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        handler.add_done_callback(lambda task: context.finish(cancelled=task.cancelled()))
        return handler


async def _end(handler: asyncio.Task[Any], requests: AsyncIterator[Any] | None) -> None:
    """Cancels a handler that still runs, and ends what it read from."""
    if not handler.done():
        handler.cancel()
        await asyncio.wait((handler,))
    if not handler.cancelled():
        handler.exception()  # nobody else asks where the caller has given up
    if isinstance(requests, AsyncGenerator):
        # A servicer that reads in a task of its own may still be about to end it.
        with contextlib.suppress(RuntimeError):
            await requests.aclose()


def _raise_outcome(handler: asyncio.Task[Any], context: MemoryContext) -> None:
    """Raises what the call ended with, if not with success."""
    if handler.cancelled():
        raise DilocoError(Reason.UNAVAILABLE, "the connection was closed")
    error = handler.exception()
    if isinstance(error, _AbortedError) or (
        error is None and context.code() is not grpc.StatusCode.OK
    ):
        raise context.error()
    if error is not None:
        raise DilocoError(
            Reason.INTERNAL, f"the synchronizer failed: {type(error).__name__}: {error}"
        ) from error
