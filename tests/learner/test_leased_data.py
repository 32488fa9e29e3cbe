"""Leased data at the learner: what is handed out, what counts as trained, what is lost."""

from __future__ import annotations

import threading

import pytest
import torch
from learner_kit import make_learner, make_model, make_settings, train
from scripted_synchronizer import ScriptedSynchronizer

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Incarnation
from learner_client.data import LeasedData, epoch_order
from learner_client.leases import Lease, Progress, saved_leases_from

SETTINGS = {"data_mode": "leases", "data_length": 20, "data_lease_length": 4}


class Bench:
    """Leased data, and what it says."""

    def __init__(self, **settings: object) -> None:
        self.said: list[str] = []
        self.num_wanted = 0
        self.is_over = False
        self.failure: DilocoError | None = None
        self.data = LeasedData(
            is_over=lambda: self.is_over, failure=lambda: self.failure, on_wait=self.said.append
        )
        self.data.on_want = self.wanted
        self.data.begin(make_settings(**(SETTINGS | settings)))
        self.next_id = 1

    def wanted(self) -> None:
        self.num_wanted += 1

    def lease(self, start: int, stop: int, epoch: int = 0) -> Lease:
        lease = Lease(lease_id=self.next_id, epoch=epoch, start=start, stop=stop)
        self.next_id += 1
        self.data.offer(lease)
        return lease


def test_samples_come_in_order_over_the_borders_of_leases_and_epochs():
    bench = Bench()
    bench.lease(16, 20)
    bench.lease(0, 4, epoch=1)
    assert bench.data.take(3) == [(0, 16), (0, 17), (0, 18)]
    assert bench.data.take(3) == [(0, 19), (1, 0), (1, 1)]
    assert bench.data.take(3) is None, "one is left, and three are asked for"
    assert bench.data.take(2) == [(1, 2), (1, 3)]


def test_what_was_handed_out_before_a_step_is_trained_in_it():
    bench = Bench()
    first, second = bench.lease(0, 4), bench.lease(8, 12)
    assert bench.data.trained() == Progress(lease_id=first.lease_id, position=0)
    bench.data.take(3)
    assert bench.data.trained() == Progress(lease_id=first.lease_id, position=3)
    bench.data.take(3)
    assert bench.data.trained() == Progress(lease_id=second.lease_id, position=10)
    bench.data.take(2)
    assert bench.data.trained() == Progress(lease_id=second.lease_id, position=12)


def test_a_loader_that_fetches_ahead_says_how_many_were_trained():
    bench = Bench()
    first, second = bench.lease(0, 4), bench.lease(4, 8)
    bench.data.take(8)
    assert bench.data.trained(3).position == 3
    assert bench.data.trained(3) == Progress(lease_id=second.lease_id, position=6)
    with pytest.raises(UsageError, match="2 samples were handed out"):
        bench.data.trained(3)
    assert bench.data.trained(0).position == 6
    assert [x.lease_id for x in bench.data.claims] == [first.lease_id, second.lease_id]


def test_the_next_lease_is_wanted_before_the_present_one_is_used_up():
    bench = Bench()
    assert bench.data.wants
    bench.lease(0, 4)
    assert bench.data.wants
    bench.lease(4, 8)
    assert not bench.data.wants
    bench.data.take(4)
    assert bench.data.wants
    assert bench.num_wanted == 1


def test_batches_longer_than_two_leases_get_as_many_as_they_need():
    bench = Bench()
    num_leases = 0
    while bench.data.take(10) is None:
        assert bench.data.wants
        bench.lease(4 * num_leases, 4 * num_leases + 4)
        num_leases += 1
    assert num_leases == 3


def test_a_wait_is_said_once_with_its_reason_and_counted():
    bench = Bench()
    assert bench.data.take(1) is None
    assert bench.data.take(1) is None
    assert bench.said == ["the first lease"]
    bench.lease(0, 1)
    assert bench.data.take(1) == [(0, 0)]
    bench.data.waits("merges")
    assert bench.data.take(1) is None
    assert bench.said == ["the first lease", "", "merges"]
    assert bench.data.status.num_waits == 2
    assert bench.data.status.waits_for == "merges"


def test_who_waits_goes_on_when_the_lease_comes_and_stops_when_the_run_is_over():
    bench = Bench()
    got: list[object] = []

    def loop() -> None:
        got.extend(bench.data.indices())
        got.append("over")

    thread = threading.Thread(target=loop)
    thread.start()
    bench.lease(0, 2)
    bench.lease(7, 8)
    while len(got) < 3:
        pass
    bench.is_over = True
    thread.join(20.0)
    assert got == [(0, 0), (0, 1), (0, 7), "over"]
    assert bench.data.batch(1, give_up=lambda: True) is None


