"""A fleet with a standby: leaders, Redis and at last all of it fail, one after the other."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import pytest
from fleet_harness import Fleet, between, small

from diloco_fleet.lineage import leaderships, lost_rounds
from diloco_fleet.metrics import RunMetrics

pytestmark = pytest.mark.integration

NUM_LEARNERS = 3
NUM_KILLS = 5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(
        tmp_path_factory.mktemp("failover"),
        *("--learners", str(NUM_LEARNERS), "--global-steps", "0", "--pace", "0.1"),
        *("--replication", "one", "--evaluate-every", "100000"),
        settings=small() + "max_restarts = 1000000\nrestart_wait_s = 0.5\n",
        standby=True,
    )
    try:
        yield fleet
    finally:
        fleet.close()


def term_of(fleet: Fleet) -> int:
    return max((int(line["term"]) for line in fleet.rounds()), default=0)


def ready(fleet: Fleet) -> str:
    """Waits until a leader merges with a standby in sync; returns its name."""
    fleet.wait_for_rounds(4)
    fleet.wait_until(fleet.in_sync, "a standby in sync")
    leader = fleet.wait_until(fleet.leader, "a leader")
    assert isinstance(leader, str)
    return leader


def assert_trained_on(fleet: Fleet, begin: float, end: float) -> None:
    for index in range(NUM_LEARNERS):
        assert between(fleet.steps(index), begin, end), f"learner-{index} waited"


def doubled(metrics: RunMetrics) -> set[int]:
    """Global steps of which learners applied more than one version."""
    seen: dict[tuple[int, int], set[tuple[int, str]]] = {}
    for steps in metrics.steps.values():
        for applied in (entry for step in steps for entry in step.applied):
            key = (applied.fragment, applied.global_step)
            seen.setdefault(key, set()).add((applied.term, applied.digest))
    return {t for (_, t), versions in seen.items() if len(versions) > 1}


def test_every_leader_that_is_killed_is_replaced_and_nobody_waits(fleet: Fleet) -> None:
    for _ in range(NUM_KILLS):
        leader, term = ready(fleet), term_of(fleet)
        killed = fleet.kill(leader)
        fleet.wait_until(lambda term=term: term_of(fleet) > term, "a leader of a later term")
        first = next(line for line in fleet.rounds() if line["term"] > term)
        assert_trained_on(fleet, killed, first["time"])


@pytest.mark.parametrize("fault", ["killed", "emptied", "frozen"])
def test_redis_alone_failing_stops_nothing(fleet: Fleet, fault: str) -> None:
    ready(fleet)
    match fault:
        case "killed":
            struck = fleet.kill("redis")
        case "emptied":
            struck = fleet.empty_redis()
        case _:
            struck = fleet.freeze("redis")
    rounds = fleet.wait_for_rounds(30)
    assert_trained_on(fleet, struck, rounds[-1]["time"])
    helpers = {name for x in rounds if x["time"] > struck for name in x["contributors"]}
    assert len(helpers) == NUM_LEARNERS, "everybody contributes"
    if fault == "frozen":
        fleet.thaw("redis")
    fleet.wait_until(fleet.redis_answers, "redis again")
    ready(fleet)


def test_a_leader_that_is_frozen_is_replaced_and_follows_when_it_wakes(fleet: Fleet) -> None:
    leader, term = ready(fleet), term_of(fleet)
    frozen = fleet.freeze(leader)
    fleet.wait_until(lambda: term_of(fleet) > term, "a leader of a later term")
    first = next(line for line in fleet.rounds() if line["term"] > term)
    assert_trained_on(fleet, frozen, first["time"])
    fleet.thaw(leader)
    fleet.wait_until(lambda: fleet.roles().get(leader) == "following", "the old leader to follow")
    ready(fleet)


@pytest.mark.parametrize("role", ["leading", "following"])
def test_a_store_that_is_deleted_under_its_synchronizer_is_filled_again(
    fleet: Fleet, role: str
) -> None:
    """The process ends and is started anew; where it led, the standby leads meanwhile."""
    leader, term = ready(fleet), term_of(fleet)
    name = next(x for x in fleet.synchronizers if (x == leader) == (role == "leading"))
    pid = fleet.process_pid(name)
    store = fleet.files.store_of(fleet.synchronizers.index(name))
    gone = store.rename(store.with_name(f"{store.name}-{role}"))  # it is written to: all at once
    shutil.rmtree(gone)
    fleet.wait_until(lambda: fleet.process_pid(name) not in (pid, None), f"{name} to start anew")
    ready(fleet)
    fleet.wait_until(lambda: fleet.roles()[name] == "following", f"{name} to follow")
    assert (term_of(fleet) > term) == (role == "leading")
    assert "STORE_REMOVED" in fleet.files.log_of(name).read_text()


def test_a_leader_that_is_told_to_stop_hands_over(fleet: Fleet) -> None:
    leader, term = ready(fleet), term_of(fleet)
    fleet.kill(leader, signal.SIGTERM)
    fleet.wait_until(lambda: term_of(fleet) > term, "a leader of a later term")


def test_the_whole_fleet_killed_at_once_goes_on_from_its_stores(fleet: Fleet) -> None:
    """To its end; and after all that was done to it no round is lost or doubled."""
    ready(fleet)
    fleet.kill_everything()
    fleet.start("--resume", "--standby", "--global-steps", str(fleet.global_step() + 24))
    assert fleet.wait() == 0, fleet.text()
    assert not fleet.pids()
    metrics = fleet.metrics()
    assert not lost_rounds(metrics.rounds, leaderships(metrics), metrics.steps)
    assert not doubled(metrics)
    stops = [mark.values for name in metrics.steps for mark in metrics.marks_of(name, "stop")]
    assert sum(values["network_calls"] for values in stops) > 0
    assert sum(values["network_calls_in_training"] for values in stops) == 0
    report = fleet.report()
    assert report["rounds_lost"] == 0
    assert report["leader_changes"]
    assert report["evaluation_loss_after"] < report["evaluation_loss_before"]
