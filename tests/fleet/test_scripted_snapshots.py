"""Snapshots of a whole scripted fleet: what is resumed goes on bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.snapshots import SnapshotName, part_name
from diloco_fleet.scripted import ScriptedFleet, run_fleet, scripted_fleet
from diloco_fleet.scripted_data import (
    Action,
    Advance,
    FleetResult,
    GoBack,
    Join,
    Kill,
    Resume,
    StartSynchronizer,
    Step,
    StopSynchronizer,
    TakeSnapshot,
    rough_schedule,
)
from diloco_fleet.scripted_learner import FleetSpec
from diloco_fleet.scripted_world import KeepingStore, run_in_virtual_time
from learner_client.checkpoint import SavedState, saved_state_from
from learner_client.training_state import load_training_state
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState

EVERYBODY = (0, 1, 2)
COUNT = itertools.count()


def spec(path: Path, **settings: object) -> FleetSpec:
    """Three learners; a directory of its own, since it lives on a real disk."""
    defaults = {"num_learners": 3, "quorum": 3, "num_fragments": 6, "sync_interval": 6}
    return FleetSpec(
        seed=5, settings=RunSettings(**(defaults | settings)), snapshots=path / str(next(COUNT))
    )


def ticks(count: int, *learners: int) -> tuple[Action, ...]:
    return (*(Step(learner=i) for i in learners or EVERYBODY), Advance(seconds=1.0)) * count


JOIN = tuple(Join(learner=i) for i in EVERYBODY)
KILL_ALL = (StopSynchronizer(), *(Kill(learner=i) for i in EVERYBODY))


def resumed(*learners: int) -> tuple[Action, ...]:
    """Everything from the snapshot; then the rest of the tick in which it was recorded."""
    new = tuple(i for i in EVERYBODY if i not in learners)
    return (
        GoBack(),
        StartSynchronizer(),
        *(Resume(learner=i) for i in learners),
        *(Join(learner=i) for i in new),
        Advance(seconds=1.0),
    )


def end_of(result: FleetResult) -> tuple[object, ...]:
    """What must agree, bit for bit; terms and past lives may differ."""
    present = [x for x in result.learners if x.is_present]
    return (
        result.published_sha256,
        [(x.learner_id, x.local_step, x.model_sha256, x.published_sha256) for x in present],
    )


def rounds_after(result: FleetResult, cut: int) -> list[tuple[object, ...]]:
    newest = {x.global_step: x for x in result.rounds}
    return [
        (x.global_step, x.contributors, x.weights, x.num_tokens, x.num_steps, x.result_sha256)
        for x in newest.values()
        if x.global_step > cut
    ]


def part_of(fleet: FleetSpec, name: SnapshotName, index: int) -> SavedState:
    assert fleet.snapshots is not None
    path = fleet.snapshots / str(name) / part_name(f"learner-{index}")
    return saved_state_from(load_training_state(path).learner)


@pytest.mark.parametrize(
    ("later", "settings"),
    [(4, {}), (0, {"overlap": 1}), (1, {"codec_up": "fp32", "merge": "average"})],
)
def test_a_fleet_killed_whole_and_resumed_goes_on_bit_for_bit(
    tmp_path: Path, later: int, settings: Mapping[str, object]
) -> None:
    before, after = (*JOIN, *ticks(9)), ticks(7)
    whole = run_fleet(spec(tmp_path, **settings), (*before, *ticks(1), *after))
    taken = (*before[:-4], TakeSnapshot(), *before[-4:], *ticks(1))
    again = run_fleet(
        spec(tmp_path, **settings),
        (*taken, Advance(seconds=1.0), *ticks(later), *KILL_ALL, *resumed(*EVERYBODY), *after),
    )
    assert end_of(again) == end_of(whole)
    assert rounds_after(again, 9) == rounds_after(whole, 9)

    cold = run_fleet(
        spec(tmp_path, **settings),
        (*taken, Advance(seconds=1.0), *ticks(later), *KILL_ALL, *resumed(), *after),
    )
    assert end_of(cold)[0] != end_of(whole)[0], "without their parts it is another training"


def test_taking_one_changes_nothing_and_it_may_be_resumed_again_and_again(tmp_path: Path) -> None:
    once = run_fleet(spec(tmp_path), (*JOIN, *ticks(14)))
    taken = (*JOIN, *ticks(8), TakeSnapshot(), *ticks(2))
    assert end_of(run_fleet(spec(tmp_path), (*taken, *ticks(4)))) == end_of(once)
    thrice = run_fleet(
        spec(tmp_path),
        (
            *taken,
            *itertools.chain(
                *((*ticks(n), *KILL_ALL, *resumed(*EVERYBODY)) for n in (1, 2, 3)),
            ),
            *ticks(4),
        ),
    )
    assert end_of(thrice) == end_of(once)


class Watched:
    """A fleet, and what its synchronizer says of its snapshots."""

    def __init__(self, fleet: ScriptedFleet) -> None:
        self._fleet = fleet

    async def play(self, *schedule: Action) -> None:
        for action in schedule:
            await self._fleet.apply(action)

    @property
    def cut(self) -> int:
        assert self._fleet.synchronizer is not None
        return self._fleet.synchronizer.engine.core.snapshots.cut

    @property
    def awaited(self) -> list[str]:
        assert self._fleet.synchronizer is not None
        return list(self._fleet.synchronizer.engine.snapshots.status().awaited)

    def complete(self) -> dict[str, dict[str, str]]:
        """Who was left out of each complete snapshot, and why."""
        return {str(m.name): dict(m.left_out) for m in self._fleet.store.snapshots()}


def with_fleet(fleet_spec: FleetSpec, body) -> None:
    async def main() -> None:
        async with scripted_fleet(fleet_spec) as fleet:
            await body(Watched(fleet))

    run_in_virtual_time(main())


def test_a_learner_killed_between_begin_and_marker_is_left_out(tmp_path: Path) -> None:
    fleet = spec(tmp_path, quorum=2)

    async def body(w: Watched) -> None:
        await w.play(*JOIN, *ticks(8), TakeSnapshot(), *ticks(1))
        assert w.awaited == ["learner-0", "learner-1", "learner-2"]
        await w.play(Step(learner=0), Kill(learner=1), Step(learner=2), *ticks(9, 0, 2))
        assert w.complete() == {f"1.{w.cut}": {"learner-1": "disconnected"}}
        await w.play(StopSynchronizer(), Kill(learner=0), Kill(learner=2))
        await w.play(GoBack(), StartSynchronizer(), Resume(learner=0), Resume(learner=2))
        with pytest.raises(DilocoError) as caught:
            await w.play(Resume(learner=1))
        assert caught.value.reason is Reason.STORAGE_FAILED
        await w.play(Join(learner=1), *ticks(6))

    with_fleet(fleet, body)


def test_a_learner_that_joins_in_between_is_not_awaited(tmp_path: Path) -> None:
    async def body(w: Watched) -> None:
        await w.play(Join(learner=0), Join(learner=1), *ticks(8, 0, 1), TakeSnapshot())
        await w.play(*ticks(1, 0, 1), Join(learner=2))
        assert w.awaited == ["learner-0", "learner-1"]
        await w.play(*ticks(3))
        assert w.complete() == {f"1.{w.cut}": {}}

    fleet = spec(tmp_path, quorum=2, startup_wait_s=0.0)
    with_fleet(fleet, body)
    assert sorted(p.name for p in fleet.snapshots.rglob("*.safetensors")) == [  # type: ignore[union-attr]
        part_name("learner-0"),
        part_name("learner-1"),
    ]


def test_a_synchronizer_killed_in_the_middle_leaves_the_complete_one_before(
    tmp_path: Path,
) -> None:
    async def body(w: Watched) -> None:
        await w.play(*JOIN, *ticks(8), TakeSnapshot(), *ticks(3))
        complete = w.complete()
        assert len(complete) == 1
        await w.play(TakeSnapshot(), *ticks(1), Step(learner=0), Step(learner=1))
        assert w.awaited, "parts are still to come"
        await w.play(StopSynchronizer(), *ticks(1), StartSynchronizer(), *ticks(8))
        assert w.complete() == complete
        assert w.awaited == [], "a new term awaits nothing of the old one"
        await w.play(TakeSnapshot(), *ticks(3))
        assert f"2.{w.cut}" in w.complete(), "and takes its own"

    with_fleet(spec(tmp_path), body)


def test_updates_above_the_cut_wait_for_a_learner_that_has_not_recorded_yet(
    tmp_path: Path,
) -> None:
    """A learner that stalls over the cut gets updates far above it before its boundary."""
    fleet = spec(tmp_path, quorum=2)
    seen: dict[str, int] = {}

    async def body(w: Watched) -> None:
        await w.play(*JOIN, *ticks(9), TakeSnapshot(), *ticks(1))
        await w.play(*ticks(20, 0, 1))
        assert w.awaited == ["learner-2"]
        seen["cut"] = w.cut
        await w.play(*ticks(2))
        assert w.complete() == {f"1.{w.cut}": {}}

    with_fleet(fleet, body)
    cut = seen["cut"]
    for index in EVERYBODY:
        saved = part_of(fleet, SnapshotName(1, cut), index)
        steps = [version.global_step for version, _ in saved.published.values()]
        assert max(steps) <= cut
        assert saved.cut is not None
        assert saved.cut.name == SnapshotName(1, cut)


def test_what_was_accepted_above_the_cut_counts_as_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut is held up by the store while the round above it already accepts."""
    fleet = spec(tmp_path)
    failures = [0]
    real = KeepingStore.commit

    def commit(
        self: KeepingStore, record: RoundRecord, fragments: Mapping[int, FragmentState]
    ) -> None:
        if record.global_step == 12 and failures[0] < 2:
            failures[0] += 1
            raise DilocoError(Reason.DISK_FULL, "no room")
        real(self, record, fragments)

    monkeypatch.setattr(KeepingStore, "commit", commit)
    accepted: list[int] = []

    async def body(w: Watched) -> None:
        await w.play(*JOIN, *ticks(11), TakeSnapshot(), *ticks(1))
        await w.play(*(Step(learner=i) for i in EVERYBODY), Advance(seconds=0.5))
        engine = w._fleet.synchronizer.engine  # type: ignore[union-attr]
        accepted.extend(r.global_step for r in engine.core.state.rounds if r.accepted)
        await w.play(Advance(seconds=2.0), *ticks(3))
        assert list(w.complete()) == ["1.12"]

    with_fleet(fleet, body)
    assert failures[0] > 0
    assert 13 in accepted, "accepted before the cut was there"
    for index in EVERYBODY:
        saved = part_of(fleet, SnapshotName(1, 12), index)
        # Fragment 1 of round 13 was merged last in round 7; whoever resumes has trained since.
        assert saved.published[1][0].global_step == 7
        assert saved.counters.origins == saved.counters.applied_origins
        assert saved.counters.of(1).num_steps >= 6


SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_a_complete_snapshot_holds_nothing_above_its_cut_and_can_be_resumed(
    tmp_path: Path, seed: int
) -> None:
    fleet = spec(tmp_path, quorum=1, snapshot_every=7, keep_snapshots=3)
    found: list[tuple[SnapshotName, list[int]]] = []

    def disturbed() -> Iterator[Action]:
        for number, action in enumerate(rough_schedule(seed, 3, 40)):
            yield action
            if number % 41 == 40:
                yield TakeSnapshot()

    async def body(w: Watched) -> None:
        for action in disturbed():
            # A snapshot is asked of a synchronizer that is there.
            if isinstance(action, TakeSnapshot) and w._fleet.synchronizer is None:
                continue
            await w.play(action)
        for manifest in w._fleet.store.snapshots():
            indices = [int(x.removeprefix("learner-")) for x in manifest.participants]
            found.append((manifest.name, indices))
        alive = list(w._fleet.learners)
        await w.play(StopSynchronizer(), *(Kill(learner=i) for i in alive))
        await w.play(GoBack(), StartSynchronizer())
        await w.play(*(Resume(learner=i) for i in found[-1][1]), *ticks(9, *found[-1][1]))
        result = await w._fleet.finish()
        for learner in result.learners:
            if learner.is_present:
                assert learner.published_sha256 == result.published_sha256

    with_fleet(fleet, body)
    assert found
    for name, indices in found:
        for index in indices:
            saved = part_of(fleet, name, index)
            assert saved.cut is not None
            assert saved.cut.name == name
            for version, _ in saved.published.values():
                assert (version.term, version.global_step) <= (name.term, name.global_step)
