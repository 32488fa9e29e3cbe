"""Hostile peers: refused or bounded with a reason, while an honest learner's rounds go on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import grpc
import pytest

from decoupled_diloco.channel import error_from_rpc
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from synchronizer_server import limits
from synchronizer_server.service import report as report_module
from tests.synchronizer.fake_learner import (
    ACCEPTED,
    DROPPED,
    PATIENCE_S,
    REFUSED,
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


async def silence() -> AsyncIterator[object]:
    """A stream of requests that never says anything."""
    await asyncio.Event().wait()
    yield None


async def rounds_go_on(fleet: Fleet, honest: FakeLearner, count: int = 3) -> None:
    """The honest learner trains, answers what it is asked, and rounds are committed."""
    until_step = fleet.committed + count
    async with asyncio.timeout(PATIENCE_S):
        while fleet.committed < until_step:
            await honest.step()
            try:
                async with asyncio.timeout(0.2):
                    pull = await honest.hear("pull")
            except TimeoutError:
                continue
            assert (await honest.push(pull)).outcome == ACCEPTED


async def ends(call: grpc.aio.Call) -> DilocoError:
    """What a stream ends with, read to its end."""
    try:
        if isinstance(call, grpc.aio.StreamUnaryCall):
            await call
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    raise AssertionError("ended well")


def alone() -> object:
    return make_settings(num_learners=2, grace=False)


async def test_a_thousand_silent_streams_are_bounded_and_keep_nobody_out() -> None:
    async with serving(settings=alone()) as fleet:
        (honest,) = await fleet.seeded("honest")
        channel = fleet.channel("hostile")
        stub = type(fleet.stub)(channel)
        calls = [stub.Report(silence()) for _ in range(500)]
        calls += [stub.Push(silence()) for _ in range(500)]
        endings = [asyncio.ensure_future(ends(call)) for call in calls]
        await until(lambda: sum(x.done() for x in endings) >= 1000 - limits.MAX_SILENT)
        assert fleet.engine.limits.num_silent <= limits.MAX_SILENT
        reasons = {x.result().reason for x in endings if x.done()}
        assert reasons == {Reason.TOO_MANY_STREAMS}
        await rounds_go_on(fleet, honest)
        newcomer = await fleet.learner("newcomer")
        await newcomer.step()
        for ending in endings:
            ending.cancel()
        await channel.close()
        await until(lambda: fleet.engine.limits.num_silent == 0)


async def test_who_never_says_hello_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELLO_S", 0.05)
    async with serving() as fleet:
        for call in (fleet.stub.Report(silence()), fleet.stub.Push(silence())):
            error = await asyncio.wait_for(ends(call), 20.0)
            assert error.reason is Reason.NO_PROGRESS
            assert "nothing was said" in error.message


async def test_one_learner_or_observer_opens_no_more_streams_than_it_may() -> None:
    async with serving(settings=alone()) as fleet:
        honest, evil = await fleet.seeded("honest", "evil")
        request = pb.WatchRequest(watcher_id="evil", incarnation=evil.incarnation)
        channel = fleet.channel("hostile")
        stub = type(fleet.stub)(channel)
        watches = [stub.Watch(request) for _ in range(limits.MAX_PER_PEER + 50)]
        endings = [asyncio.ensure_future(ends(call)) for call in watches]
        await until(lambda: sum(x.done() for x in endings) >= 50)
        assert {x.result().reason for x in endings if x.done()} == {Reason.TOO_MANY_STREAMS}
        observers = [
            stub.Watch(pb.WatchRequest(watcher_id=f"w{i}")) for i in range(limits.MAX_OBSERVERS + 9)
        ]
        endings += [asyncio.ensure_future(ends(call)) for call in observers]
        await until(lambda: sum(x.done() for x in endings) >= 59)
        good = fleet.stub.Watch(pb.WatchRequest(watcher_id="x", incarnation=honest.incarnation))
        good.cancel()
        await rounds_go_on(fleet, honest)
        for ending in endings:
            ending.cancel()
        await channel.close()
        await until(lambda: not fleet.engine.limits._open["watch", "evil"])
        await until(lambda: not fleet.engine.limits._open["watch", ""])
        await rounds_go_on(fleet, honest, 1)


async def test_a_flood_of_reports_is_read_slowly_and_holds_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "BURST_MESSAGES", 50)
    async with serving(settings=alone()) as fleet:
        honest, evil = await fleet.seeded("honest", "evil")

        async def flood() -> None:
            while True:
                await evil.say(heartbeat=pb.Heartbeat())

        flooding = asyncio.ensure_future(flood())
        await until(lambda: "reports too fast" in caplog.text)
        await rounds_go_on(fleet, honest)
        assert not flooding.done(), "slowed down, not cut off"
        flooding.cancel()
        assert caplog.text.count("reports too fast") == 1


async def test_the_throttle_lets_a_burst_through_and_then_a_steady_rate() -> None:
    now = [0.0]
    throttle = limits.Throttle(lambda: now[0])
    assert {throttle.delay_s() for _ in range(limits.BURST_MESSAGES)} == {0.0}
    read = 0
    while now[0] < 2.0:
        now[0] += throttle.delay_s()
        read += 1
    assert read == pytest.approx(2.0 * limits.MESSAGES_PER_S, rel=0.02)
    assert report_module.MESSAGES_PER_S == limits.MESSAGES_PER_S


async def test_garbage_bytes_are_refused_and_repetition_brings_quarantine() -> None:
    settings = make_settings(num_learners=2, grace=False, quarantine_after=3)
    async with serving(settings=settings) as fleet:
        honest, evil = await fleet.seeded("honest", "evil")
        for _ in range(3):
            await evil.step()
            pull = await evil.hear("pull")
            answer = await evil.push(pull, encoding={"digest": b"?" * 32})
            assert (answer.outcome, answer.reason) == (REFUSED, "CORRUPT")
        told = await evil.hear("quarantine")
        assert isinstance(told, pb.Quarantine)
        assert "CORRUPT was the last of 3 pushes" in told.reason
        assert told.seconds == 120.0, "two heartbeat time-outs"
        (status,) = [x for x in (await fleet.status()).learners if x.learner_id == "evil"]
        assert status.quarantine == told.reason
        assert status.state == "live"
        await evil.step()
        await rounds_go_on(fleet, honest)
        evil.told = asyncio.Queue()
        await evil.open()
        again = await evil.hear("quarantine")
        assert isinstance(again, pb.Quarantine)
        assert again.reason == told.reason, "said again on a new stream"
        assert 0.0 < again.seconds <= 120.0
        watch = fleet.stub.Watch(pb.WatchRequest(watcher_id="evil", incarnation=evil.incarnation))
        assert (await watch.read()).WhichOneof("kind") == "header", "updates go on"
        watch.cancel()


async def test_a_norm_far_above_the_usual_is_refused_over_the_wire() -> None:
    settings = make_settings(num_learners=2, quorum=2, max_outer_gradient_norm=1e9)
    async with serving(settings=settings) as fleet:
        honest, evil = await fleet.seeded("honest", "evil")
        for step in range(1, 17):  # four contributions of both to each fragment
            for learner in (honest, evil):
                await learner.step()
            for learner in (honest, evil):
                assert (await learner.push(await learner.hear("pull"))).outcome == ACCEPTED
            await fleet.committed_is(step)
        for learner in (honest, evil):
            await learner.step()
        pull = await evil.hear("pull")
        vector = 1e4 * vector_for(pull.fragment, evil.num_elements(pull.fragment), 1)
        answer = await evil.push(pull, vector)
        assert (answer.outcome, answer.reason) == (REFUSED, "NORM_BOUND")
        found = re.search(
            r"norm ([0-9.]+) of the outer gradient is above ([0-9.]+),", answer.message
        )
        assert found is not None
        norm, bound = (float(x) for x in found.groups())
        assert norm == pytest.approx(float(vector.norm()), rel=0.01)
        assert norm > bound > 0.0
        assert "50 times what is usual" in answer.message


async def test_a_push_that_stalls_in_mid_stream_ends_in_time_and_frees_its_memory() -> None:
    settings = make_settings(num_learners=2, grace=False, push_floor_s=0.3)
    async with serving(settings=settings) as fleet:
        honest, evil = await fleet.seeded("honest", "evil")
        await evil.step()
        pull = await evil.hear("pull")
        payload = evil.encode(vector_for(pull.fragment, evil.num_elements(pull.fragment), 1))
        header = evil.header_for(pull, payload)

        async def stalls() -> AsyncIterator[pb.PushRequest]:
            yield pb.PushRequest(header=header)
            yield chunk_at(payload, 0, 8)
            await asyncio.Event().wait()

        answer = await fleet.stub.Push(stalls(), timeout=20.0)
        assert (answer.outcome, answer.reason) == (DROPPED, "TOO_LATE")
        assert fleet.engine.tickets.staged_bytes == 0
        assert not list(fleet.engine.tickets)
        await rounds_go_on(fleet, honest)


async def test_a_seed_that_stalls_in_mid_stream_ends_in_time() -> None:
    settings = make_settings(push_floor_s=0.2, push_timeout_s=0.2)
    async with serving(settings=settings) as fleet:
        a = await fleet.learner("a")
        payload = bytes(4 * a.num_elements(0))
        encoding = {"codec": "fp32", "num_elements": a.num_elements(0)}
        header = a.header(payload, kind=pb.PUSH_KIND_SEED, fragment=0, encoding=encoding)

        async def stalls() -> AsyncIterator[pb.PushRequest]:
            yield pb.PushRequest(header=header)
            yield chunk_at(payload, 0, 8)
            await asyncio.Event().wait()

        answer = await fleet.stub.Push(stalls(), timeout=20.0)
        assert (answer.outcome, answer.reason) == (REFUSED, "NO_PROGRESS")


async def test_replays_old_lives_lower_terms_and_absurd_counters_change_nothing() -> None:
    settings = make_settings(num_learners=2, grace=False, push_floor_s=0.5)
    async with serving(settings=settings) as fleet:
        honest, evil = await fleet.seeded("honest", "evil")
        await evil.step()
        pull = await evil.hear("pull")
        payload = evil.encode(vector_for(pull.fragment, evil.num_elements(pull.fragment), 1))
        absurd = {"num_tokens": 2**44, "num_steps": 1, "local_step": 2**40}
        header = evil.header_for(pull, payload, **absurd)
        assert (await evil.send(header, payload)).outcome == ACCEPTED
        await fleet.committed_is(1)
        replayed = await evil.send(header, payload)
        assert (replayed.outcome, replayed.reason) == (ACCEPTED, "DUPLICATE")
        learner = fleet.engine.core.state.roster.find("evil")
        assert learner is not None
        assert learner.num_tokens_merged == 2 * 64, "twice what it reported per step, no more"
        assert learner.merged_steps[1] <= 1 + 8
        old = types_pb2.Incarnation(term=1, number=0)
        for changes, reason in [
            ({"incarnation": old}, "FENCED"),
            ({"term": 0, "global_step": 98}, "STALE_TERM"),
            ({"global_step": 99}, "NOT_ASKED"),
        ]:
            answer = await evil.send(evil.header_for(pull, payload, **changes), payload)
            assert (answer.outcome, answer.reason) == (REFUSED, reason)
        await evil.say(
            inner_step=pb.InnerStep(
                clock=types_pb2.Clock(own_step=2**50), num_tokens=2**50, num_steps=2**32 - 1
            )
        )
        await rounds_go_on(fleet, honest)
        assert (await fleet.status()).state == "running"


async def test_messages_that_are_no_protobuf_end_the_stream_and_nothing_else() -> None:
    async with serving(settings=alone()) as fleet:
        (honest,) = await fleet.seeded("honest")
        channel = fleet.channel("hostile")
        for method in ("Report", "Push", "Watch", "Join", "Recover"):
            path = f"/decoupled_diloco.v1.SynchronizerService/{method}"
            call = channel.stream_stream(path)(iter([b"\xff" * 99]))

            async def read(call: grpc.aio.StreamStreamCall = call) -> None:
                async for _ in call:
                    pass

            assert (await refusal(read())).reason in {
                Reason.MALFORMED, Reason.INTERNAL, Reason.UNIMPLEMENTED,
            }  # fmt: skip
        await rounds_go_on(fleet, honest)
        assert not list(fleet.engine.tickets)
        await channel.close()
