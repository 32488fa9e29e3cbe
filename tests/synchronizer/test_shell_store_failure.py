"""The store fails, or the tensors are slow: nothing is published early and nobody is cut off."""

from __future__ import annotations

import asyncio
import threading

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.runner import ThreadRunner
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import make_settings, serving, until
from tests.synchronizer.fake_watcher import FakeWatcher

pytestmark = pytest.mark.asyncio


class FailingStore(MemoryStore):
    """A store that can be told to fail."""

    reason: Reason | None = None

    def commit(self, record: object, fragments: object, *, force: bool = False) -> None:
        if self.reason is not None:
            raise DilocoError(self.reason, "no space left on the disk")
        super().commit(record, fragments, force=force)


@pytest.mark.parametrize("reason", [Reason.DISK_FULL, Reason.STORAGE_FAILED])
async def test_a_round_that_cannot_be_persisted_is_not_published_and_tried_again(
    reason: Reason, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("synchronizer_server.round_work.PERSIST_RETRY_S", 0.02)
    store = FailingStore()
    async with serving(settings=make_settings(num_learners=1), store=store) as fleet:
        (a,) = await fleet.seeded("a")
        watcher = FakeWatcher(fleet).start()
        await until(watcher.follows)
        store.reason = reason
        before = fleet.published()
        await a.turn()
        await until(lambda: caplog.text.count("round 1 is not persisted") >= 3)
        assert str(reason) in caplog.text
        status = await fleet.status()
        assert "persist" in {w.reason for w in status.waits if w.subject == "round 1"}
        assert fleet.published() == before
        assert fleet.committed == 0
        await a.turn()  # the learner trains on, and the next round collects
        store.reason = None
        await fleet.committed_is(2)
        await until(watcher.follows)
        assert [v.global_step for v, _ in fleet.published().values()] == [0, 1, 2, 0]
        await watcher.stop()


async def test_a_record_counts_the_tokens_of_its_own_cut_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Round 2 is accepted before round 1 is persisted; a crash in between forgets its tokens."""
    monkeypatch.setattr("synchronizer_server.round_work.PERSIST_RETRY_S", 0.02)
    store = FailingStore()
    async with serving(settings=make_settings(num_learners=1), store=store) as fleet:
        (a,) = await fleet.seeded("a")
        store.reason = Reason.DISK_FULL
        await a.turn()
        await a.turn()
        with monkeypatch.context() as patched:
            patched.setattr(FailingStore, "commit", only_round_1)
            store.reason = None
            await fleet.committed_is(1)
        record, _ = store.load()
        assert (record.global_step, record.num_tokens_merged) == (1, 64)
        assert fleet.engine.core.state.roster.find("a").num_tokens_merged == 128


def only_round_1(
    self: FailingStore, record: RoundRecord, fragments: object, *, force: bool = False
) -> None:
    if record.global_step > 1:
        raise DilocoError(Reason.DISK_FULL, "no space left on the disk")
    MemoryStore.commit(self, record, fragments, force=force)


class GatedRunner(ThreadRunner):
    """A runner whose next job can be made to take for ever."""

    def __init__(self) -> None:
        super().__init__("gated")
        self.gate = threading.Event()
        self.gate.set()

    def block(self) -> None:
        self.gate.clear()
        self.submit(self.gate.wait)

    def close(self) -> None:
        self.gate.set()
        super().close()


async def test_reports_status_joins_and_watchers_are_never_behind_a_merge() -> None:
    runner = GatedRunner()
    settings = make_settings(num_learners=2, grace=False)
    async with serving(settings=settings, tensors_runner=runner) as fleet:
        a = await fleet.learner("a")
        await a.seed()
        await until(lambda: fleet.engine.core.state.seeded)
        await a.step()
        pull = await a.hear("pull")
        runner.block()
        pushing = asyncio.ensure_future(a.push(pull))
        for _ in range(50):
            await a.say(heartbeat=pb.Heartbeat())
            assert (await fleet.status()).learners[0].state == "live"
        before = fleet.engine.core.state.roster.find("a").heard_at
        await a.say(heartbeat=pb.Heartbeat())
        await until(lambda: fleet.engine.core.state.roster.find("a").heard_at > before)
        watcher = FakeWatcher(fleet).start()
        await until(watcher.follows)
        b = await fleet.learner("b")
        assert b.joined.shard == 1
        assert not pushing.done()
        runner.gate.set()
        await pushing
        await fleet.committed_is(1)
        await until(watcher.follows)
        await watcher.stop()
