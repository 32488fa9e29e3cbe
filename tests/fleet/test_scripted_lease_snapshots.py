"""Snapshots of a scripted fleet on leased data: resumed, nothing is repeated and nothing is lost."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from decoupled_diloco.settings import RunSettings
from diloco_fleet.data_ledger import RoundData, compute_ledger
from diloco_fleet.scripted import ScriptedFleet, scripted_fleet
from diloco_fleet.scripted_data import (
    Action,
    Advance,
    FleetResult,
    GoBack,
    Join,
    Kill,
    Leave,
    Resume,
    StartSynchronizer,
    Step,
    StopSynchronizer,
    TakeSnapshot,
)
from diloco_fleet.scripted_learner import FleetSpec
from diloco_fleet.scripted_world import run_in_virtual_time
from synchronizer_server.core.records import RoundRecord

LENGTH = 90
EVERYBODY = (0, 1, 2)
COUNT = itertools.count()
Sample = tuple[int, int]

JOIN = tuple(Join(learner=i) for i in EVERYBODY)
KILL_ALL = (StopSynchronizer(), *(Kill(learner=i) for i in EVERYBODY))
BACK = (GoBack(), StartSynchronizer())


def spec(path: Path, **settings: object) -> FleetSpec:
    """Three learners; a directory of its own, since it lives on a real disk."""
    defaults = {
        "num_learners": 3, "quorum": 3, "num_fragments": 6, "sync_interval": 6,
        "data_mode": "leases", "data_length": LENGTH, "data_lease_length": 7,
    }  # fmt: skip
    return FleetSpec(
        seed=5, settings=RunSettings(**(defaults | settings)), snapshots=path / str(next(COUNT))
    )


def ticks(count: int, *learners: int) -> tuple[Action, ...]:
    return (*(Step(learner=i) for i in learners or EVERYBODY), Advance(seconds=1.0)) * count


def resumed(*learners: int) -> tuple[Action, ...]:
    """Everything from the snapshot; then the rest of the tick in which it was recorded."""
    return (*BACK, *(Resume(learner=i) for i in learners), Advance(seconds=1.0))


def positions(ranges: list[tuple[int, int, int]]) -> set[Sample]:
    return {(e, i) for e, start, stop in ranges for i in range(start, stop)}


class Played:
    """A run: what each local step of each learner trained on, as far as it counts, and its records.

    A step that was trained again after going back replaces the one before.
    """

    def __init__(self, fleet_spec: FleetSpec, *schedule: Action) -> None:
        self._steps: dict[tuple[int, int], list[Sample]] = {}
        self.num_lost = 0

        async def main() -> None:
            async with scripted_fleet(fleet_spec) as fleet:
                for action in schedule:
                    if isinstance(action, Kill | Leave):
                        self._keep(fleet, action.learner)
                    if isinstance(action, GoBack):
                        cut = fleet.store.snapshots()[-1].name.global_step
                        self._undo(fleet, cut)
                    await fleet.apply(action)
                for index in fleet.learners:
                    self._keep(fleet, index)
                self.records = list(fleet.store.records)
                self.result: FleetResult = await fleet.finish()

        run_in_virtual_time(main())

    def _keep(self, fleet: ScriptedFleet, index: int) -> None:
        scripted = fleet.learners[index]
        self.num_lost += scripted.learner.data.status.num_lost
        for step, samples in scripted.samples:
            self._steps[index, step] = samples

    def _undo(self, fleet: ScriptedFleet, cut: int) -> None:
        kept = [x for x in fleet.store.records if x.global_step <= cut]
        fleet.store.records[:] = kept

    @property
    def processed(self) -> Counter[Sample]:
        return Counter(x for samples in self._steps.values() for x in samples)

    @property
    def by_step(self) -> dict[tuple[int, int], list[Sample]]:
        return dict(self._steps)

    @property
    def merged(self) -> set[Sample]:
        """What the newest record says is merged: issued, and neither on lease nor given back."""
        record = self.records[-1]
        data = record.data
        issued = positions([*((e, 0, LENGTH) for e in range(data.epoch)),
                            (data.epoch, 0, data.position)])  # fmt: skip
        waiting = [(x.epoch, x.merged_to, x.stop) for x in record.leases]
        waiting += [(x.epoch, x.start, x.stop) for x in data.returned]
        merged = issued - positions(waiting)
        assert len(merged) == data.num_merged
        return merged


def end_of(played: Played) -> tuple[object, ...]:
    present = [x for x in played.result.learners if x.is_present]
    return (
        played.result.published_sha256,
        [(x.learner_id, x.local_step, x.model_sha256) for x in present],
    )


TAKEN = (*JOIN, *ticks(8), TakeSnapshot(), *ticks(2), Advance(seconds=1.0))


@pytest.mark.parametrize("later", [0, 1, 5, 14])
def test_a_fleet_killed_whole_and_resumed_trains_and_merges_each_sample_as_if_never_stopped(
    tmp_path: Path, later: int
) -> None:
    whole = Played(spec(tmp_path), *JOIN, *ticks(10), *ticks(20))
    again = Played(
        spec(tmp_path), *TAKEN, *ticks(later), *KILL_ALL, *resumed(*EVERYBODY), *ticks(20)
    )
    assert again.by_step == whole.by_step
    assert again.processed == whole.processed
    assert max(whole.processed.values()) == 1
    assert again.merged == whole.merged
    assert again.num_lost == 0
    assert end_of(again) == end_of(whole)
