"""A leader that is cut off from Redis and standby, but not from half of the learners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet_harness import between, small
from wired_fleet import WiredFleet

from diloco_fleet.lineage import leaderships, lost_rounds
from synchronizer_server.store import DiskStore

pytestmark = pytest.mark.integration

NUM_LEARNERS = 4
NEAR = ("learner-0", "learner-1")


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredFleet]:
    settings = {
        "num_learners": NUM_LEARNERS, "total_global_steps": 0, "pace": 0.1,
        "evaluate_every": 100000, "standby": True, "replication": "one",
    }  # fmt: skip
    fleet = WiredFleet(tmp_path_factory.mktemp("split"), settings, small())
    try:
        yield fleet
    finally:
        fleet.close()


def test_one_lineage_is_left_and_every_copy_is_the_same_bit_for_bit(fleet: WiredFleet) -> None:
    fleet.wait_for_rounds(8)
    fleet.wait_until(fleet.in_sync, "a standby in sync")
    old = fleet.wait_until(fleet.leader, "a leader")
    new = fleet.wait_until(fleet.follower, "a follower")
    assert isinstance(old, str)
    assert isinstance(new, str)
    cut = fleet.rounds()[-1]["time"]
    fleet.isolate(old, but=set(NEAR))

    def of_new() -> list[dict[str, object]]:
        return [line for line in fleet.lines(new, "round") if line["time"] > cut]

    fleet.wait_until(lambda: len(of_new()) > 8, "the standby to merge")
    everybody = {f"learner-{i}" for i in range(NUM_LEARNERS)}

    def contributors() -> set[object]:
        return {x for line in of_new() for x in line["contributors"]}

    fleet.wait_until(lambda: contributors() == everybody, "the near learners to leave the old one")
    last = float(of_new()[-1]["time"])
    for index in range(NUM_LEARNERS):
        assert between(fleet.steps(index), cut, last), f"learner-{index} waited"
    fleet.reunite(old)
    fleet.wait_until(lambda: fleet.roles() == {old: "following", new: "leading"}, "one leader")
    fleet.wait_until(fleet.in_sync, "the old leader to be in sync")
    fleet.wait_for_rounds(8)
    fleet.drain()

    metrics = fleet.metrics()
    assert not lost_rounds(metrics.rounds, leaderships(metrics), metrics.steps)
    versions: dict[tuple[int, int], set[str]] = {}
    for steps in metrics.steps.values():
        for applied in (entry for step in steps for entry in step.applied):
            versions.setdefault((applied.fragment, applied.global_step), set()).add(applied.digest)
    assert {len(digests) for digests in versions.values()} == {1}, "every learner has the same bits"
    run_id = fleet.state().run_id
    records = []
    for path in (fleet.files.root / "store", fleet.files.root / "store-1"):
        store = DiskStore(path, run_id)
        loaded = store.load()
        store.close()
        assert loaded is not None
        records.append((loaded[0].term, loaded[0].versions))
    assert records[0] == records[1], "both stores end on one lineage"
