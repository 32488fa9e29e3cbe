"""Push: one outer gradient, or one fragment of the seed; header first, then chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import torch

from decoupled_diloco.codecs import Stager, get_codec
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, crosses_half, reach
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.wire import check_count, incarnation_from, malformed, version_from
from synchronizer_server.convert import check_id
from synchronizer_server.core import events as ev
from synchronizer_server.core.events import PushKey
from synchronizer_server.engine import Engine
from synchronizer_server.limits import MAX_PER_PEER
from synchronizer_server.tickets import Ticket
from synchronizer_server.updates import FULL_CODEC


async def push(engine: Engine, requests: AsyncIterator[pb.PushRequest]) -> pb.PushResponse:
    """Serves one push stream; every push gets an answer.

    Raises:
        DilocoError: MALFORMED for a header that cannot be; OUT_OF_MEMORY_BUDGET where it may be
            sent again while its round waits.
    """
    first = await engine.limits.first(requests)
    if first is None or first.WhichOneof("kind") != "header":
        raise malformed("a push does not begin with a header")
    header = first.header
    check_id(header.learner_id, "learner_id")
    key = PushKey(
        header.learner_id, incarnation_from(header.incarnation), header.global_step, header.fragment
    )
    if header.group != 0:
        raise malformed(f"a push to group {header.group}, which is not here")
    if header.kind not in {pb.PUSH_KIND_SEED, pb.PUSH_KIND_OUTER_GRADIENT}:
        raise malformed(f"a push of kind {header.kind}")
    most = max(MAX_PER_PEER, 4 * engine.parts.settings.overlap + 8)
    with engine.limits.hold("push", key.learner_id, most):
        if header.kind == pb.PUSH_KIND_SEED:
            return await _push_seed(engine, key, header, requests)
        return await _push_outer_gradient(engine, key, header, requests)


async def _push_outer_gradient(
    engine: Engine, key: PushKey, header: pb.PushHeader, requests: AsyncIterator[pb.PushRequest]
) -> pb.PushResponse:
    try:
        opened = _opened(key, header)
    except DilocoError as error:
        if engine.core.state.roster.current(key.learner_id, key.incarnation) is not None:
            engine.handle(_failed(key, error))  # its round does not wait for it
        raise
    ticket = engine.tickets.take(key, header.encoding)
    engine.handle(opened)
    engine.snapshots.heard(key.learner_id, key.incarnation, header.clock)
    if ticket.answer.done():
        return await _answer_of(ticket)
    try:
        if not await _staged(engine, ticket, header, requests):
            return _resume(engine, ticket)
    except DilocoError as error:
        if error.reason is Reason.OUT_OF_MEMORY_BUDGET:
            raise
        if error.reason is Reason.OFFSET_MISMATCH:
            return _resume(engine, ticket)
        if not ticket.answer.done():
            engine.handle(_failed(key, error))
    return await _answer_of(ticket)


async def _answer_of(ticket: Ticket) -> pb.PushResponse:
    # Shielded: a caller that is cancelled must not cancel the answer of other streams.
    return await asyncio.shield(ticket.answer)


def _opened(key: PushKey, header: pb.PushHeader) -> ev.PushOpened:
    return ev.PushOpened(
        key=key,
        term=header.term,
        base=version_from(header.base),
        local_step=check_count(header.local_step, "a local step"),
        num_tokens=header.num_tokens,
        num_steps=header.num_steps,
    )


def _failed(key: PushKey, error: DilocoError) -> ev.PushFailed:
    return ev.PushFailed(key=key, reason=error.reason, message=error.message, refused=True)


async def _staged(
    engine: Engine, ticket: Ticket, header: pb.PushHeader, requests: AsyncIterator[pb.PushRequest]
) -> bool:
    """Receives, decodes and hands over; False where the rest is to be sent again.

    A stream that ends short proves nothing, since a broken connection may look the same.

    Raises:
        DilocoError: what is wrong with the push.
    """
    if header.encoding != ticket.encoding:
        raise malformed("a push goes on with other bytes than it began with")
    if ticket.stager is None:
        ticket.stager = _stager(engine, ticket.key, header.encoding, engine.parts.settings.codec_up)
    if header.offset_bytes != ticket.stager.num_bytes:
        return False
    is_newest = await _receive(engine, ticket, requests)
    if ticket.answer.done():
        return True
    if not is_newest or ticket.stager.num_bytes < ticket.encoding.payload_bytes:
        return False
    payload, codec, fragment = ticket.stager.finish(), ticket.encoding.codec, ticket.key.fragment
    decoded: tuple[torch.Tensor, float] = await engine.parts.tensors_runner.submit(
        lambda: engine.tensors.decode(codec, payload, fragment)
    )
    # Answered meanwhile: the key may already name a later push, which is not ours to speak for.
    if not ticket.answer.done():
        ticket.vector, norm = decoded
        engine.handle(ev.PushStaged(key=ticket.key, norm=norm))
    return True


def _resume(engine: Engine, ticket: Ticket) -> pb.PushResponse:
    """Asks for the rest; what is staged stays until the core drops the push."""
    return pb.PushResponse(
        outcome=pb.PUSH_OUTCOME_RESUME,
        reason=str(Reason.OFFSET_MISMATCH),
        staged_bytes=ticket.stager.num_bytes if ticket.stager else 0,
        clock=engine.clock_message(),
    )


def _stager(engine: Engine, key: PushKey, encoding: types_pb2.Encoding, codec_name: str) -> Stager:
    """Sets aside room for a payload that can be what its header claims.

    Raises:
        DilocoError: why it cannot, before anything is allocated.
    """
    assert engine.layout is not None, "the core checked the fragment"
    num_elements = engine.layout.fragments[key.fragment].num_elements
    if encoding.codec != codec_name:
        raise DilocoError(
            Reason.CODEC_MISMATCH, f"encoded as {encoding.codec[:40]!r}; this run uses {codec_name}"
        )
    if encoding.num_elements != num_elements:
        raise DilocoError(
            Reason.MALFORMED,
            f"{encoding.num_elements} elements, but fragment {key.fragment} has {num_elements}",
        )
    low, high = get_codec(codec_name).payload_bounds(num_elements)
    if encoding.payload_bytes < low:
        raise DilocoError(
            Reason.TRUNCATED,
            f"{encoding.payload_bytes} bytes claimed; {codec_name} takes at least {low}",
        )
    if encoding.payload_bytes <= high and not engine.tickets.has_room(encoding.payload_bytes):
        raise DilocoError(
            Reason.OUT_OF_MEMORY_BUDGET, "too many bytes are in flight; push again later"
        )
    return Stager(encoding.payload_bytes, encoding.digest, high)


async def _receive(engine: Engine, ticket: Ticket, requests: AsyncIterator[pb.PushRequest]) -> bool:
    """Stages chunks until the stream ends or the push is answered.

    Returns:
        False where another stream of the same push took over.

    Raises:
        DilocoError: what is wrong with the bytes.
    """
    ticket.streams += 1
    stream = ticket.streams
    iterator = aiter(requests)
    while (request := await _next(ticket, iterator)) is not None and ticket.streams == stream:
        assert ticket.stager is not None, "there until it is answered"
        chunk = _chunk(request)
        total = ticket.encoding.payload_bytes
        if crosses_half(ticket.stager.num_bytes, len(chunk.data), total):
            reach(FaultPoint.MID_PUSH)
        ticket.stager.add(chunk.offset_bytes, chunk.data)
        engine.handle(ev.PushProgressed(key=ticket.key, staged_bytes=ticket.stager.num_bytes))
    return ticket.streams == stream


async def _next(ticket: Ticket, iterator: AsyncIterator[pb.PushRequest]) -> pb.PushRequest | None:
    """The next message; None at the end, or once the push is answered: stalled senders too."""
    if ticket.answer.done():
        return None
    reading = asyncio.ensure_future(_read(iterator))
    waiting: list[asyncio.Future[Any]] = [reading, ticket.answer]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return None if ticket.answer.done() else await reading
    finally:
        reading.cancel()


async def _read(iterator: AsyncIterator[pb.PushRequest]) -> pb.PushRequest | None:
    return await anext(iterator, None)


async def _read_within(
    iterator: AsyncIterator[pb.PushRequest], limit_s: float
) -> pb.PushRequest | None:
    """The next message; None at the end.

    Raises:
        DilocoError: NO_PROGRESS where none comes within ``limit_s`` seconds.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await _read(iterator)
    except TimeoutError:
        raise DilocoError(
            Reason.NO_PROGRESS, f"nothing more of the push came within {limit_s:g} s"
        ) from None


