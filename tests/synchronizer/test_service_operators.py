"""What operators ask over gRPC: quorum, drain, a fragment put back; each once, with a reason."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
import torch

from decoupled_diloco.errors import Reason
from decoupled_diloco.v1 import admin_pb2 as pb
from decoupled_diloco.v1 import synchronizer_pb2
from decoupled_diloco.wire import held_to
from synchronizer_server.core import events as ev
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import (
    PATIENCE_S,
    FakeLearner,
    Fleet,
    make_settings,
    refusal,
    serving,
    until,
)

pytestmark = pytest.mark.asyncio


def set_quorum(fleet: Fleet, quorum: int, request_id: str = "q") -> object:
    request = pb.SetQuorumRequest(request_id=request_id, quorum=quorum)
    return fleet.admin.SetQuorum(request, timeout=PATIENCE_S)


def drain(fleet: Fleet, learner_id: str, request_id: str = "d") -> object:
    request = pb.DrainLearnerRequest(
        request_id=request_id, learner_id=learner_id, reason="new\ndisk"
    )
    return fleet.admin.DrainLearner(request, timeout=PATIENCE_S)


def roll_back(
    fleet: Fleet, fragment: int, *, request_id: str = "r", reason: str = "it went bad",
    timeout_s: float = PATIENCE_S,
) -> object:  # fmt: skip
    request = pb.RollBackFragmentRequest(request_id=request_id, fragment=fragment, reason=reason)
    return fleet.admin.RollBackFragment(request, timeout=timeout_s)


async def test_the_quorum_is_set_once_shown_and_warned_of_above_what_is_live(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(settings=make_settings(grace=False)) as fleet:
        (a,) = await fleet.seeded("a")
        with caplog.at_level(logging.WARNING):
            assert (await set_quorum(fleet, 2)).quorum == 2
        assert "only 1 learners are live" in caplog.text
        assert (await fleet.status()).quorum == 2
        await set_quorum(fleet, 1, "other")
        assert (await set_quorum(fleet, 2)).quorum == 2, "the answer of the first time"
        assert (await fleet.status()).quorum == 1, "and nothing else"
        await a.turn()
        await fleet.committed_is(1)


@pytest.mark.parametrize("quorum", [0, 100_001, 2**32 - 1])
async def test_a_quorum_that_cannot_be_is_refused(quorum: int) -> None:
    async with serving() as fleet:
        assert (await refusal(set_quorum(fleet, quorum))).reason is Reason.CONFIG_INVALID
        assert (await refusal(set_quorum(fleet, 1, ""))).reason is Reason.MALFORMED
        assert (await fleet.status()).quorum == 1
        assert (await set_quorum(fleet, 1, "q")).quorum == 1, "a refusal is no answer to keep"


async def test_a_quorum_above_the_planned_learners_is_refused_where_nobody_else_may_join() -> None:
    async with serving(settings=make_settings(num_learners=3)) as fleet:
        error = await refusal(set_quorum(fleet, 4))
        assert error.reason is Reason.QUORUM_ABOVE_LEARNERS
        assert "quorum is 4 but only 3 learners are planned" in error.message
        assert (await fleet.status()).quorum == 1
        assert (await set_quorum(fleet, 3, "all")).quorum == 3
    leased = make_settings(num_learners=3, data_mode="leases", grace=False)
    async with serving(settings=leased) as fleet:
        await fleet.seeded("a")
        assert (await set_quorum(fleet, 4)).quorum == 4, "more may join"
        (wait,) = [x for x in (await fleet.status()).waits if x.reason == "quorum"]
        assert "not live: 3 more that never joined" in wait.detail


@pytest.mark.parametrize("kept", [True, False])
async def test_the_quorum_outlives_a_restart_in_the_membership_or_in_the_record(
    kept: bool,
) -> None:
    store, membership = MemoryStore(), MemoryMembership()
    settings = make_settings(num_learners=2)
    first = await Fleet(settings=settings, store=store, membership=membership).start()
    a, b = await first.seeded("a", "b")
    await set_quorum(first, 2)
    for learner in (a, b):
        await learner.step()
    for learner in (a, b):
        await learner.push(await learner.hear("pull"))
    await first.committed_is(1)
    await first.stop()
    again = membership if kept else MemoryMembership()
    async with serving(settings=settings, store=store, membership=again) as second:
        assert (await second.status()).quorum == 2


async def test_a_learner_is_asked_to_leave_on_its_report_stream() -> None:
    async with serving() as fleet:
        a = await fleet.learner("a")
        await drain(fleet, "a")
        told = await a.hear("drain")
        assert isinstance(told, synchronizer_pb2.Drain)
        assert told.reason == "new disk"
        error = await refusal(drain(fleet, "b", "d2"))
        assert error.reason is Reason.UNKNOWN_LEARNER
        assert "learners are a" in error.message
        a.hang_up()
        await until(lambda: not fleet.engine.streams)
        error = await refusal(drain(fleet, "a", "d3"))
        assert error.reason is Reason.UNAVAILABLE, "it may be back: try again"
        assert "disconnected" in error.message


async def test_a_learner_that_was_drained_is_so_for_the_next_synchronizer_too() -> None:
    store, settings = MemoryStore(), make_settings(num_learners=2)
    async with serving(settings=settings, store=store) as fleet:
        a, b = await fleet.seeded("a", "b")
        await drain(fleet, "b")
        await b.hear("drain")
        goodbye = synchronizer_pb2.LeaveRequest(learner_id="b", incarnation=b.incarnation)
        await fleet.stub.Leave(goodbye, timeout=PATIENCE_S)
        assert states(await fleet.status()) == {"a": "live", "b": "drained"}
        assert (await drain(fleet, "b", "again")).already_drained
        await a.turn()
        await fleet.committed_is(1)
    async with serving(settings=settings, store=store) as later:
        assert states(await later.status()) == {"a": "disconnected", "b": "drained"}
        assert (await drain(later, "b", "again")).already_drained
        await later.learner("b")
        assert states(await later.status())["b"] == "live", "started again, it is let in"
        assert not (await drain(later, "b", "anew")).already_drained


def states(status: pb.GetStatusResponse) -> dict[str, str]:
    return {x.learner_id: x.state for x in status.learners}


async def trained(fleet: Fleet, rounds: int) -> FakeLearner:
    (a,) = await fleet.seeded("a")
    for step in range(1, rounds + 1):
        await a.turn()
        await fleet.committed_is(step)
    return a


async def test_a_fragment_is_put_back_bit_for_bit_persisted_and_sent_whole() -> None:
    store = MemoryStore()
    async with serving(settings=make_settings(num_learners=1), store=store) as fleet:
        a = await trained(fleet, 8)
        engine = fleet.engine
        fragment = (engine.core.state.last_opened + 1) % 4
        before = engine.core.state.lineage.before(fragment)
        assert before is not None
        older = engine.updates.copy_at(fragment, before)
        assert older is not None
        assert not torch.equal(older, engine.updates.published(fragment))
        held = held_to(dict(enumerate(engine.updates.versions())))
        answer = asyncio.ensure_future(roll_back(fleet, fragment))
        while not answer.done():  # the rounds before it are ordinary ones
            await a.step()
            pull = await a.hear("pull")
            assert pull.fragment != fragment
            await a.push(pull)
            await asyncio.wait([answer], timeout=0.05)
        version = (await answer).version
        assert version.digest == before.digest
        assert torch.equal(engine.updates.published(fragment), older)
        state = engine.tensors.state(fragment)
        assert not state.residual.any()
        assert not state.momentum.any()
        record, _ = store.load()
        assert (record.fragment, record.rolled_back) == (fragment, "it went bad")
        updates = engine.updates.plan(fragment, engine.updates.version(fragment))
        assert updates == []
        (update,) = engine.updates.plan(fragment, None)
        assert update.base is None
        watch = fleet.stub.Watch(synchronizer_pb2.WatchRequest(watcher_id="w", held=held))
        async for message in watch:
            if message.WhichOneof("kind") == "header" and message.header.fragment == fragment:
                assert message.header.kind == synchronizer_pb2.UPDATE_KIND_FULL
                assert message.header.result == version
                break
        watch.cancel()
        again = await roll_back(fleet, fragment)
        assert again.version == version, "the same request is done once"
        error = await refusal(roll_back(fleet, fragment, request_id="r2"))
        assert error.reason is Reason.STALE_BASE, "nothing older is a base any more"
    async with serving(settings=make_settings(num_learners=1), store=store) as second:
        assert second.engine.updates.version(fragment).digest == before.digest


async def test_rounds_go_on_after_a_fragment_was_put_back() -> None:
    async with serving(settings=make_settings(num_learners=1)) as fleet:
        a = await trained(fleet, 8)
        answer = asyncio.ensure_future(roll_back(fleet, 2))
        await until(lambda: fleet.engine.core.state.roll_backs or answer.done())
        async with asyncio.timeout(3 * PATIENCE_S):
            while fleet.committed < 16:  # a learner steps on, whether it is asked or not
                await a.step()
                try:
                    async with asyncio.timeout(0.5):
                        pull = await a.hear("pull")
                except TimeoutError:
                    continue
                await a.push(pull)
        await answer
        assert fleet.engine.updates.version(2).global_step > 8
        assert {v.global_step > 8 for v in fleet.engine.updates.versions()} == {True}


async def test_what_cannot_be_put_back_is_refused_and_who_waits_hears_of_the_end() -> None:
    fleet = await Fleet(settings=make_settings(num_learners=1)).start()
    assert (await refusal(roll_back(fleet, 0))).reason is Reason.STARTING
    await trained(fleet, 5)
    error = await refusal(roll_back(fleet, 4))
    assert error.reason is Reason.UNKNOWN_FRAGMENT
    assert error.message == "there is no fragment 4; fragments are 0 to 3"
    error = await refusal(roll_back(fleet, 1, reason=" \n"))
    assert error.reason is Reason.CONFIG_INVALID
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await roll_back(fleet, 1, request_id="late", timeout_s=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert fleet.engine.core.state.roll_backs, "whoever hangs up has ordered it all the same"
    waiting = asyncio.ensure_future(refusal(roll_back(fleet, 1, request_id="late")))
    fleet.engine.handle(ev.DrainStarted())
    assert (await waiting).reason is Reason.DRAINING
    await fleet.stop()
