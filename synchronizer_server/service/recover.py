"""Recover: a recovering learner reads here what a donor sends here; nothing dials a learner."""

from __future__ import annotations

from collections.abc import AsyncIterator

from decoupled_diloco.codecs import CHUNK_BYTES
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.wire import (
    INNER_STATE_CODEC,
    incarnation_from,
    inner_state_limit,
    malformed,
)
from synchronizer_server.convert import MAX_FRAGMENTS, check_id
from synchronizer_server.core import events as ev
from synchronizer_server.engine import Engine
from synchronizer_server.recovery import Donation, Relay, first_of
from synchronizer_server.service.identity import require_current


async def recover(
    engine: Engine, requests: AsyncIterator[pb.RecoverRequest]
) -> AsyncIterator[pb.RecoverResponse]:
    """Serves one recovering learner, or takes one donor's inner state.

    Raises:
        DilocoError: who may not, is told why; NO_DONOR, RECOVERY_VOID, NO_PROGRESS where the
            recovery came to nothing.
    """
    first = await engine.limits.first(requests)
    if first is None or first.WhichOneof("kind") != "hello":
        raise malformed("a recovery does not begin with a hello")
    hello = first.hello
    check_id(hello.learner_id, "learner_id")
    require_current(engine, hello.learner_id, incarnation_from(hello.incarnation))
    if len(hello.clock.known_global_steps) > MAX_FRAGMENTS:
        raise malformed(f"versions of {len(hello.clock.known_global_steps)} fragments")
    if hello.donor:
        await _take(engine, hello, requests)
        return
    async for message in _give(engine, hello):
        yield message


# -- the recipient -------------------------------------------------------------------------------


async def _give(engine: Engine, hello: pb.RecoverHello) -> AsyncIterator[pb.RecoverResponse]:
    if engine.closed:
        raise DilocoError(Reason.DRAINING, "the synchronizer stops; ask again later")
    known = _known(engine, hello)
    relay = engine.relays.open(hello.learner_id, engine.core.state.term)
    outcome: DilocoError | None = DilocoError(Reason.LEARNER_GONE, "its stream broke")
    try:
        engine.handle(
            ev.RecoveryAsked(
                recovery_id=relay.recovery_id,
                learner_id=hello.learner_id,
                incarnation=incarnation_from(hello.incarnation),
                known_global_steps=known,
            )
        )
        async for message in relay.messages():
            yield message
            _progressed(engine, relay)
        outcome = None
    finally:
        engine.relays.close(relay, relay.error or outcome)
        if not engine.closed:
            engine.handle(ev.RecoveryEnded(recovery_id=relay.recovery_id))


def _known(engine: Engine, hello: pb.RecoverHello) -> tuple[int, ...]:
    """The version vector of a recipient: of every fragment, and none that is not published."""
    versions = engine.updates.versions()
    known = tuple(hello.clock.known_global_steps)
    if len(known) != len(versions) or any(
        k > v.global_step for k, v in zip(known, versions, strict=True)
    ):
        raise malformed(
            "a learner recovers with versions that it cannot have; watch for the parameters first"
        )
    return known


# -- the donor -----------------------------------------------------------------------------------


async def _take(
    engine: Engine, hello: pb.RecoverHello, requests: AsyncIterator[pb.RecoverRequest]
) -> None:
    relay = engine.relays.find(hello.recovery_id)
    donation = relay.donation if relay is not None else None
    caller = (hello.learner_id, incarnation_from(hello.incarnation))
    if (
        relay is None
        or donation is None
        or donation.over.done()
        or (donation.learner_id, donation.incarnation) != caller
    ):
        raise DilocoError(
            Reason.RECOVERY_VOID, f"recovery {hello.recovery_id[:40]!r} asks nothing of you (now)"
        )
    if donation.is_open:
        raise DilocoError(Reason.DUPLICATE, "another stream gives to this recovery already")
    donation.is_open = True
    error = DilocoError(Reason.LEARNER_GONE, "its stream broke")
    try:
        await _relay(engine, relay, donation, hello, requests)
    except DilocoError as wrong:
        error = wrong
        raise
    finally:
        # Does nothing where everything was sent: then it is no longer asked for anything.
        if not donation.over.done() and not engine.closed:
            engine.handle(
                ev.DonationFailed(
                    recovery_id=relay.recovery_id,
                    learner_id=donation.learner_id,
                    reason=error.reason,
                    message=error.message,
                )
            )