def test_shuffling_is_one_order_per_epoch_and_seed_and_skips_nothing():
    bench = Bench()
    for epoch in range(2):
        for start in range(0, 20, 4):
            bench.lease(start, start + 4, epoch=epoch)
    got = [bench.data.take(20, shuffle_seed=5) for _ in range(2)]
    orders = [[index for _, index in samples or []] for samples in got]
    assert orders == [epoch_order(20, epoch=e, seed=5) for e in range(2)]
    assert [sorted(x) for x in orders] == [list(range(20))] * 2
    assert orders[0] != orders[1]
    assert epoch_order(20, epoch=0, seed=6) != orders[0]


def test_lost_leases_are_neither_handed_out_nor_claimed_and_what_is_trained_of_them_is_void():
    bench = Bench()
    bench.lease(0, 4)
    bench.lease(4, 8)
    bench.data.take(3)
    bench.data.trained(1)
    bench.data.lost()
    assert bench.data.claims == []
    assert bench.data.take(1) is None
    bench.next_id = 1
    fresh = bench.lease(12, 16)
    assert bench.data.take(2) == [(0, 12), (0, 13)]
    assert bench.data.trained(2).is_lost, "two samples that were fetched before"
    assert bench.data.trained() == Progress(lease_id=fresh.lease_id, position=14)
    assert bench.data.status.num_lost == 2


def test_a_run_with_fixed_shards_and_data_without_an_end_say_what_to_do():
    with pytest.raises(UsageError, match="data_mode = leases"):
        Bench(data_mode="shards").data.take(1)
    with pytest.raises(UsageError, match="cannot be shuffled"):
        Bench(data_length=0).data.take(1, shuffle_seed=1)
    with pytest.raises(UsageError, match="raise data_lease_length"):
        Bench(data_lease_length=1).data.take(1000)
    bench = Bench()
    bench.failure = DilocoError(Reason.FENCED, "another process")
    with pytest.raises(DilocoError, match="another process"):
        bench.data.take(1)


@pytest.mark.parametrize(
    "lease",
    [
        Lease(lease_id=0, epoch=0, start=0, stop=4),
        Lease(lease_id=5, epoch=0, start=4, stop=4),
        Lease(lease_id=5, epoch=0, start=18, stop=22),
    ],
)
def test_a_lease_that_cannot_be_is_refused(lease):
    with pytest.raises(DilocoError) as caught:
        Bench().data.offer(lease)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.asyncio
async def test_a_user_of_a_run_with_shards_is_told_at_the_first_sample():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        train(model)
        learner.step(num_tokens=1)
        with pytest.raises(UsageError, match="data shard"):
            next(learner.data.indices())
        with pytest.raises(UsageError, match="0 samples were handed out"):
            learner.step(num_tokens=1, num_samples=1)


def test_a_part_of_a_snapshot_keeps_leases_and_goes_on_with_the_first_sample_not_trained():
    """Samples that were only fetched ahead are fetched again."""
    bench = Bench()
    for start in (0, 4, 8):
        bench.lease(start, start + 4)
    bench.data.take(9)
    bench.data.trained(6)
    saved = bench.data.saved(Incarnation(1, 2))
    assert saved_leases_from(saved.to_tensor()) == saved
    again = Bench()
    again.data.restore(saved)
    assert again.data.claims == bench.data.claims
    assert again.data.progress == bench.data.progress == Progress(lease_id=2, position=6)
    assert again.data.take(4) == [(0, 6), (0, 7), (0, 8), (0, 9)]


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 0, 0]],
        [[0, 2, 0, 0, 0]],
        [[1, 2, 0, 0, 0], [1, 0, 4, 4, 4]],
        [[1, 2, 0, 0, 0], [1, 0, 0, 4, 5]],
        [[1, 2, 0, 0, 0], [2, 0, 0, 4, -1], [1, 0, 4, 8, 4]],
        [[1, 2, 0, 0, 0], [1, 0, 0, 4, 0], [2, 0, 4, 8, -1]],
    ],
    ids=["columns", "incarnation", "empty", "position", "order", "used"],
)
def test_leases_in_a_part_that_cannot_be_are_refused(rows):
    with pytest.raises(ValueError):
        saved_leases_from(torch.tensor(rows))
