"""Push over gRPC: what is refused leaves no trace, what broke is resumed, nobody is held up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio
import pytest
import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from tests.synchronizer.fake_learner import (
    ACCEPTED,
    DROPPED,
    REFUSED,
    RESUME,
    FakeLearner,
    chunk_at,
    make_settings,
    refusal,
    serving,
    until,
    vector_for,
)

pytestmark = pytest.mark.asyncio

Answer = pb.PushResponse | DilocoError
BadPush = Callable[[FakeLearner, pb.Pull, bytes], Awaitable[Answer]]


def altered(**changes: object) -> BadPush:
    """A push with another header."""

    async def push(learner: FakeLearner, pull: pb.Pull, payload: bytes) -> Answer:
        return await learner.send(learner.header_for(pull, payload, **changes), payload)

    return push


def claimed(**encoding: object) -> BadPush:
    """A push whose header claims another encoding."""
    return altered(encoding=encoding)


def vector_of(make: Callable[[torch.Tensor], torch.Tensor]) -> BadPush:
    """A well-formed push of a bad vector."""

    async def push(learner: FakeLearner, pull: pb.Pull, payload: bytes) -> Answer:
        vector = vector_for(pull.fragment, learner.num_elements(pull.fragment), 9)
        return await learner.push(pull, make(vector))

    return push


def messages(make: Callable[[pb.PushHeader, bytes], list[pb.PushRequest]]) -> BadPush:
    """A push of these messages."""

    async def push(learner: FakeLearner, pull: pb.Pull, payload: bytes) -> Answer:
        return await learner.send_all(make(learner.header_for(pull, payload), payload))

    return push


def as_error(push: BadPush) -> BadPush:
    """A push that ends with a status."""

    async def wrapped(learner: FakeLearner, pull: pb.Pull, payload: bytes) -> Answer:
        return await refusal(push(learner, pull, payload))

    return wrapped


def with_nan(vector: torch.Tensor) -> torch.Tensor:
    vector[3] = float("nan")
    return vector


def with_infinity(vector: torch.Tensor) -> torch.Tensor:
    vector[0] = float("-inf")
    return vector


async def garbage(learner: FakeLearner, pull: pb.Pull, payload: bytes) -> Answer:
    """Bytes that are no protobuf at all, then random ones under a header that fits."""
    call = learner.fleet._channel.stream_unary(
        "/decoupled_diloco.v1.SynchronizerService/Push",
        request_serializer=lambda data: data,
        response_deserializer=pb.PushResponse.FromString,
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await call(iter([b"\xff\xfe garbage \x00"]))
    generator = torch.Generator().manual_seed(5)
    noise = torch.randint(0, 256, (len(payload),), dtype=torch.uint8, generator=generator)
    return await learner.send(learner.header_for(pull, payload), bytes(noise.tolist()))


HUGE = 1 << 60
FOREIGN = types_pb2.Version(term=1, global_step=0, digest=b"x" * 32)
OLD = types_pb2.Version(term=0, global_step=0, digest=b"y" * 32)
BAD_PUSHES: dict[str, tuple[BadPush, int | None, Reason]] = {
    "claims too few bytes": (claimed(payload_bytes=3), REFUSED, Reason.TRUNCATED),
    "claims too many bytes": (claimed(payload_bytes=HUGE), REFUSED, Reason.OVERSIZED),
    "sends too many bytes": (
        messages(lambda h, p: [pb.PushRequest(header=h), chunk_at(p + p, 0, 1 << 20)]),
        REFUSED,
        Reason.OVERSIZED,
    ),
    "corrupt digest": (claimed(digest=bytes(32)), REFUSED, Reason.CORRUPT),
    "no digest": (claimed(digest=b""), REFUSED, Reason.CORRUPT),
    "another codec": (claimed(codec="fp32"), REFUSED, Reason.CODEC_MISMATCH),
    "no codec": (claimed(codec=""), REFUSED, Reason.CODEC_MISMATCH),
    "element count": (claimed(num_elements=5), REFUSED, Reason.MALFORMED),
    "nan": (vector_of(with_nan), REFUSED, Reason.NON_FINITE),
    "infinity": (vector_of(with_infinity), REFUSED, Reason.NON_FINITE),
    "norm": (vector_of(lambda v: 1e7 * v), REFUSED, Reason.NORM_BOUND),
    "unknown fragment": (altered(fragment=77), REFUSED, Reason.UNKNOWN_FRAGMENT),
    "another fragment": (altered(fragment=0), REFUSED, Reason.UNKNOWN_FRAGMENT),
    "round nobody asked for": (altered(global_step=900), REFUSED, Reason.NOT_ASKED),
    "base of another lineage": (altered(base=FOREIGN), DROPPED, Reason.BASE_MISMATCH),
    "stale base": (altered(base=OLD), DROPPED, Reason.STALE_BASE),
    "no base": (as_error(altered(base=None)), None, Reason.MALFORMED),
    "base that no record could keep": (
        as_error(altered(base=types_pb2.Version(global_step=HUGE, digest=b"x" * 32))),
        None,
        Reason.MALFORMED,
    ),
    "local step that no record could keep": (
        as_error(altered(local_step=HUGE)),
        None,
        Reason.MALFORMED,
    ),
    "another group": (as_error(altered(group=3)), None, Reason.MALFORMED),
    "no kind": (as_error(altered(kind=0)), None, Reason.MALFORMED),
    "stranger": (altered(learner_id="nobody"), REFUSED, Reason.UNKNOWN_LEARNER),
    "earlier term": (altered(term=0), REFUSED, Reason.STALE_TERM),
    "counters": (altered(num_steps=0), DROPPED, Reason.NOT_READY),
    "more steps than trained": (altered(num_steps=50), REFUSED, Reason.BAD_COUNTERS),
    "no tokens": (altered(num_tokens=0), DROPPED, Reason.NOT_READY),
    "header twice": (
        messages(lambda h, p: [pb.PushRequest(header=h)] * 2), REFUSED, Reason.MALFORMED
    ),
    "empty message": (
        messages(lambda h, p: [pb.PushRequest(header=h), pb.PushRequest()]),
        REFUSED,
        Reason.MALFORMED,
    ),
    "no header": (
        as_error(messages(lambda h, p: [chunk_at(p, 0, 1 << 20)])), None, Reason.MALFORMED
    ),
    "nothing": (as_error(messages(lambda h, p: [])), None, Reason.MALFORMED),
    "short": (
        messages(lambda h, p: [pb.PushRequest(header=h), chunk_at(p, 0, 11)]),
        RESUME,
        Reason.OFFSET_MISMATCH,
    ),
    "hole": (
        messages(lambda h, p: [pb.PushRequest(header=h), chunk_at(p, 8, 8)]),
        RESUME,
        Reason.OFFSET_MISMATCH,
    ),
    "resumes what never began": (altered(offset_bytes=16), RESUME, Reason.OFFSET_MISMATCH),
    "garbage": (garbage, REFUSED, Reason.CORRUPT),
}  # fmt: skip


async def first_round(bad: BadPush | None) -> tuple[bytes, Answer | None]:
    """The published copy of round 1, which two of three learners make; the third sends ``bad``."""
    async with serving(settings=make_settings(quorum=2, push_floor_s=30.0)) as fleet:
        a, b, c = await fleet.seeded("a", "b", "c")
        for learner in (a, b, c):
            await learner.step()
        pulls = {x.learner_id: await x.hear("pull") for x in (a, b, c)}
        assert {p.global_step for p in pulls.values()} == {1}
        assert (await a.push(pulls["a"])).outcome == ACCEPTED
        answer = None
        pull = pulls["c"]
        if bad is not None:
            payload = c.encode(vector_for(pull.fragment, c.num_elements(pull.fragment), 3))
            answer = await bad(c, pull, payload)
        assert (await b.push(pulls["b"], vector_for(1, b.num_elements(1), 2))).outcome == ACCEPTED
        # Whatever still waits for the third is over once it says that it has nothing.
        declined = pb.PullDeclined(global_step=1, fragment=pull.fragment, reason="NOT_READY")
        await c.say(pull_declined=declined)
        await fleet.committed_is(1)
        await until(lambda: not list(fleet.engine.tickets))
        return fleet.published()[pull.fragment][1], answer


async def clean_round(known: dict[str, bytes] = {}) -> bytes:  # noqa: B006 - computed once
    """The published copy of the same round without any push of the third."""
    if not known:
        known["copy"], _ = await first_round(None)
    return known["copy"]


@pytest.mark.parametrize("name", BAD_PUSHES)
async def test_a_bad_push_is_answered_and_leaves_no_trace(name: str) -> None:
    bad, outcome, reason = BAD_PUSHES[name]
    without = await clean_round()
    published, answer = await first_round(bad)
    assert published == without
    if isinstance(answer, DilocoError):
        assert outcome is None
        assert answer.reason is reason
    else:
        assert answer is not None
        assert (answer.outcome, answer.reason) == (outcome, str(reason))


async def test_a_good_push_does_leave_a_trace() -> None:
    """The comparison of the test above can fail, and the clean round is the same every time."""
    without, _ = await first_round(None)
    assert without == await clean_round()
    published, answer = await first_round(altered())
    assert isinstance(answer, pb.PushResponse)
    assert answer.outcome == ACCEPTED
    assert published != without


async def test_a_refused_push_is_counted_by_reason_and_named_in_the_status() -> None:
    async with serving(settings=make_settings(num_learners=1)) as fleet:
        (a,) = await fleet.seeded("a")
        await a.step()
        pull = await a.hear("pull")
        answer = await a.push(pull, with_nan(vector_for(1, a.num_elements(1), 1)))
        assert "diverged" in answer.message
        status = await fleet.status()
        assert dict(status.totals.pushes_by_reason) == {"NON_FINITE": 1}
        (learner,) = status.learners
        assert (learner.refused, learner.last_reason) == (1, "NON_FINITE")


async def test_what_strangers_push_is_not_remembered() -> None:
    """Else a stranger fills the memory with keys that nobody will ever ask for."""
    async with serving() as fleet:
        learner = await fleet.learner("a")
        stranger = FakeLearner(fleet, "nobody")
        stranger.incarnation = learner.incarnation
        remembered = fleet.engine.core._desk._answers
        for _ in range(3):
            header = pb.PushHeader(
                kind=pb.PUSH_KIND_OUTER_GRADIENT, learner_id="nobody",
                base=types_pb2.Version(digest=b"x"),
            )  # fmt: skip
            assert (await refusal(stranger.send(header, b""))).reason is Reason.MALFORMED
        header = pb.PushHeader(kind=pb.PUSH_KIND_OUTER_GRADIENT, learner_id="x" * 5000)
        assert (await refusal(stranger.send(header, b""))).reason is Reason.MALFORMED
        assert not remembered