async def _relay(
    engine: Engine,
    relay: Relay,
    donation: Donation,
    hello: pb.RecoverHello,
    requests: AsyncIterator[pb.RecoverRequest],
) -> None:
    _check(engine, donation, hello)
    header = pb.RecoverHeader(
        donor_id=donation.learner_id, clock=hello.clock, encoding=hello.encoding
    )
    await _offer(engine, relay, donation, pb.RecoverResponse(header=header))
    expected, num_bytes = hello.encoding.payload_bytes, 0
    iterator = aiter(requests)
    while num_bytes < expected:
        request = await first_of(anext(iterator, None), donation.over)
        if donation.over.done():
            raise donation.over.result()
        if request is None:
            raise DilocoError(
                Reason.TRUNCATED, f"inner state ends at byte {num_bytes} of {expected}"
            )
        chunk = _chunk(request, num_bytes, expected)
        await _offer(engine, relay, donation, pb.RecoverResponse(chunk=chunk))
        num_bytes += len(chunk.data)
    donation.end(DilocoError(Reason.RECOVERY_VOID, "everything was sent"))
    relay.whole()
    _progressed(engine, relay)


def _check(engine: Engine, donation: Donation, hello: pb.RecoverHello) -> None:
    """Refuses a donor that has nothing to give, or not what was asked of it."""
    encoding, known = hello.encoding, tuple(hello.clock.known_global_steps)
    if not encoding.payload_bytes:
        raise DilocoError(Reason.NO_DONOR, "it has no inner state to give")
    if len(known) != len(donation.known) or any(
        a < b for a, b in zip(known, donation.known, strict=True)
    ):
        raise malformed("inner state from before the versions that were asked for")
    if encoding.codec != INNER_STATE_CODEC:
        raise DilocoError(
            Reason.CODEC_MISMATCH, f"encoded as {encoding.codec[:40]!r}; due is {INNER_STATE_CODEC}"
        )
    assert engine.layout is not None, "there are learners"
    limit = inner_state_limit(engine.layout)
    if encoding.payload_bytes > limit:
        raise DilocoError(
            Reason.OVERSIZED, f"{encoding.payload_bytes} bytes of inner state, at most {limit}"
        )


def _chunk(request: pb.RecoverRequest, offset: int, expected: int) -> types_pb2.Chunk:
    if request.WhichOneof("kind") != "chunk":
        raise malformed("a recovery of more than one hello")
    chunk = request.chunk
    if not 0 < len(chunk.data) <= CHUNK_BYTES or chunk.offset_bytes != offset:
        raise malformed(f"a chunk of {len(chunk.data)} bytes at {chunk.offset_bytes}, not {offset}")
    if offset + len(chunk.data) > expected:
        raise DilocoError(
            Reason.OVERSIZED, f"more than the {expected} bytes of inner state claimed"
        )
    return chunk


async def _offer(
    engine: Engine, relay: Relay, donation: Donation, message: pb.RecoverResponse
) -> None:
    """Hands a message on and says that there is progress, or who holds it up."""
    if relay.is_full:
        _progressed(engine, relay)
    await relay.offer(donation, message)
    _progressed(engine, relay)


def _progressed(engine: Engine, relay: Relay) -> None:
    if relay.donation is not None:
        engine.handle(
            ev.DonationProgressed(
                recovery_id=relay.recovery_id,
                learner_id=relay.donation.learner_id,
                is_blocked=relay.is_full,
                is_whole=relay.is_whole,
            )
        )
