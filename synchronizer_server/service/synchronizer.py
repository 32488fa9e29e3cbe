"""SynchronizerService: translation only, one module per RPC behind it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncIterator, Awaitable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from decoupled_diloco.channel import abort
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import synchronizer_pb2_grpc as rpc
from decoupled_diloco.wire import incarnation_from, malformed
from synchronizer_server.convert import one_line
from synchronizer_server.core import events as ev
from synchronizer_server.engine import Engine
from synchronizer_server.joining import JoinDesk
from synchronizer_server.service.data import lease_data
from synchronizer_server.service.identity import require_current
from synchronizer_server.service.push import push
from synchronizer_server.service.recover import recover
from synchronizer_server.service.report import report
from synchronizer_server.service.watch import watch

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: Context, error: Exception) -> NoReturn:
    """Ends an RPC with a status: ours as it is, any other as INTERNAL (the log says more)."""
    answer = error
    if isinstance(error, DecodeError):
        answer = malformed("a message that is no protobuf of this protocol")
    elif not isinstance(error, DilocoError):
        logger.error("an RPC failed", exc_info=error)
        answer = DilocoError(Reason.INTERNAL, "the synchronizer failed; its log says more")
    # What the failed call held (whole messages of strangers) would live on with the exception. One
    # error may end many streams: frames of the others, which answer still, must not be among them.
    frames, error.__traceback__ = error.__traceback__, None
    traceback.clear_frames(frames)
    assert isinstance(answer, DilocoError), "one of the three"
    await abort(context, answer)


async def answer(context: Context, work: Awaitable[T]) -> T:
    """Awaits a unary answer; an error becomes a status."""
    try:
        return await work
    except Exception as error:
        await refuse(context, error)


async def answers(context: Context, work: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yields a stream of answers; an error becomes a status."""
    try:
        async for message in work:
            yield message
    except Exception as error:
        await refuse(context, error)


class SynchronizerService(rpc.SynchronizerServiceServicer):
    """Serves learners and observers.

    Args:
        engine: the engine.
        joins: grants incarnations.
    """

    def __init__(self, engine: Engine, joins: JoinDesk) -> None:
        self._engine = engine
        self._joins = joins

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        """Grants an incarnation."""
        return await answer(context, self._joins.join(request))

    async def Report(
        self, request_iterator: AsyncIterator[pb.ReportRequest], context: Context
    ) -> AsyncIterator[pb.ReportResponse]:
        """Serves one report stream."""
        async for message in answers(context, report(self._engine, request_iterator)):
            yield message

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: Context
    ) -> pb.PushResponse:
        """Serves one push."""
        return await answer(context, push(self._engine, request_iterator))

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        """Serves one watcher."""
        async for message in answers(context, watch(self._engine, request)):
            yield message

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """Says goodbye."""
        return await answer(context, self._leave(request))

    async def Recover(
        self, request_iterator: AsyncIterator[pb.RecoverRequest], context: Context
    ) -> AsyncIterator[pb.RecoverResponse]:
        """Serves a recovering learner, or takes a donor's inner state."""
        async for message in answers(context, recover(self._engine, request_iterator)):
            yield message

    async def LeaseData(
        self, request: pb.LeaseDataRequest, context: Context
    ) -> pb.LeaseDataResponse:
        """Leases a range of the training data."""
        return await answer(context, self._lease_data(request))

    async def _lease_data(self, request: pb.LeaseDataRequest) -> pb.LeaseDataResponse:
        return lease_data(self._engine, request)

    async def _leave(self, request: pb.LeaveRequest) -> pb.LeaveResponse:
        incarnation = incarnation_from(request.incarnation)
        require_current(self._engine, request.learner_id, incarnation)
        self._engine.handle(
            ev.LearnerLeft(
                learner_id=request.learner_id,
                incarnation=incarnation,
                reason=one_line(request.reason) or "goodbye",
            )
        )
        try:
            await self._engine.parts.membership.remove(
                request.learner_id, incarnation, self._engine.core.state.term
            )
        except DilocoError as error:
            logger.warning("the membership keeps %s a while: %s", request.learner_id, error)
        return pb.LeaveResponse(clock=self._engine.clock_message())
