"""A scripted fleet on leased data: every sample counts once, whoever dies, restarts or comes late.

What is merged is worked out from the round records alone: a sample that was handed out is on
lease, given back, or merged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from decoupled_diloco.settings import RunSettings
from diloco_fleet.scripted import ScriptedFleet, run_fleet, scripted_fleet
from diloco_fleet.scripted_data import (
    Action,
    Advance,
    Join,
    Kill,
    Leave,
    StartSynchronizer,
    Step,
    StopSynchronizer,
    steady_schedule,
)
from diloco_fleet.scripted_learner import FleetSpec, ScriptedLearner
from diloco_fleet.scripted_world import Address, run_in_virtual_time
from learner_client import ModuleParameters
from learner_client.checkpoint import saved_state_from
from synchronizer_server.core.records import RoundRecord

LENGTH = 90
SPEC = FleetSpec(
    seed=3,
    settings=RunSettings(
        num_learners=2, num_fragments=6, sync_interval=6, data_mode="leases", data_length=LENGTH,
        data_lease_length=10,
    ),
)  # fmt: skip
TIMEOUT_S = SPEC.settings.heartbeat_timeout_s
Sample = tuple[int, int]


def ticks(count: int, *learners: int) -> tuple[Action, ...]:
    one = (*(Step(learner=i) for i in learners), Advance(seconds=1.0))
    return one * count


def merged_in(record: RoundRecord) -> set[Sample]:
    """Positions that a record says are merged: all that were handed out but those that wait."""
    data = record.data
    issued = {(e, i) for e in range(data.epoch) for i in range(LENGTH)}
    issued |= {(data.epoch, i) for i in range(data.position)}
    waiting = [(x.epoch, x.merged_to, x.stop) for x in record.leases]
    waiting += [(x.epoch, x.start, x.stop) for x in data.returned]
    return issued - {(e, i) for e, start, stop in waiting for i in range(start, stop)}


class Watched:
    """Plays a schedule and keeps what every process trained on."""

    def __init__(self, spec: FleetSpec = SPEC) -> None:
        self.spec = spec
        self.trained: list[list[Sample]] = []
        self.lost: list[bool] = []
        self.num_samples = self.num_waits = self.num_lost = 0

    def play(self, *schedule: Action) -> Watched:
        async def main() -> None:
            async with scripted_fleet(self.spec) as fleet:
                for action in schedule:
                    if isinstance(action, Kill | Leave):
                        self._keep(fleet, action.learner, dies=True)
                    await fleet.apply(action)
                for index in fleet.learners:
                    self._keep(fleet, index, dies=False)
                self.records = list(fleet.store.records)

        run_in_virtual_time(main())
        return self

    def _keep(self, fleet: ScriptedFleet, index: int, *, dies: bool) -> None:
        scripted = fleet.learners[index]
        status = scripted.learner.data.status
        self.num_waits += status.num_waits
        self.num_lost += status.num_lost
        self.trained.append([x for _, samples in scripted.samples for x in samples])
        self.lost.append(dies or status.num_lost > 0)

    def check(self) -> None:
        """No sample merged twice, none skipped; only what was lost is trained twice."""
        before: set[Sample] = set()
        for record in self.records:
            now = merged_in(record)
            assert before <= now, "what is merged stays merged, and is never handed out again"
            assert len(now) == record.data.num_merged
            before = now
        closed = [e for e in range(self.records[-1].data.epoch) if len_of(before, e) == LENGTH]
        assert closed, "an epoch closes"
        times = Counter(x for samples in self.trained for x in samples)
        for epoch in closed:
            there = {i for e, i in times if e == epoch}
            assert there == set(range(LENGTH)), "every sample was trained"
        survivors = Counter(
            x
            for samples, is_lost in zip(self.trained, self.lost, strict=True)
            for x in samples
            if not is_lost
        )
        assert max(survivors.values()) == 1, "who keeps its leases shares no sample"
        repeats = sum(count - 1 for count in times.values())
        assert repeats <= self.records[-1].data.num_returned


def len_of(samples: set[Sample], epoch: int) -> int:
    return sum(e == epoch for e, _ in samples)


def test_an_undisturbed_fleet_trains_every_sample_once_and_never_waits():
    watched = Watched().play(*steady_schedule(2, 30))
    watched.check()
    times = Counter(x for samples in watched.trained for x in samples)
    assert set(times.values()) == {1}
    assert watched.records[-1].data.num_returned == 0
    assert (watched.num_waits, watched.num_lost) == (0, 0)


def test_what_a_dead_learner_had_not_merged_is_trained_by_the_others():
    watched = Watched().play(
        Join(learner=0), Join(learner=1), *ticks(15, 0, 1), Kill(learner=1), *ticks(35, 0)
    )
    watched.check()
    returned = watched.records[-1].data.num_returned
    assert returned > 0
    assert set(watched.records[-1].data.lost) == {"learner-1"}
    assert not watched.records[-1].data.returned, "handed out again"


def test_a_learner_that_leaves_gives_back_at_once_and_its_id_goes_on_with_other_data():
    watched = Watched().play(
        Join(learner=0), Join(learner=1), *ticks(12, 0, 1), Leave(learner=1), *ticks(1, 0),
        Join(learner=1), *ticks(20, 0, 1),
    )  # fmt: skip
    watched.check()
    assert watched.records[-1].data.num_returned > 0


@pytest.mark.parametrize("drain", [False, True])
def test_after_a_restart_of_the_synchronizer_everybody_goes_on_with_its_leases(drain):
    watched = Watched().play(
        Join(learner=0), Join(learner=1), *ticks(10, 0, 1), StopSynchronizer(drain=drain),
        *ticks(2, 0, 1), StartSynchronizer(), *ticks(20, 0, 1),
    )  # fmt: skip
    watched.check()
    assert watched.records[-1].term == 2
    assert watched.num_lost == 0
    times = Counter(x for samples in watched.trained for x in samples)
    assert set(times.values()) == {1}, "nobody trained on anything twice"


def test_who_dies_while_the_synchronizer_is_away_keeps_its_leases_until_they_expire():
    watched = Watched().play(
        Join(learner=0), Join(learner=1), *ticks(10, 0, 1), StopSynchronizer(), Kill(learner=1),
        *ticks(2, 0), StartSynchronizer(), *ticks(2, 0),
    )  # fmt: skip
    assert {x.learner_id for x in watched.records[-1].leases} == {"learner-0", "learner-1"}
    watched = Watched().play(
        Join(learner=0), Join(learner=1), *ticks(10, 0, 1), StopSynchronizer(), Kill(learner=1),
        *ticks(2, 0), StartSynchronizer(), *ticks(40, 0),
    )  # fmt: skip
    watched.check()
    assert {x.learner_id for x in watched.records[-1].leases} == {"learner-0"}
    assert watched.records[-1].data.num_returned > 0


def test_learners_beyond_the_plan_join_late_and_share_the_data():
    watched = Watched().play(
        Join(learner=0), Join(learner=1), *ticks(6, 0, 1), Join(learner=2), Join(learner=3),
        *ticks(12, 0, 1, 2, 3), Kill(learner=2), *ticks(20, 0, 1, 3),
    )  # fmt: skip
    watched.check()
    record = watched.records[-1]
    assert sorted(record.shards.values()) == [0, 1, 2, 3]
    assert "learner-3" in {x.learner_id for x in record.contributions}


def is_published(scripted: ScriptedLearner) -> bool:
    """Whether the model is what it last heard to be published."""
    parameters = ModuleParameters(scripted.model)
    published = saved_state_from(scripted.learner.state_dict()).published
    layout = scripted.learner._exchange.layout
    assert layout is not None
    equal = []
    for fragment in layout.fragments:
        local = torch.empty(fragment.num_elements)
        parameters.read_fragment(fragment, local)
        equal.append(torch.equal(local, published[fragment.index][1]))
    return all(equal)


def test_a_learner_that_was_cut_off_too_long_gives_its_work_up_and_takes_other_data():
    """Its leases are handed out again: what it trained on them must never be merged."""

    async def main() -> list[RoundRecord]:
        async with scripted_fleet(SPEC) as fleet:
            for action in (Join(learner=0), Join(learner=1), *ticks(12, 0, 1)):
                await fleet.apply(action)
            cut = fleet.learners[1]
            first = cut.learner.incarnation
            address, cut.line._address = cut.line._address, Address()
            await cut.line.drop()
            for action in ticks(int(TIMEOUT_S) + 2, 0, 1):
                await fleet.apply(action)
            assert not is_published(cut), "it trained on"
            cut.line._address = address
            before = cut.learner.data.status.num_leases
            while cut.learner.data.status.num_leases == before:
                await fleet.apply(Advance(seconds=0.1))
            assert cut.learner.data.status.num_lost > 0
            await fleet.apply(Step(learner=1))
            assert is_published(cut), "what it trained alone is given up"
            for action in ticks(30, 0, 1):
                await fleet.apply(action)
            assert cut.learner.incarnation > first
            return list(fleet.store.records)

    records = run_in_virtual_time(main())
    before: set[Sample] = set()
    for record in records:
        assert before <= merged_in(record)
        before = merged_in(record)
    assert "learner-1" in {x.learner_id for x in records[-1].contributions}, "it takes part again"
    assert len_of(before, 0) == LENGTH


def test_a_rough_schedule_on_leased_data_is_the_same_every_time():
    schedule = (
        Join(learner=0), Join(learner=1), *ticks(8, 0, 1), Join(learner=2), *ticks(4, 0, 2, 1),
        Kill(learner=1), *ticks(9, 0, 2), StopSynchronizer(), *ticks(2, 0, 2),
        StartSynchronizer(), Join(learner=1), *ticks(12, 0, 1, 2), Leave(learner=0),
        *ticks(12, 1, 2),
    )  # fmt: skip
    watched = Watched().play(*schedule)
    watched.check()
    first = run_fleet(SPEC, schedule)
    assert first == run_fleet(SPEC, schedule)
    assert first.sha256 != run_fleet(replace(SPEC, seed=4), schedule).sha256
