"""Watch over gRPC: chains, full fragments, foreign versions, slow watchers, observers."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import Version
from synchronizer_server.service.watch import watch
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import (
    FakeLearner,
    Fleet,
    make_settings,
    refusal,
    serving,
    until,
)
from tests.synchronizer.fake_watcher import FakeWatcher

pytestmark = pytest.mark.asyncio

DELTA, FULL = pb.UPDATE_KIND_DELTA, pb.UPDATE_KIND_FULL
Held = dict[int, tuple[Version, torch.Tensor]]


async def rounds(fleet: Fleet, learner: FakeLearner, num_rounds: int) -> None:
    for _ in range(num_rounds):
        before = fleet.committed
        await learner.turn()
        await fleet.committed_is(before + 1)


def alone(**changes: object) -> dict[str, object]:
    return {"settings": make_settings(num_learners=1, **changes)}


async def test_a_watcher_that_follows_gets_deltas_alone_and_holds_every_bit() -> None:
    async with serving(**alone()) as fleet:
        (a,) = await fleet.seeded("a")
        watcher = FakeWatcher(fleet, watcher_id="a", incarnation=a.incarnation).start()
        await until(watcher.follows)
        assert sorted(watcher.kinds) == [(i, FULL) for i in range(4)]
        for _ in range(9):
            await rounds(fleet, a, 1)
            await until(watcher.follows)
        assert {k for _, k in watcher.kinds[4:]} == {DELTA}
        assert [f for f, _ in watcher.kinds[4:]] == [1, 2, 3, 0, 1, 2, 3, 0, 1]
        await until(lambda: watcher.caught_up[-1].own_step == 9)
        clock = watcher.caught_up[-1]
        assert list(clock.known_global_steps) == [8, 9, 6, 7]
        assert clock.term == 1
        (learner,) = (await fleet.status()).learners
        assert learner.bytes_down > 0
        await watcher.stop()


@pytest.mark.parametrize(
    ("num_missed", "kinds"),
    [(0, []), (1, [DELTA]), (2, [FULL]), (4, [FULL])],
    ids=["none", "one", "as many bytes as a full one", "more than is retained"],
)
async def test_who_missed_updates_gets_the_shorter_of_chain_and_full(
    num_missed: int, kinds: list[int]
) -> None:
    """Two bf16 deltas take as many bytes as the fp32 fragment: then it is the fragment."""
    async with serving(**alone(retained_updates=3)) as fleet:
        (a,) = await fleet.seeded("a")
        watcher = FakeWatcher(fleet).start()
        await until(watcher.follows)
        await watcher.stop()
        await rounds(fleet, a, 4 * num_missed)
        again = FakeWatcher(fleet).start(watcher.held)
        await until(lambda: again.caught_up)
        assert again.follows()
        assert sorted(again.kinds) == sorted((f, k) for f in range(4) for k in kinds)
        await again.stop()


async def test_a_version_that_is_not_on_our_lineage_is_replaced_even_if_newer() -> None:
    async with serving(**alone()) as fleet:
        (a,) = await fleet.seeded("a")
        await rounds(fleet, a, 4)
        foreign: Held = {i: (Version(9, 1000, bytes([i]) * 32), torch.zeros(1)) for i in range(4)}
        watcher = FakeWatcher(fleet).start(foreign)
        await until(watcher.follows)
        assert {k for _, k in watcher.kinds} == {FULL}
        await watcher.stop()


async def test_the_same_bits_under_another_number_are_replaced_too() -> None:
    """A version is its number and its bits: the next outer gradient names both as its base."""
    async with serving(**alone()) as fleet:
        await fleet.seeded("a")
        watcher = FakeWatcher(fleet).start()
        await until(watcher.follows)
        await watcher.stop()
        renamed = {i: (Version(7, 70, v.digest), t) for i, (v, t) in watcher.held.items()}
        again = FakeWatcher(fleet).start(renamed)
        await until(lambda: again.caught_up)
        assert again.held.keys() == watcher.held.keys()
        assert all(again.held[i][0] == v for i, (v, _) in watcher.held.items())
        await again.stop()


async def test_a_round_that_would_publish_nan_changes_nothing_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It makes a version with the same bits, which watchers follow and learners build on."""

    def diverged(*_: object) -> object:
        raise DilocoError(Reason.NON_FINITE, "the run has diverged")

    async with serving(**alone()) as fleet:
        (a,) = await fleet.seeded("a")
        watcher = FakeWatcher(fleet).start()
        await until(watcher.follows)
        before = fleet.published()
        with monkeypatch.context() as patched:
            patched.setattr("synchronizer_server.tensors.advance", diverged)
            await rounds(fleet, a, 1)
        after = fleet.published()
        assert after[1][1] == before[1][1]
        assert (after[1][0].global_step, before[1][0].global_step) == (1, 0)
        assert "round 1 changes nothing" in caplog.text
        await rounds(fleet, a, 4)
        assert fleet.published()[1][1] != before[1][1]
        await until(watcher.follows)
        assert all(watcher.held[i][0] == v for i, (v, _) in fleet.published().items())
        await watcher.stop()


