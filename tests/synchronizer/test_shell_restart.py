"""A synchronizer that stops, or dies, goes on where it was: nothing lost, nothing merged twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.wire import version_to
from synchronizer_server.commits import Committer
from synchronizer_server.core import events as ev
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.membership import MemoryMembership, Roll
from synchronizer_server.store import DiskStore, MemoryStore
from tests.synchronizer.fake_learner import (
    DROPPED,
    REFUSED,
    FakeLearner,
    Fleet,
    make_settings,
    refusal,
    serving,
    until,
)
from tests.synchronizer.fake_watcher import FakeWatcher

pytestmark = pytest.mark.asyncio

SETTINGS = {
    "num_learners": 2, "grace": False, "outer_learning_rate": 0.7, "outer_momentum": 0.3,
}  # fmt: skip


def fleet_on(path: Path, **changes: object) -> Fleet:
    store = DiskStore(path / "store", "run", durability="async")
    return Fleet(settings=make_settings(**SETTINGS), store=store, **changes)


async def back(fleet: Fleet, learner_id: str) -> FakeLearner:
    """The same process comes back: same id, same request id."""
    learner = FakeLearner(fleet, learner_id)
    await learner.join()
    await learner.open()
    return learner


async def turns(fleet: Fleet, learners: list[FakeLearner], num_rounds: int) -> None:
    """Rounds with one contributor each, in turn, with pushes that depend on the round alone."""
    for _ in range(num_rounds):
        step = fleet.committed + 1
        learner = learners[step % len(learners)]
        await learner.step()
        pull = await learner.hear("pull")
        generator = torch.Generator().manual_seed(step)
        vector = torch.randn(learner.num_elements(pull.fragment), generator=generator)
        answer = await learner.push(pull, vector)
        assert answer.reason == "", answer
        await fleet.committed_is(step)


def states_of(fleet: Fleet) -> list[bytes]:
    """Published copy, residual and momentum of every fragment, bit for bit."""
    states = [fleet.engine.tensors.state(i) for i in range(fleet.layout.num_fragments)]
    vectors = [t for s in states for t in (s.published, s.residual, s.momentum)]
    return [t.numpy().tobytes() for t in vectors]


@pytest.mark.parametrize("drain", [True, False], ids=["drained", "crashed"])
async def test_a_restart_in_the_middle_changes_no_bit(tmp_path: Path, drain: bool) -> None:
    """Ten rounds with a restart in between end as ten rounds without one."""
    async with serving(settings=make_settings(**SETTINGS)) as whole:
        await turns(whole, await whole.seeded("a", "b"), 10)
        expected = states_of(whole)

    first = await fleet_on(tmp_path).start()
    await turns(first, await first.seeded("a", "b"), 6)
    before = first.published()
    shards = {x.learner_id: x.shard for x in (await first.status()).learners}
    await first.stop(drain=drain)

    second = await fleet_on(tmp_path).start()
    try:
        assert second.committed == 6
        assert second.published() == before
        state = second.engine.core.state
        assert state.term == 2
        steps = {x.learner_id: (x.local_step, x.shard) for x in state.roster}
        assert steps == {"a": (3, shards["a"]), "b": (3, shards["b"])}
        learners = [await back(second, x) for x in ("a", "b")]
        assert [x.joined.incarnation.number for x in learners] == [2, 2]
        assert [x.joined.local_step for x in learners] == [3, 3]
        assert not any(x.joined.seed for x in learners)
        await turns(second, learners, 4)
        assert states_of(second) == expected
        assert second.engine.core.state.roster.find("a").num_tokens_merged == 5 * 64
    finally:
        await second.stop()


async def test_a_contribution_whose_answer_was_lost_is_not_merged_twice(tmp_path: Path) -> None:
    first = await fleet_on(tmp_path).start()
    a, b = await first.seeded("a", "b")
    await turns(first, [b, a], 4)
    base = version_to(first.engine.updates.version(1))
    await a.step()
    pull = await a.hear("pull")
    payload = a.encode(torch.ones(a.num_elements(1)))
    header = a.header_for(pull, payload)
    await a.send(header, payload)  # the answer never reaches the learner
    await first.committed_is(5)
    await first.stop()

    async with serving(settings=first.settings, store=reopened(tmp_path)) as second:
        published = second.published()
        a.fleet = second
        answer = await a.send(header, payload)
        assert (answer.outcome, answer.reason) == (REFUSED, "STALE_TERM")
        again = await back(second, "a")
        again.local_step = a.local_step
        await again.step()
        pull = await again.hear("pull")
        while pull.fragment != 1:
            await again.push(pull)
            await second.committed_is(pull.global_step)
            published = second.published()
            await again.step()
            pull = await again.hear("pull")
        answer = await again.push(pull, torch.ones(a.num_elements(1)), base=base)
        assert (answer.outcome, answer.reason) == (DROPPED, "STALE_BASE")
        assert second.published()[1] == published[1]


def reopened(path: Path) -> DiskStore:
    return DiskStore(path / "store", "run", durability="async")


async def test_a_kill_between_persist_and_publish_loses_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await fleet_on(tmp_path).start()
    a, _ = await first.seeded("a", "b")
    await turns(first, [a], 2)
    watcher = FakeWatcher(first).start()
    await until(watcher.follows)

    class KilledError(Exception):
        pass

    def die(self: Committer, summary: object) -> None:
        raise KilledError

    monkeypatch.setattr(Committer, "publish", die)
    await a.step()
    await a.push(await a.hear("pull"))
    await until(first.engine.fatal.is_set)
    assert isinstance(first.engine.failure, KilledError)
    assert watcher.held[3][0].global_step == 0, "nothing was published"
    monkeypatch.undo()
    await first.stop()

    async with serving(settings=first.settings, store=reopened(tmp_path)) as second:
        assert second.committed == 3
        follower = FakeWatcher(second).start(watcher.held)
        await until(lambda: follower.caught_up)
        assert follower.follows()
        assert [f for f, _ in follower.kinds] == [3]
        assert follower.held[3][0].global_step == 3
        await follower.stop()


async def test_a_run_that_was_joined_but_never_seeded_begins_anew(tmp_path: Path) -> None:
    first = await fleet_on(tmp_path).start()
    a = await first.learner("a")
    await a.seed_fragment(0)
    await first.stop()
    async with serving(settings=first.settings, store=reopened(tmp_path)) as second:
        b = FakeLearner(second, "b")
        assert (await b.join()).seed
        await b.open()
        await b.seed()
        await until(lambda: second.engine.core.state.seeded)


async def test_an_empty_store_of_a_run_that_has_merged_is_never_seeded_again() -> None:
    membership = MemoryMembership()
    await membership.mark_seeded(1)
    with pytest.raises(DilocoError) as caught:
        await Fleet(membership=membership).start()
    assert caught.value.reason is Reason.STORE_LOST
    assert "new run_id" in caught.value.message


async def test_a_membership_that_was_away_at_the_seed_hears_of_it_at_the_restart() -> None:
    store, membership = MemoryStore(), MemoryMembership()
    first = await Fleet(store=store).start()
    await first.seeded("a")
    await first.stop()
    async with serving(store=store, membership=membership):
        assert await membership.is_seeded()


@pytest.mark.parametrize("changes", [{"strategy": "tensor"}, {"num_fragments": 3}])
async def test_settings_that_change_the_layout_of_a_run_are_refused(
    changes: dict[str, object],
) -> None:
    store = MemoryStore()
    first = await Fleet(store=store).start()
    await first.seeded("a")
    await first.stop()
    with pytest.raises(DilocoError) as caught:
        await Fleet(store=store, settings=make_settings(**changes)).start()
    assert caught.value.reason is Reason.CONFIG_CONFLICT
    assert "'balanced' with 4 fragments" in caught.value.message


async def test_the_quorum_of_an_operator_outlives_a_restart() -> None:
    store, membership = MemoryStore(), MemoryMembership()
    first = await Fleet(store=store, membership=membership).start()
    await first.seeded("a")
    await first.stop()
    await membership.set_quorum(3, 1)
    async with serving(store=store, membership=membership) as second:
        assert (await second.status()).quorum == 3


@pytest.mark.parametrize("operator_set", [False, True])
async def test_a_quorum_that_cannot_be_asked_for_is_that_of_the_record_else_of_the_settings(
    operator_set: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(self: MemoryMembership) -> Roll:
        raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "redis does not answer")

    store = MemoryStore()
    first = await Fleet(store=store).start()
    if operator_set:
        first.engine.handle(ev.QuorumSet(quorum=3))
    await first.seeded("a")
    await first.stop()
    monkeypatch.setattr(MemoryMembership, "read_back", away)
    async with serving(store=store, settings=make_settings(quorum=2)) as second:
        assert (await second.status()).quorum == (3 if operator_set else 2)
    assert "members and quorum from the last round record" in caplog.text


@pytest.mark.parametrize("layout", [None, {}, {"tensors": [{}], "fingerprint": "x"}])
async def test_a_layout_that_cannot_be_read_is_a_corrupt_store(layout: object) -> None:
    store = MemoryStore()
    first = await Fleet(store=store).start()
    await first.seeded("a")
    await first.stop()
    store._run = {"layout": layout}
    with pytest.raises(DilocoError) as caught:
        await Fleet(store=store).start()
    assert caught.value.reason is Reason.STORE_CORRUPT


async def test_a_record_holds_what_happened_in_its_round(tmp_path: Path) -> None:
    journal = tmp_path / "events.jsonl"
    first = await fleet_on(tmp_path, journal=journal).start()
    a, b = await first.seeded("a", "b")
    await turns(first, [b, a], 2)
    await first.stop(drain=True)
    loaded = reopened(tmp_path)
    record, tensors = loaded.load()
    loaded.close()
    assert isinstance(record, RoundRecord)
    assert (record.global_step, record.fragment, len(tensors)) == (2, 2, 4)
    (contribution,) = record.contributions
    assert (contribution.learner_id, contribution.num_tokens) == ("b", 64)
    assert record.num_tokens_merged == 128
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    kinds = [x["kind"] for x in lines if x["kind"] not in {"learner", "wait"}]
    assert kinds == ["start", "seeded", "round", "round", "drained"]
    rounds = [x for x in lines if x["kind"] == "round"]
    assert [(x["global_step"], x["contributors"]) for x in rounds] == [(1, ["a"]), (2, ["b"])]
    assert all("time" in x for x in lines)


async def test_nobody_who_hangs_at_the_drain_holds_it_for_ever() -> None:
    """A drain waits for rounds in flight; a crash of the process in it loses nothing either."""
    settings = make_settings(num_learners=1, push_floor_s=0.3)
    fleet = await Fleet(settings=settings).start()
    (a,) = await fleet.seeded("a")
    await a.step()
    await a.hear("pull")
    await asyncio.wait_for(fleet.stop(drain=True), 15)
    assert fleet.committed == 0


async def test_join_during_the_drain_is_told_to_come_later() -> None:
    settings = make_settings(num_learners=2, grace=False)
    fleet = await Fleet(settings=settings).start()
    (a,) = await fleet.seeded("a")
    await a.step()
    pull = await a.hear("pull")
    stopping = asyncio.ensure_future(fleet.stop(drain=True))
    await until(lambda: fleet.engine.core.state.draining)
    assert (await refusal(FakeLearner(fleet, "b").join())).reason is Reason.DRAINING
    assert (await fleet.status()).state == "draining"
    await a.push(pull)
    await stopping
    assert fleet.committed == 1, "the round in flight was finished"


async def test_a_learner_that_no_record_tells_of_keeps_its_shard_where_nobody_else_has_it() -> None:
    """It joined under a leader that died before the next round: its data must stay its own."""
    async with serving() as fleet:
        b = FakeLearner(fleet, "b")
        assert (await b.join(shard=2)).shard == 2
        c = FakeLearner(fleet, "c")
        assert (await c.join(shard=2)).shard == 0, "taken: the lowest that is free"
        assert (await FakeLearner(fleet, "d").join(shard=99)).shard == 1
        assert (await b.join(shard=1)).shard == 2, "what is known of it counts"
