"""Push: one outer gradient, or one fragment of the seed; header first, then chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import torch

from decoupled_diloco.codecs import Stager, get_codec
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from synchronizer_server.convert import incarnation_from, malformed, version_from
from synchronizer_server.core import events as ev
from synchronizer_server.core.events import PushKey
from synchronizer_server.engine import Engine
from synchronizer_server.tickets import Ticket
from synchronizer_server.updates import FULL_CODEC

_RETRIED: Final = frozenset({Reason.OUT_OF_MEMORY_BUDGET, Reason.OFFSET_MISMATCH})


async def push(engine: Engine, requests: AsyncIterator[pb.PushRequest]) -> pb.PushResponse:
    """Serves one push stream; every push gets an answer.

    Raises:
        DilocoError: MALFORMED, STARTING or OUT_OF_MEMORY_BUDGET; nothing was counted then.
    """
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("kind") != "header":
        raise malformed("a push does not begin with a header")
    header = first.header
    key = PushKey(
        header.learner_id, incarnation_from(header.incarnation), header.global_step, header.fragment
    )
    if header.kind == pb.PUSH_KIND_SEED:
        return await _push_seed(engine, key, header, requests)
    if header.kind != pb.PUSH_KIND_OUTER_GRADIENT:
        raise malformed(f"a push of kind {header.kind}")
    return await _push_outer_gradient(engine, key, header, requests)


async def _push_outer_gradient(
    engine: Engine, key: PushKey, header: pb.PushHeader, requests: AsyncIterator[pb.PushRequest]
) -> pb.PushResponse:
    ticket = engine.tickets.take(key, header.encoding)
    engine.handle(
        ev.PushOpened(
            key=key,
            term=header.term,
            base=version_from(header.base),
            local_step=header.local_step,
            num_tokens=header.num_tokens,
            num_steps=header.num_steps,
        )
    )
    if ticket.answer.done():
        return await ticket.answer
    try:
        if ticket.stager is None:
            ticket.stager = _stager(engine, key, header.encoding, engine.parts.settings.codec_up)
        if header.offset_bytes != ticket.stager.num_bytes:
            return _resume(engine, ticket)

        def progressed(num_bytes: int) -> None:
            engine.handle(ev.PushProgressed(key=key, staged_bytes=num_bytes))

        whole = await _receive(ticket, requests, progressed)
        if ticket.answer.done():
            return await ticket.answer
        if not whole:
            return _resume(engine, ticket)
        await _decode(engine, ticket)
        engine.handle(ev.PushStaged(key=key))
    except DilocoError as error:
        engine.handle(
            ev.PushFailed(
                key=key,
                reason=error.reason,
                message=error.message,
                refused=error.reason not in _RETRIED,
            )
        )
    return await ticket.answer


async def _decode(engine: Engine, ticket: Ticket) -> None:
    assert ticket.stager is not None, "staged before it is decoded"
    payload = ticket.stager.finish()
    codec, fragment = ticket.encoding.codec, ticket.key.fragment
    vector: torch.Tensor = await engine.parts.tensors_runner.submit(
        lambda: engine.tensors.decode(codec, payload, fragment)
    )
    ticket.vector = vector


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
    if not engine.tickets.has_room(encoding.payload_bytes):
        raise DilocoError(
            Reason.OUT_OF_MEMORY_BUDGET, "too many bytes are in flight; push again later"
        )
    return Stager(encoding.payload_bytes, encoding.digest, high)


async def _receive(
    ticket: Ticket,
    requests: AsyncIterator[pb.PushRequest],
    progressed: Callable[[int], None],
) -> bool:
    """Stages chunks until the stream ends or the push is answered; False where others took over.

    Raises:
        DilocoError: what is wrong with the bytes.
    """
    ticket.streams += 1
    stream = ticket.streams
    async for request in _until_answered(ticket, requests):
        if ticket.streams != stream:
            return False
        if request.WhichOneof("kind") != "chunk":
            raise malformed("a push of more than one header")
        if ticket.stager is None:
            return True
        ticket.stager.add(request.chunk.offset_bytes, request.chunk.data)
        progressed(ticket.stager.num_bytes)
    return ticket.streams == stream


async def _until_answered(
    ticket: Ticket, requests: AsyncIterator[pb.PushRequest]
) -> AsyncIterator[pb.PushRequest]:
    """Yields messages, but never waits for one when the push is answered: stalled senders too."""
    iterator = aiter(requests)
    while not ticket.answer.done():
        reading = asyncio.ensure_future(_next(iterator))
        try:
            waiting: list[asyncio.Future[Any]] = [reading, ticket.answer]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not reading.done():
                reading.cancel()
        if ticket.answer.done() and not reading.done():
            return
        request = await reading
        if request is None:
            return
        yield request


async def _next(iterator: AsyncIterator[pb.PushRequest]) -> pb.PushRequest | None:
    return await anext(iterator, None)


async def _push_seed(
    engine: Engine, key: PushKey, header: pb.PushHeader, requests: AsyncIterator[pb.PushRequest]
) -> pb.PushResponse:
    refusal = engine.core.seed_refusal(key.learner_id, key.incarnation, key.fragment)
    if refusal is not None:
        return _seed_answer(engine, refusal, "the seed is not asked of this learner")
    try:
        stager = _stager(engine, key, header.encoding, FULL_CODEC)
        async for request in requests:
            stager.add(request.chunk.offset_bytes, request.chunk.data)
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
