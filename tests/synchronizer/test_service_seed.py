"""Seeding over gRPC: from the first Join to the first published copy."""

from __future__ import annotations

import asyncio

import pytest
import torch

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import admin_pb2
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import (
    ACCEPTED,
    REFUSED,
    FakeLearner,
    Fleet,
    chunk_at,
    serving,
    until,
    vector_for,
)
from tests.synchronizer.fake_watcher import FakeWatcher

pytestmark = pytest.mark.asyncio


def is_seeded(fleet: Fleet) -> bool:
    return fleet.engine.core.state.seeded


async def test_from_the_first_join_to_caught_up() -> None:
    async with serving() as fleet:
        watcher = FakeWatcher(fleet).start()
        assert (await fleet.status()).state == "starting"
        seeder = await fleet.learner("a")
        other = await fleet.learner("b")
        assert (seeder.joined.seed, other.joined.seed) == (True, False)
        run = await fleet.admin.GetRun(admin_pb2.GetRunRequest(protocol_version=1))
        assert (len(run.tensors), run.seeded) == (4, False)
        for fragment in range(3):
            await seeder.seed_fragment(fragment)
        assert (await fleet.status()).state == "seeding"
        assert not watcher.held
        await seeder.seed_fragment(3)
        await until(lambda: watcher.caught_up)
        assert watcher.follows()
        assert {k for _, k in watcher.kinds} == {pb.UPDATE_KIND_FULL}
        assert watcher.caught_up[0].known_global_steps == [0, 0, 0, 0]
        assert (await fleet.status()).state == "running"
        assert await fleet.membership.is_seeded()
        for fragment, (_, vector) in watcher.held.items():
            assert torch.equal(vector, vector_for(fragment, vector.numel(), 0))
        schedule = await other.hear("schedule")
        assert schedule.due_fragments
        await watcher.stop()


@pytest.mark.parametrize("how", ["hangs up", "leaves", "is fenced"])
async def test_a_seeder_that_is_lost_halfway_is_replaced_by_a_survivor(how: str) -> None:
    """The survivor asks under its own request id, as a learner library does."""
    async with serving() as fleet:
        seeder, survivor = await fleet.learner("a"), await fleet.learner("b")
        await seeder.seed_fragment(0, torch.full((seeder.num_elements(0),), 7.0))
        if how == "hangs up":
            seeder.hang_up()
        elif how == "leaves":
            leave = pb.LeaveRequest(learner_id="a", incarnation=seeder.incarnation)
            await fleet.stub.Leave(leave)
        else:
            heir = FakeLearner(fleet, "a")
            assert (await heir.join(request_id="another-process")).seed
            await heir.seed()
            await until(lambda: is_seeded(fleet))
            return
        end = await survivor.end()
        assert end is not None
        assert end.reason is Reason.UNKNOWN_LEARNER
        assert (await survivor.join()).seed
        await survivor.open()
        late = await seeder.seed_fragment(1)
        assert (late.outcome, late.reason) == (REFUSED, "NOT_ASKED")
        await survivor.seed()
        await until(lambda: is_seeded(fleet))
        expected = vector_for(0, survivor.num_elements(0), 0)
        assert torch.equal(fleet.engine.updates.published(0), expected)


async def test_a_seed_that_cannot_be_is_refused_and_the_right_one_may_follow() -> None:
    async with serving() as fleet:
        learner = await fleet.learner("a")
        bad = vector_for(1, learner.num_elements(1), 0)
        bad[3] = float("nan")
        payload = bytes(get_codec("fp32").encode(bad.nan_to_num()))
        refused = {
            "NON_FINITE": await learner.seed_fragment(1, bad),
            "CODEC_MISMATCH": await learner.seed_fragment(1, encoding={"codec": "bf16"}),
            "MALFORMED": await learner.seed_fragment(1, encoding={"num_elements": 7}),
            "CORRUPT": await learner.seed_fragment(1, encoding={"digest": bytes(32)}),
            "OVERSIZED": await learner.seed_fragment(1, encoding={"payload_bytes": 1 << 60}),
            "UNKNOWN_FRAGMENT": await learner.seed_fragment(9, torch.zeros(3)),
            "TRUNCATED": await learner.send(seed_header(learner, payload), payload[:40]),
        }
        twice = [pb.PushRequest(header=seed_header(learner, payload))] * 2
        again = await learner.send_all([*twice, chunk_at(payload, 0, 1 << 20)])
        assert again.reason == "MALFORMED"
        for reason, answer in refused.items():
            assert (answer.outcome, answer.reason) == (REFUSED, reason)
            assert answer.message
        assert fleet.engine.core.state.seeded_fragments == set()
        await learner.seed()
        await until(lambda: is_seeded(fleet))


def seed_header(learner: FakeLearner, payload: bytes) -> pb.PushHeader:
    encoding = {"codec": "fp32", "num_elements": learner.num_elements(1)}
    return learner.header(payload, kind=pb.PUSH_KIND_SEED, fragment=1, encoding=encoding)


async def test_a_stranger_cannot_seed_and_nobody_seeds_twice() -> None:
    async with serving() as fleet:
        seeder, other = await fleet.learner("a"), await fleet.learner("b")
        answer = await other.seed_fragment(0)
        assert (answer.outcome, answer.reason) == (REFUSED, "NOT_ASKED")
        other.learner_id = "nobody"
        answer = await other.seed_fragment(0)
        assert (answer.outcome, answer.reason) == (REFUSED, "NOT_ASKED")
        await seeder.seed()
        await until(lambda: is_seeded(fleet))
        answer = await seeder.seed_fragment(0)
        assert (answer.outcome, answer.reason) == (REFUSED, "ALREADY_MERGED")


class FullStore(MemoryStore):
    """A store on a disk that is full until ``num_failures`` commits have failed."""

    num_failures = 1

    def commit(self, record: object, fragments: object, *, force: bool = False) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise DilocoError(Reason.DISK_FULL, "no space left")
        super().commit(record, fragments, force=force)


async def test_a_seed_that_cannot_be_persisted_is_not_published_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("synchronizer_server.round_work.PERSIST_RETRY_S", 0.2)
    async with serving(store=FullStore()) as fleet:
        watcher = FakeWatcher(fleet).start()
        learner = await fleet.learner("a")
        published = asyncio.ensure_future(watch_state(fleet))
        await learner.seed()
        await until(lambda: is_seeded(fleet))
        assert await published == "persist"
        await until(watcher.follows)
        await watcher.stop()


async def watch_state(fleet: Fleet) -> str:
    """The reason for which the seed waits once the store has failed."""
    await until(lambda: fleet.engine.core.state.seed_retry_at is not None)
    assert not is_seeded(fleet)
    (wait,) = (await fleet.status()).waits
    return wait.reason


async def test_accepted_fragments_of_the_seed_are_told_so() -> None:
    async with serving() as fleet:
        learner = await fleet.learner("a")
        assert (await learner.seed_fragment(0)).outcome == ACCEPTED
        assert (await learner.seed_fragment(0)).outcome == ACCEPTED, "the same again is no harm"
