"""Report over gRPC: who may, what is said, and what becomes of a learner that does not listen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from synchronizer_server.core import events as ev
from synchronizer_server.store.memory import MemoryStore
from synchronizer_server.streams import ReportStream
from tests.synchronizer.fake_learner import (
    ACCEPTED,
    FakeLearner,
    Fleet,
    make_settings,
    refusal,
    serving,
    until,
)

pytestmark = pytest.mark.asyncio


async def ends_with(fleet: Fleet, *messages: pb.ReportRequest) -> DilocoError:
    """What a report stream of these messages ends with."""
    call = fleet.stub.Report(iter(messages))

    async def read() -> None:
        async for _ in call:
            pass

    return await refusal(read())


def hello(learner_id: str, term: int, number: int) -> pb.ReportRequest:
    incarnation = types_pb2.Incarnation(term=term, number=number)
    return pb.ReportRequest(hello=pb.ReportHello(learner_id=learner_id, incarnation=incarnation))


async def test_a_stream_without_a_right_hello_is_refused() -> None:
    async with serving() as fleet:
        await FakeLearner(fleet, "a").join()
        heartbeat = pb.ReportRequest(heartbeat=pb.Heartbeat())
        for messages, reason in [
            ([], Reason.MALFORMED),
            ([heartbeat], Reason.MALFORMED),
            ([pb.ReportRequest()], Reason.MALFORMED),
            ([hello("nobody", 1, 1)], Reason.UNKNOWN_LEARNER),
            ([hello("a", 1, 2)], Reason.UNKNOWN_LEARNER),
            ([hello("a", 0, 1)], Reason.FENCED),
        ]:
            assert (await ends_with(fleet, *messages)).reason is reason
        assert not fleet.engine.streams


@pytest.mark.parametrize("what", ["hello twice", "nothing", "local step", "tokens"])
async def test_a_report_that_cannot_be_ends_the_stream_and_nothing_of_it_is_kept(
    what: str,
) -> None:
    async with serving() as fleet:
        a = await fleet.learner("a")
        huge = 1 << 63
        step = pb.InnerStep(clock=types_pb2.Clock(own_step=1), num_steps=1)
        match what:
            case "hello twice":
                await a.say(hello=pb.ReportHello(learner_id="a", incarnation=a.incarnation))
            case "nothing":
                await a.say()
            case "local step":
                step.clock.own_step = huge
                await a.say(inner_step=step)
            case "tokens":
                step.num_tokens = huge
                await a.say(inner_step=step)
        end = await a.end()
        assert end is not None
        assert end.reason is Reason.MALFORMED
        learner = fleet.engine.core.state.roster.find("a")
        assert learner is not None
        assert (str(learner.state), learner.local_step) == ("disconnected", 0)


async def test_an_incarnation_of_an_earlier_life_of_the_synchronizer_joins_again() -> None:
    store = MemoryStore()
    fleet = await Fleet(store=store).start()
    (a,) = await fleet.seeded("a")
    await fleet.stop()
    async with serving(store=store) as again:
        end = await ends_with(again, hello("a", 1, 1))
        assert end.reason is Reason.STALE_TERM
        a.fleet = again
        joined = await a.join()
        assert (joined.incarnation.term, joined.incarnation.number) == (2, 2)
        assert (await ends_with(again, hello("a", 1, 1))).reason is Reason.FENCED


async def test_a_second_stream_of_the_same_incarnation_replaces_the_first() -> None:
    async with serving() as fleet:
        a, _ = await fleet.seeded("a", "b")
        first_queue = a.told
        a.told = asyncio.Queue()
        await a.open()
        second_queue, a.told = a.told, first_queue
        assert await a.end() is None
        a.told = second_queue
        await a.step()
        await a.hear("schedule")
        assert list(fleet.engine.streams) == ["a", "b"] or len(fleet.engine.streams) == 2
        learner = fleet.engine.core.state.roster.find("a")
        assert learner is not None
        assert learner.live


async def test_who_hangs_up_or_leaves_is_out_at_once() -> None:
    async with serving(settings=make_settings(quorum=1)) as fleet:
        a, b, c = await fleet.seeded("a", "b", "c")
        for learner in (a, b, c):
            await learner.step()
        for learner in (a, b, c):
            await learner.hear("pull")
        b.hang_up()
        await fleet.stub.Leave(pb.LeaveRequest(learner_id="c", incarnation=c.incarnation))
        pull = pb.Pull(global_step=1, fragment=1)
        assert (await a.push(pull)).outcome == ACCEPTED
        await fleet.committed_is(1)
        states = {x.learner_id: x.state for x in (await fleet.status()).learners}
        assert states == {"a": "live", "b": "disconnected", "c": "left"}


async def test_a_silent_learner_is_told_that_it_is_gone_and_may_open_again() -> None:
    settings = make_settings(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3)
    async with serving(settings=settings) as fleet:
        a = await fleet.learner("a")
        end = await a.end()
        assert end is not None
        assert end.reason is Reason.LEARNER_GONE
        await a.join()
        await a.open()


async def test_heartbeats_alone_keep_a_learner_live() -> None:
    settings = make_settings(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.5)
    async with serving(settings=settings) as fleet:
        a, b = await fleet.learner("a"), await fleet.learner("b")
        ending = asyncio.ensure_future(b.end())
        while not ending.done():
            await a.say(heartbeat=pb.Heartbeat())
            await asyncio.wait([ending], timeout=0.05)
        assert ending.result().reason is Reason.LEARNER_GONE
        learner = fleet.engine.core.state.roster.find("a")
        assert learner is not None
        assert learner.live


async def test_a_learner_that_does_not_read_is_cut_off_and_holds_nobody() -> None:
    """Its queue is thrown away, its reports are no longer taken, and no round asks it."""
    async with serving(settings=make_settings(num_learners=2, grace=False)) as fleet:
        (a,) = await fleet.seeded("a")
        deaf = FakeLearner(fleet, "deaf")
        await deaf.join()
        deaf.fleet.stub = type(fleet.stub)(channel := fleet.channel("deaf"))
        await deaf.open(read=False)
        roster = fleet.engine.core.state.roster
        await until(lambda: roster.find("deaf").live)
        stream = fleet.engine.streams["deaf"]
        await fill(stream)
        assert not stream.closed
        for _ in range(1024):
            fleet.engine.send(stream, pb.ReportResponse(stop=pb.Stop()))
        assert stream.closed
        await until(lambda: not roster.find("deaf").live)
        assert "deaf" not in fleet.engine.streams
        assert stream._queue.qsize() <= 1
        await a.turn()
        await fleet.committed_is(1)
        await channel.close()


async def test_a_learner_that_dies_while_it_does_not_read_is_out_at_once() -> None:
    """Its stream is blocked in a write then, which nobody ever finishes."""
    async with serving() as fleet:
        deaf = FakeLearner(fleet, "deaf")
        await deaf.join()
        deaf.fleet.stub = type(fleet.stub)(channel := fleet.channel("deaf"))
        await deaf.open(read=False)
        await until(lambda: "deaf" in fleet.engine.streams)
        stream = fleet.engine.streams["deaf"]
        await fill(stream)
        assert not stream.closed
        await channel.close()
        await until(lambda: "deaf" not in fleet.engine.streams)


async def fill(stream: ReportStream) -> None:
    """Says more than fits in any window, until nothing moves any more."""
    for _ in range(512):
        stream.send(pb.ReportResponse(drain=pb.Drain(reason="x" * 100_000)))
    before = 0
    while before != stream._queue.qsize():
        before = stream._queue.qsize()
        await asyncio.sleep(0.05)
    assert before > 0, "50 MB fit in no window"


async def test_a_failure_of_ours_while_a_report_is_handled_ends_the_engine_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await Fleet().start()
    a = await fleet.learner("a")
    handle = fleet.engine.core.handle

    def broken(event: ev.Event, now: float) -> list[object]:
        if not isinstance(event, ev.StepReported):
            return handle(event, now)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(fleet.engine.core, "handle", broken)
    await a.step()
    end = await a.end()
    assert end is not None
    assert end.reason is Reason.INTERNAL
    assert "a fault of ours" not in end.message
    assert fleet.engine.fatal.is_set()
    assert str(fleet.engine.failure) == "a fault of ours"
    assert "cannot go on" in caplog.text
    await fleet.stop()


async def test_a_complete_run_says_stop_to_all_and_to_whoever_comes_later() -> None:
    settings = make_settings(num_learners=2, total_global_steps=2, grace=False)
    async with serving(settings=settings) as fleet:
        a, b = await fleet.seeded("a", "b")
        await fleet.stub.Leave(pb.LeaveRequest(learner_id="b", incarnation=b.incarnation))
        for _ in range(2):
            await a.turn()
        assert (await a.hear("stop")).global_step == 2
        assert fleet.engine.complete.is_set()
        assert (await fleet.status()).state == "complete"
        late = FakeLearner(fleet, "b")
        await late.join(request_id="another-process")
        await late.open()
        assert (await late.hear("stop")).global_step == 2


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs the kernel's own count")
async def test_reports_ride_on_a_connection_of_their_own() -> None:
    """Two channels with connections of their own are two sockets of the server."""
    async with serving() as fleet:
        before = num_connections(fleet.port)
        control, bulk = fleet.channel("control"), fleet.channel("bulk")
        stub = type(fleet.stub)
        watch = stub(bulk).Watch(pb.WatchRequest(watcher_id="w"))
        report = stub(control).Report()
        await until(lambda: num_connections(fleet.port) == before + 2)
        watch.cancel()
        report.cancel()
        await control.close()
        await bulk.close()


def num_connections(port: int) -> int:
    """Established connections to a local port, as the kernel counts them."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    lines = [line.split() for t in tables if t.exists() for line in t.read_text().splitlines()]
    return sum(x[1].endswith(f":{port:04X}") and x[3] == "01" for x in lines)
