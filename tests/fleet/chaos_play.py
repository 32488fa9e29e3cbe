"""Conducts scenarios on a world of a few numbers, for tests."""

from __future__ import annotations

from collections.abc import Callable

from diloco_fleet.chaos.conductor import Action, Begin, Conductor, Phase
from diloco_fleet.chaos.scenario import Fault, FaultKind, Hypothesis, Scenario
from diloco_fleet.chaos.schedule import draw_schedule
from tests.fleet.chaos_world import NAMES, World


def scenario(*faults: Fault, **more: object) -> Scenario:
    values = {"duration_s": 30.0, "settle_s": 20.0, "ready_s": 20.0, **more}
    return Scenario(
        name="test", about="", steady=Hypothesis(rounds_lost=0), faults=faults, **values
    )


def conducted(world: World, *faults: Fault, **more: object) -> Conductor:
    chosen = scenario(*faults, **more)
    return Conductor(scenario=chosen, schedule=draw_schedule(chosen, 0), names=NAMES)


def play(
    conductor: Conductor,
    world: World,
    until: Callable[[], bool],
    act: Callable[[Action], None] = lambda _: None,
) -> list[Action]:
    """Lets time pass until something is so; returns what was to be done."""
    done: list[Action] = []
    for _ in range(400):
        for action in conductor.handle(world.sample()):
            done.append(action)
            act(action)
        if until():
            return done
        world.sleep(0.5)
    raise AssertionError(f"it did not come to that: {conductor}")


def over(conductor: Conductor) -> Callable[[], bool]:
    return lambda: conductor.phase is Phase.OVER


def kill(who: str = "learner-1", at_s: float = 2.0) -> Fault:
    return Fault(fault=FaultKind.KILL, who=who, at_s=(at_s,))


def freeze(who: str = "learner-1", at_s: float = 2.0, duration_s: float = 4.0) -> Fault:
    return Fault(fault=FaultKind.FREEZE, who=who, at_s=(at_s,), duration_s=duration_s)


def dies(world: World, for_s: float) -> Callable[[Action], None]:
    def act(action: Action) -> None:
        if isinstance(action, Begin):
            world.dead[action.groups[0][0]] = world.now_s + for_s

    return act