def _chunk(request: pb.PushRequest) -> types_pb2.Chunk:
    if request.WhichOneof("kind") != "chunk":
        raise malformed("a push of more than one header")
    return request.chunk


async def _push_seed(
    engine: Engine, key: PushKey, header: pb.PushHeader, requests: AsyncIterator[pb.PushRequest]
) -> pb.PushResponse:
    refusal = engine.core.seed_refusal(key.learner_id, key.incarnation, key.fragment)
    if refusal is not None:
        return _seed_answer(engine, refusal, "the seed is not asked of this learner")
    try:
        stager = _stager(engine, key, header.encoding, FULL_CODEC)
        iterator, limit_s = aiter(requests), engine.parts.settings.push_timeout_s
        while (request := await _read_within(iterator, limit_s)) is not None:
            chunk = _chunk(request)
            stager.add(chunk.offset_bytes, chunk.data)
            engine.handle(ev.Heard(learner_id=key.learner_id, incarnation=key.incarnation))
        payload = stager.finish()
        vector = await engine.parts.tensors_runner.submit(
            lambda: engine.tensors.decode_seed(FULL_CODEC, payload, key.fragment)
        )
    except DilocoError as error:
        return _seed_answer(engine, error.reason, error.message)
    refusal = engine.core.seed_refusal(key.learner_id, key.incarnation, key.fragment)
    if refusal is not None:
        return _seed_answer(engine, refusal, "another learner seeds now")
    engine.parts.committer.stage_seed(key.fragment, vector)
    engine.handle(
        ev.SeedStaged(learner_id=key.learner_id, incarnation=key.incarnation, fragment=key.fragment)
    )
    return pb.PushResponse(outcome=pb.PUSH_OUTCOME_ACCEPTED, clock=engine.clock_message())


def _seed_answer(engine: Engine, reason: Reason, message: str) -> pb.PushResponse:
    return pb.PushResponse(
        outcome=pb.PUSH_OUTCOME_REFUSED,
        reason=str(reason),
        message=message,
        clock=engine.clock_message(),
    )