async def test_a_watcher_that_reads_nothing_slows_nobody_and_grows_no_memory() -> None:
    """It reads from what is retained: nothing is queued for it, however far it falls behind."""
    async with serving(**alone(retained_updates=2)) as fleet:
        (a,) = await fleet.seeded("a")
        prompt = FakeWatcher(fleet).start()
        slow = watch(fleet.engine, pb.WatchRequest(watcher_id="slow"))
        headers = [(await anext(slow)).header]
        await rounds(fleet, a, 24)
        await until(prompt.follows)
        assert all(len(shelf.chain) <= 2 for shelf in fleet.engine.updates._shelves)
        while (message := await anext(slow)).WhichOneof("kind") != "caught_up":
            if message.WhichOneof("kind") == "header":
                headers.append(message.header)
        assert message.caught_up.clock.own_step == 24
        # The copies of the seed that it was reading, then what brings it up to date at once.
        assert len(headers) <= 3 * 4
        results = {h.fragment: h.result.digest for h in headers}
        assert results == {i: v.digest for i, (v, _) in fleet.published().items()}
        await slow.aclose()
        await prompt.stop()


async def test_an_observer_needs_no_incarnation_and_counts_for_nobody() -> None:
    async with serving(**alone()) as fleet:
        (a,) = await fleet.seeded("a")
        observer = FakeWatcher(fleet, watcher_id="evaluator", run_id="run").start()
        await until(observer.follows)
        await rounds(fleet, a, 1)
        await until(observer.follows)
        (learner,) = (await fleet.status()).learners
        assert learner.bytes_down == 0
        assert fleet.engine.ledger.bytes_observed > 0
        await observer.stop()


async def test_who_may_not_watch_is_told_why() -> None:
    async with serving(**alone()) as fleet:
        (a,) = await fleet.seeded("a")

        async def error_of(**request: object) -> Reason:
            call = fleet.stub.Watch(pb.WatchRequest(**({"watcher_id": "a"} | request)))
            return (await refusal(call.read())).reason

        earlier = types_pb2.Incarnation(term=1, number=0)
        later = types_pb2.Incarnation(term=1, number=5)
        bad = types_pb2.FragmentVersion(fragment=0, version=types_pb2.Version(digest=b"short"))
        assert await error_of(run_id="elsewhere") is Reason.RUN_MISMATCH
        assert await error_of(layout_fingerprint="0") is Reason.LAYOUT_MISMATCH
        assert await error_of(incarnation=earlier) is Reason.FENCED
        assert await error_of(incarnation=later) is Reason.UNKNOWN_LEARNER
        assert await error_of(watcher_id="") is Reason.MALFORMED
        assert await error_of(held=[bad]) is Reason.MALFORMED
        assert await error_of(watcher_id="b", incarnation=a.incarnation) is Reason.UNKNOWN_LEARNER


async def test_watchers_are_told_when_the_synchronizer_stops_and_follow_the_next_one() -> None:
    store = MemoryStore()
    fleet = await Fleet(**alone(), store=store).start()
    (a,) = await fleet.seeded("a")
    watcher = FakeWatcher(fleet).start()
    await rounds(fleet, a, 3)
    await until(watcher.follows)
    await fleet.engine.close()
    await until(lambda: watcher.error)
    assert watcher.error is not None
    assert watcher.error.reason is Reason.DRAINING
    await fleet.stop()
    async with serving(**alone(), store=store) as again:
        follower = FakeWatcher(again).start(watcher.held)
        await until(lambda: follower.caught_up)
        assert follower.kinds == []
        await follower.stop()


async def test_streams_that_one_error_ends_are_all_answered_and_nothing_is_left_to_complain() -> (
    None
):
    """What one stream clears away of the error is not another's, which is still answering."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    async with serving(**alone()) as fleet:
        await fleet.seeded("a")
        watchers = [FakeWatcher(fleet, watcher_id=f"w{i}").start() for i in range(5)]
        await until(lambda: all(watcher.follows() for watcher in watchers))
        await fleet.engine.close(DilocoError(Reason.DRAINING, "the synchronizer stops"))
        await until(lambda: all(watcher.error is not None for watcher in watchers))
        assert {x.error.reason for x in watchers if x.error is not None} == {Reason.DRAINING}
    gc.collect()
    assert complaints == []
