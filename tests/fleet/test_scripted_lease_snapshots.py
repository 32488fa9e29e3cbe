"""Snapshots of a scripted fleet on leased data: nothing is repeated and nothing is lost."""

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
        """What is merged at the end."""
        return merged_in(self.records[-1])


def merged_in(record: RoundRecord) -> set[Sample]:
    """What a record says is merged: issued, and neither on lease nor given back."""
    data = record.data
    issued = positions(
        [*((e, 0, LENGTH) for e in range(data.epoch)), (data.epoch, 0, data.position)]
    )
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The run that nothing disturbs."""
    return Played(spec(tmp_path_factory.mktemp("whole")), *JOIN, *ticks(10), *ticks(12))


@pytest.mark.parametrize("later", [(0,), (9,), (1, 3)], ids=str)
def test_a_fleet_killed_whole_and_resumed_trains_and_merges_each_sample_as_if_never_stopped(
    tmp_path: Path, whole: Played, later: tuple[int, ...]
) -> None:
    """However far it was beyond the cut, and again where it is resumed again."""
    lives = [(*ticks(n), *KILL_ALL, *resumed(*EVERYBODY)) for n in later]
    again = Played(spec(tmp_path), *TAKEN, *itertools.chain(*lives), *ticks(12))
    assert again.by_step == whole.by_step
    assert again.processed == whole.processed
    assert max(whole.processed.values()) == 1
    assert again.merged == whole.merged
    assert again.num_lost == 0
    assert end_of(again) == end_of(whole)


def test_a_restart_of_the_synchronizer_just_after_going_back_changes_nothing(
    tmp_path: Path, whole: Played
) -> None:
    """Before any record of the new term: who is back claims again under its new incarnation."""
    again = Played(
        spec(tmp_path), *TAKEN, *ticks(3), *KILL_ALL, *resumed(*EVERYBODY), StopSynchronizer(),
        StartSynchronizer(), Advance(seconds=6.0), *ticks(12),
    )  # fmt: skip
    assert again.num_lost == 0
    assert max(again.processed.values()) == 1
    assert again.by_step == whole.by_step


def is_merged_once(played: Played) -> bool:
    """By the lines of the rounds, as the report reads them."""
    lines = []
    records = played.records
    for before, record in itertools.pairwise(records):
        data = record.data
        new = sorted(merged_in(record) - merged_in(before))
        open_leases = sum(x.stop - x.merged_to for x in record.leases)
        free = sum(x.num_samples for x in data.returned)
        lines.append(
            RoundData(
                length=LENGTH, issued=data.num_issued, merged=data.num_merged, leased=open_leases,
                free=free, returned=data.num_returned, ranges=tuple((e, i, i + 1) for e, i in new),
            )
        )  # fmt: skip
    ledger = compute_ledger(lines)
    assert ledger is not None
    assert all(merged_in(a) <= merged_in(b) for a, b in itertools.pairwise(records))
    return (ledger.twice, ledger.skipped, ledger.unlisted) == (0, 0, 0)


def test_what_a_learner_had_that_is_left_out_is_trained_by_the_others(tmp_path: Path) -> None:
    """It died between the cut and its marker."""
    played = Played(
        spec(tmp_path, quorum=2), *JOIN, *ticks(8), TakeSnapshot(), *ticks(1), Step(learner=0),
        Kill(learner=1), Step(learner=2), *ticks(9, 0, 2), StopSynchronizer(), Kill(learner=0),
        Kill(learner=2), *resumed(0, 2), Join(learner=1), *ticks(22),
    )  # fmt: skip
    first = next(x for x in played.records if x.term > 1)
    assert {x.learner_id for x in first.leases} <= {"learner-0", "learner-2"}
    assert first.data.num_returned > 0
    assert is_merged_once(played)
    assert played.records[-1].data.epoch > 0
    assert {i for e, i in played.processed if e == 0} == set(range(LENGTH))
    assert played.merged >= positions([(0, 0, LENGTH)])
    assert played.num_lost == 0


def test_who_lived_on_past_the_cut_claims_nothing(tmp_path: Path) -> None:
    """The synchronizer alone went back: what is in its model was trained on rounds given up."""
    played = Played(
        spec(tmp_path), *TAKEN, *ticks(6), StopSynchronizer(), *BACK, *ticks(30),
    )  # fmt: skip
    assert played.num_lost > 0
    assert is_merged_once(played)
    assert played.merged >= positions([(0, 0, LENGTH)])
    assert played.records[-1].data.num_returned > 0, "what it had at the cut goes to others"


def test_a_part_of_a_snapshot_that_the_run_has_not_gone_back_to_claims_nothing(
    tmp_path: Path,
) -> None:
    """Its samples may be merged since: it begins with what is published, and other data."""
    played = Played(
        spec(tmp_path), *TAKEN, *ticks(3), Kill(learner=0), Resume(learner=0), *ticks(14)
    )
    assert played.num_lost > 0
    assert is_merged_once(played)
    assert "learner-0" in {x.learner_id for x in played.records[-1].contributions}
