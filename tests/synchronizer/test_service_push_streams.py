"""Push over gRPC, as streams: what broke is resumed, what is repeated or late is answered once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import torch

from decoupled_diloco.codecs import get_codec, payload_digest
from decoupled_diloco.errors import Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.wire import version_to
from tests.synchronizer.fake_learner import (
    ACCEPTED,
    DROPPED,
    REFUSED,
    RESUME,
    FakeLearner,
    Fleet,
    chunk_at,
    make_settings,
    refusal,
    serving,
    until,
    vector_for,
)

pytestmark = pytest.mark.asyncio


class BrokenPush:
    """A push whose connection is its own, so that it can break."""

    def __init__(self, learner: FakeLearner, messages: list[pb.PushRequest]) -> None:
        self._channel = learner.fleet.channel("broken")
        self._messages = messages
        stub = type(learner.fleet.stub)(self._channel)
        self.call = stub.Push(self._requests())

    async def _requests(self) -> AsyncIterator[pb.PushRequest]:
        for message in self._messages:
            yield message
        await asyncio.Event().wait()

    async def break_off(self) -> None:
        await self._channel.close()


def staged_bytes(fleet: Fleet) -> int:
    return sum(t.stager.num_bytes for t in fleet.engine.tickets if t.stager is not None)


async def test_a_push_that_broke_in_the_middle_is_resumed_where_it_stopped() -> None:
    async with serving(settings=make_settings(num_learners=1, codec_up="fp32")) as fleet:
        (a,) = await fleet.seeded("a")
        await a.step()
        pull = await a.hear("pull")
        payload = a.encode(vector_for(pull.fragment, a.num_elements(pull.fragment), 1))
        header = a.header_for(pull, payload)
        begun = [pb.PushRequest(header=header), chunk_at(payload, 0, 24)]
        broken = BrokenPush(a, begun)
        await until(lambda: staged_bytes(fleet) == 24)
        await broken.break_off()
        again = await a.send_all([pb.PushRequest(header=header)])
        assert (again.outcome, again.staged_bytes) == (RESUME, 24)
        header.offset_bytes = 24
        assert (await a.send(header, payload)).outcome == ACCEPTED
        await fleet.committed_is(1)
        assert not list(fleet.engine.tickets)


async def test_the_newest_stream_of_a_push_wins_and_the_older_one_is_told_to_resume() -> None:
    async with serving(settings=make_settings(num_learners=1, codec_up="fp32")) as fleet:
        (a,) = await fleet.seeded("a")
        await a.step()
        pull = await a.hear("pull")
        payload = a.encode(vector_for(pull.fragment, a.num_elements(pull.fragment), 1))
        header = a.header_for(pull, payload)
        older = fleet.stub.Push()
        await older.write(pb.PushRequest(header=header))
        await older.write(chunk_at(payload, 0, 16))
        await until(lambda: staged_bytes(fleet) == 16)
        newer = fleet.stub.Push()
        header.offset_bytes = 16
        await newer.write(pb.PushRequest(header=header))
        await newer.write(chunk_at(payload, 16, 16))
        await until(lambda: staged_bytes(fleet) == 32)
        await older.write(chunk_at(payload, 32, 16))
        answer = await older
        assert (answer.outcome, answer.staged_bytes) == (RESUME, 32)
        await newer.write(chunk_at(payload, 32, 1 << 20))
        await newer.done_writing()
        assert (await newer).outcome == ACCEPTED


async def test_a_push_that_goes_on_with_other_bytes_is_refused() -> None:
    async with serving(settings=make_settings(num_learners=1)) as fleet:
        (a,) = await fleet.seeded("a")
        await a.step()
        pull = await a.hear("pull")
        n = a.num_elements(pull.fragment)
        first, second = (a.encode(vector_for(1, n, seed)) for seed in (1, 2))
        begun = [pb.PushRequest(header=a.header_for(pull, first)), chunk_at(first, 0, 8)]
        assert (await a.send_all(begun)).outcome == RESUME
        answer = await a.send(a.header_for(pull, second), second)
        assert (answer.outcome, answer.reason) == (REFUSED, "MALFORMED")


@pytest.mark.parametrize(
    ("num_chunks", "reason"), [(0, "NO_PROGRESS"), (1, "TOO_LATE")], ids=["no bytes", "some"]
)
async def test_a_stalled_push_is_answered_and_holds_nobody(num_chunks: int, reason: str) -> None:
    settings = make_settings(quorum=1, num_learners=2, push_floor_s=0.3)
    async with serving(settings=settings) as fleet:
        a, b = await fleet.seeded("a", "b")
        for learner in (a, b):
            await learner.step()
        pulls = {x.learner_id: await x.hear("pull") for x in (a, b)}
        payload = b.encode(vector_for(1, b.num_elements(1), 1))
        chunks = [chunk_at(payload, 0, 8)] * num_chunks
        header = b.header_for(pulls["b"], payload)
        stalled = BrokenPush(b, [pb.PushRequest(header=header), *chunks])
        await until(lambda: list(fleet.engine.tickets))
        assert (await a.push(pulls["a"])).outcome == ACCEPTED
        answer = await asyncio.wait_for(stalled.call, 10)
        assert (answer.outcome, answer.reason) == (DROPPED, reason)
        await fleet.committed_is(1)
        assert not list(fleet.engine.tickets)
        late = await b.send(header, payload)
        assert (late.outcome, late.reason) == (DROPPED, reason), "the first answer stands"
        await stalled.break_off()


async def test_a_repeated_push_gets_the_first_answer_and_is_merged_once() -> None:
    """Also where both are sent at the same time."""
    results = []
    for num_copies in (1, 3):
        settings = make_settings(num_learners=1, outer_learning_rate=0.5)
        async with serving(settings=settings) as fleet:
            (a,) = await fleet.seeded("a")
            await a.step()
            pull = await a.hear("pull")
            copies = [a.push(pull) for _ in range(num_copies)]
            answers = await asyncio.gather(*copies, return_exceptions=True)
            assert all(x.outcome in {ACCEPTED, RESUME} for x in answers)
            assert any(x.outcome == ACCEPTED for x in answers)
            await fleet.committed_is(1)
            again = await a.push(pull, base=version_to(fleet.engine.updates.version(0)))
            assert (again.outcome, again.reason) == (ACCEPTED, "DUPLICATE")
            results.append(fleet.published()[pull.fragment][1])
            assert (await fleet.status()).totals.contributions == 1
    assert results[0] == results[1]


async def test_bytes_in_flight_are_bounded_and_a_push_that_found_no_room_comes_later() -> None:
    settings = make_settings(quorum=2, num_learners=2, codec_up="fp32")
    async with serving(settings=settings, max_staged_bytes=100) as fleet:
        a, b = await fleet.seeded("a", "b")
        for learner in (a, b):
            await learner.step()
        pulls = {x.learner_id: await x.hear("pull") for x in (a, b)}
        payload = a.encode(vector_for(1, a.num_elements(1), 1))
        begun = [pb.PushRequest(header=a.header_for(pulls["a"], payload)), chunk_at(payload, 0, 8)]
        assert (await a.send_all(begun)).outcome == RESUME
        assert fleet.engine.tickets.staged_bytes == len(payload)
        error = await refusal(b.push(pulls["b"]))
        assert error.reason is Reason.OUT_OF_MEMORY_BUDGET
        header = a.header_for(pulls["a"], payload, offset_bytes=8)
        assert (await a.send(header, payload)).outcome == ACCEPTED
        assert (await b.push(pulls["b"])).outcome == ACCEPTED
        await fleet.committed_is(1)


async def test_an_older_base_is_carried_over_exactly() -> None:
    """v + (now - base), bit for bit, where another learner was merged in between."""
    settings = make_settings(
        num_learners=2, grace=False, merge="average", codec_up="fp32", codec_down="fp32"
    )
    async with serving(settings=settings) as fleet:
        a, b = await fleet.seeded("a", "b")
        seed = fleet.engine.updates.published(1).clone()
        base = version_to(fleet.engine.updates.version(1))
        for step in range(1, 5):
            await a.turn()
            await fleet.committed_is(step)
        now = fleet.engine.updates.published(1)
        residual = fleet.engine.tensors.state(1).residual
        assert not torch.equal(now, seed)
        v = vector_for(1, b.num_elements(1), 77)
        await b.step()
        pull = await b.hear("pull")
        assert (pull.global_step, pull.fragment) == (5, 1)
        assert (await b.push(pull, v, base=base)).outcome == ACCEPTED
        await fleet.committed_is(5)
        merged = v + (now - seed)
        exact = (now + residual) - merged
        delta = get_codec("fp32").decode(get_codec("fp32").encode(exact - now), exact.numel())
        assert torch.equal(fleet.engine.updates.published(1), now + delta)
        wrong = (now + residual) - v
        assert not torch.equal(fleet.engine.updates.published(1), wrong)


async def test_a_base_older_than_its_own_contribution_is_refused() -> None:
    settings = make_settings(num_learners=1)
    async with serving(settings=settings) as fleet:
        (a,) = await fleet.seeded("a")
        base = version_to(fleet.engine.updates.version(1))
        for step in range(1, 5):
            await a.turn()
            await fleet.committed_is(step)
        await a.step()
        answer = await a.push(await a.hear("pull"), base=base)
        assert (answer.outcome, answer.reason) == (REFUSED, "ALREADY_MERGED")


async def test_an_answer_to_the_first_push_does_not_speak_for_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A push is dropped while it is decoded; its learner, asked again, sends another one."""
    async with serving(settings=make_settings(num_learners=1)) as fleet:
        (a,) = await fleet.seeded("a")
        await a.step()
        pull = await a.hear("pull")
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        submit = fleet.engine.parts.tensors_runner.submit

        def held(job: Callable[[], object]) -> Awaitable[object]:
            async def late() -> object:
                await gate
                return await submit(job)

            return asyncio.ensure_future(late())

        monkeypatch.setattr(fleet.engine.parts.tensors_runner, "submit", held)
        first = asyncio.ensure_future(a.push(pull))
        await until(
            lambda: [t for t in fleet.engine.tickets if t.stager and t.stager.num_bytes == 48]
        )
        declined = pb.PullDeclined(global_step=1, fragment=1, reason="NOT_READY")
        await a.say(pull_declined=declined)
        await until(lambda: not list(fleet.engine.tickets))
        await a.step()
        again = await a.hear("pull")
        payload = a.encode(vector_for(1, a.num_elements(1), 2))
        header = a.header_for(again, payload)
        begun = [pb.PushRequest(header=header), chunk_at(payload, 0, 8)]
        assert (await a.send_all(begun)).outcome == RESUME
        gate.set_result(None)
        assert (await first).outcome == DROPPED
        header.offset_bytes = 8
        assert (await a.send(header, payload)).outcome == ACCEPTED
        assert payload_digest(payload) == header.encoding.digest
