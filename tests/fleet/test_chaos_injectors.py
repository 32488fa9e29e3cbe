"""One suite for everybody who does faults: what is begun shows, what is healed is gone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.chaos.scenario import Fault
from diloco_fleet.chaos.undo import Undo
from tests.fleet.chaos_bench import (
    CUT,
    FREEZE,
    KILL,
    LATE,
    NO_REDIS,
    SLOW,
    Bench,
    Containers,
    Processes,
    until,
)


@pytest.fixture(params=["process", "docker"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made: Bench = Processes(tmp_path) if request.param == "process" else Containers()
    try:
        yield made
    finally:
        made.hands.heal_all()
        made.close()


@pytest.mark.parametrize("fault", [FREEZE, CUT, SLOW, LATE, NO_REDIS], ids=lambda x: str(x.fault))
def test_what_lasts_shows_until_it_is_healed(bench: Bench, fault: Fault) -> None:
    bench.strike(0, fault)
    until(lambda: bool(bench.disturbed()), "it shows")
    bench.hands.heal(0)
    until(lambda: not bench.disturbed(), "it is gone")
    bench.hands.heal(0)
    assert bench.hands.heal_all() == []


def test_a_kill_ends_a_life_and_leaves_nothing_to_heal(bench: Bench) -> None:
    bench.strike(0, KILL)
    until(lambda: bench.renewed("learner-1"), "it is dead")
    assert bench.hands.heal_all() == []
    assert not bench.disturbed()


def test_one_healing_leaves_the_other_faults_alone(bench: Bench) -> None:
    bench.strike(0, SLOW)
    slow = bench.disturbed()
    bench.strike(1, NO_REDIS)
    bench.strike(2, CUT)
    bench.hands.heal(2)
    bench.hands.heal(1)
    assert bench.disturbed() == slow
    bench.hands.heal(0)
    assert not bench.disturbed()


def test_everything_is_healed_at_once(bench: Bench) -> None:
    for number, fault in enumerate((SLOW, CUT, FREEZE, NO_REDIS)):
        bench.strike(number, fault)
    assert bench.hands.heal_all() == []
    until(lambda: not bench.disturbed(), "all is as before")


def test_who_dies_while_it_is_frozen_is_no_trouble(bench: Bench) -> None:
    bench.strike(0, FREEZE)
    bench.end("learner-1")
    bench.hands.heal(0)
    assert bench.hands.heal_all() == []


def test_who_is_not_there_cannot_be_struck(bench: Bench) -> None:
    bench.end("learner-1")
    with pytest.raises(DilocoError) as caught:
        bench.strike(0, KILL)
    assert caught.value.reason is Reason.TARGET_NOT_FOUND
    assert "learner-1" in caught.value.message


def test_an_undoing_that_fails_stops_no_other_and_is_tried_again() -> None:
    """Whatever it raises: nobody foresees every way in which an engine or a disk may fail."""
    undo, left, done = Undo(), {"b"}, []

    def undoing(name: str) -> None:
        if name in left:
            raise RuntimeError(name)
        done.append(name)

    for number, name in enumerate("abc"):
        undo.add(number % 2, partial(undoing, name))
    unhealed = undo.heal_all()
    assert (done, len(unhealed)) == (["c", "a"], 1)
    assert "RuntimeError: b" in unhealed[0]
    left.clear()
    assert undo.heal_all() == []
    assert done == ["c", "a", "b"]
