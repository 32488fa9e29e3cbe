"""The in-memory twin behaves as gRPC does, seen from either side."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from decoupled_diloco.channel import abort, to_status
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2
from learner_client.transport import InMemoryTransport

JOIN = synchronizer_pb2.JoinRequest()
WATCH = synchronizer_pb2.WatchRequest()


def caught_up() -> synchronizer_pb2.WatchResponse:
    return synchronizer_pb2.WatchResponse(caught_up=synchronizer_pb2.CaughtUp())


class Service:
    """Does in each call what a test says."""

    def __init__(self, behaviour) -> None:
        self._behaviour = behaviour
        self.ended: list[str] = []

    async def Join(self, request, context):  # noqa: N802
        context.add_done_callback(lambda c: self.ended.append(f"done={c.done()}"))
        return await self._behaviour(context)

    async def Watch(self, request, context):  # noqa: N802
        try:
            async for response in self._behaviour(context):
                yield response
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise

    async def Push(self, requests, context):  # noqa: N802
        return await self._behaviour(requests)


async def with_status(context):
    await context.abort_with_status(
        to_status(DilocoError(Reason.FENCED, "stop this process", learner="a"))
    )


async def with_abort(context):
    await abort(context, DilocoError(Reason.FENCED, "stop this process", learner="a"))


async def with_trailing_metadata(context):
    status = to_status(DilocoError(Reason.FENCED, "stop this process", learner="a"))
    context.set_trailing_metadata(status.trailing_metadata)
    context.set_code(status.code)
    context.set_details(status.details)


@pytest.mark.asyncio
@pytest.mark.parametrize("behaviour", [with_status, with_abort, with_trailing_metadata])
async def test_an_abort_arrives_with_reason_message_and_details(behaviour):
    service = Service(behaviour)
    with pytest.raises(DilocoError, match="stop this process") as caught:
        await InMemoryTransport(service).join(JOIN)
    assert caught.value.reason is Reason.FENCED
    assert caught.value.details == {"learner": "a"}
    await asyncio.sleep(0)
    assert service.ended == ["done=True"]


@pytest.mark.asyncio
async def test_a_plain_abort_is_mapped_by_its_code():
    async def behaviour(context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    with pytest.raises(DilocoError, match="gone") as caught:
        await InMemoryTransport(Service(behaviour)).join(JOIN)
    assert caught.value.reason is Reason.UNAVAILABLE


@pytest.mark.asyncio
async def test_a_bug_of_the_service_is_internal():
    async def behaviour(context):
        raise KeyError("oops")

    with pytest.raises(DilocoError, match="oops") as caught:
        await InMemoryTransport(Service(behaviour)).join(JOIN)
    assert caught.value.reason is Reason.INTERNAL


@pytest.mark.asyncio
async def test_a_stream_delivers_in_order_all_that_was_sent_before_an_abort():
    async def behaviour(context):
        for t in range(50):
            response = caught_up()
            response.caught_up.clock.own_step = t
            yield response
        await abort(context, DilocoError(Reason.DRAINING, "bye"))

    stream = InMemoryTransport(Service(behaviour)).watch(WATCH)
    seen = [(await anext(stream)).caught_up.clock.own_step for _ in range(50)]
    assert seen == list(range(50))
    with pytest.raises(DilocoError, match="bye"):
        await anext(stream)


@pytest.mark.asyncio
async def test_a_slow_reader_holds_the_sender_up():
    sent = 0

    async def behaviour(context):
        nonlocal sent
        while True:
            sent += 1
            yield caught_up()

    stream = InMemoryTransport(Service(behaviour)).watch(WATCH)
    await anext(stream)
    for _ in range(200):
        await asyncio.sleep(0)
    assert sent < 50
    await stream.aclose()


@pytest.mark.asyncio
async def test_closing_a_stream_cancels_its_handler():
    async def behaviour(context):
        yield caught_up()
        await asyncio.Event().wait()

    service = Service(behaviour)
    stream = InMemoryTransport(service).watch(WATCH)
    await anext(stream)
    await stream.aclose()
    assert service.ended == ["cancelled"]


@pytest.mark.asyncio
async def test_closing_the_transport_ends_calls_as_unavailable():
    async def behaviour(context):
        yield caught_up()
        await asyncio.Event().wait()

    transport = InMemoryTransport(Service(behaviour))
    stream = transport.watch(WATCH)
    await anext(stream)
    await transport.aclose()
    with pytest.raises(DilocoError) as caught:
        await anext(stream)
    assert caught.value.reason is Reason.UNAVAILABLE


@pytest.mark.asyncio
async def test_an_early_answer_ends_the_requests():
    ended = []

    async def requests():
        try:
            while True:
                yield synchronizer_pb2.PushRequest()
        finally:
            ended.append(True)

    async def behaviour(received):
        await anext(received)
        return synchronizer_pb2.PushResponse(staged_bytes=7)

    response = await InMemoryTransport(Service(behaviour)).push(requests())
    assert response.staged_bytes == 7
    assert ended == [True]


@pytest.mark.asyncio
async def test_settings_need_an_admin_service():
    with pytest.raises(DilocoError, match="no admin service"):
        await InMemoryTransport(Service(None)).get_run(None)
