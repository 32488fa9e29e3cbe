"""Schedules as JSON lines, and virtual time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.scripted_data import (
    Advance,
    Join,
    Kill,
    Leave,
    StartSynchronizer,
    Step,
    StopSynchronizer,
    rough_schedule,
    schedule_from_lines,
    schedule_to_lines,
    steady_schedule,
)
from diloco_fleet.scripted_world import run_in_virtual_time, virtual_loop

ACTIONS = st.one_of(
    *(st.builds(kind, learner=st.integers(0, 9999)) for kind in (Join, Step, Leave, Kill)),
    st.builds(Advance, seconds=st.floats(0, 1e6)),
    st.builds(StopSynchronizer, drain=st.booleans()),
    st.builds(StartSynchronizer),
)


@given(st.lists(ACTIONS, max_size=30))
def test_a_schedule_reads_back_as_it_was_written(schedule):
    assert list(schedule_from_lines(schedule_to_lines(schedule))) == schedule


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "no JSON"),
        ("[]", "names no action"),
        ('{"action": "explode"}', "names no action"),
        ('{"action": ["step"]}', "names no action"),
        ('{"action": "step"}', "step takes learner"),
        ('{"action": "step", "learner": 1, "more": 2}', "step takes learner"),
        ('{"action": "step", "learner": true}', "learner cannot be True"),
        ('{"action": "step", "learner": -1}', "learner cannot be -1"),
        ('{"action": "advance", "seconds": NaN}', "seconds cannot be nan"),
        ('{"action": "advance", "seconds": -0.5}', "seconds cannot be -0.5"),
        ('{"action": "advance", "seconds": "1"}', "seconds cannot be"),
        ('{"action": "stop_synchronizer", "drain": 1}', "drain cannot be 1"),
        ('{"action": "start_synchronizer", "learner": 1}', "takes nothing more"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(line, what):
    text = schedule_to_lines([Join(learner=0)]) + "\n" + line
    with pytest.raises(UsageError, match=f"line 3: .*{what}") as caught:
        schedule_from_lines(text)
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_a_steady_schedule_steps_everybody_at_its_own_pace():
    schedule = steady_schedule(2, 6, tick_s=0.5, every=(1, 3))
    assert schedule[:2] == (Join(learner=0), Join(learner=1))
    assert schedule.count(Step(learner=0)) == 6
    assert schedule.count(Step(learner=1)) == 2
    assert schedule.count(Advance(seconds=0.5)) == 6


@given(seed=st.integers(0, 2**32), num_learners=st.integers(1, 5))
def test_a_rough_schedule_can_be_played(seed, num_learners):
    """Nobody joins twice, steps or dies while away; somebody is always there, and the end is up."""
    schedule = rough_schedule(seed, num_learners, 40, fault_rate=0.5)
    assert schedule == rough_schedule(seed, num_learners, 40, fault_rate=0.5)
    alive: set[int] = set()
    is_up = True
    for number, action in enumerate(schedule):
        match action:
            case Join(learner=i):
                assert is_up
                assert i not in alive
                alive.add(i)
            case Kill(learner=i) | Leave(learner=i):
                alive.remove(i)
            case Step(learner=i):
                assert i in alive
            case StopSynchronizer():
                assert is_up
                is_up = False
            case StartSynchronizer():
                assert not is_up
                is_up = True
        assert alive or number < num_learners
    assert is_up


def test_rough_schedules_have_every_kind_of_action():
    kinds = {type(action) for seed in range(5) for action in rough_schedule(seed, 4, 60)}
    assert kinds == {Join, Step, Leave, Kill, Advance, StopSynchronizer, StartSynchronizer}


def test_timers_fire_in_their_order_and_at_their_time_and_none_before_time_passes():
    async def main() -> list[tuple[str, float]]:
        loop, seen = virtual_loop(), []
        for name, delay in (("late", 3600.0), ("soon", 0.25), ("next", 1.0)):
            loop.call_later(delay, lambda name=name: seen.append((name, loop.time())))
        await loop.settle()
        assert seen == []
        assert loop.time() == 0.0
        await loop.advance(1.0)
        assert [name for name, _ in seen] == ["soon", "next"]
        await loop.advance(7200.0)
        return seen

    assert run_in_virtual_time(main()) == [("soon", 0.25), ("next", 1.0), ("late", 3600.0)]


def test_settling_waits_for_chains_of_work_of_any_length():
    async def main() -> int:
        done = 0

        async def chain() -> None:
            nonlocal done
            for _ in range(500):
                await asyncio.sleep(0)
            done += 1

        tasks = [asyncio.create_task(chain()) for _ in range(3)]
        await virtual_loop().settle()
        assert all(task.done() for task in tasks)
        return done

    assert run_in_virtual_time(main()) == 3


def test_a_fleet_that_can_never_go_on_fails_instead_of_hanging():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can happen any more"):
        run_in_virtual_time(main())


def test_running_in_circles_fails_instead_of_hanging(monkeypatch):
    monkeypatch.setattr("diloco_fleet.scripted_world._MAX_TURNS", 1000)

    async def main() -> None:
        loop = virtual_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await loop.settle()

    with pytest.raises(RuntimeError, match="something runs in circles"):
        run_in_virtual_time(main())
