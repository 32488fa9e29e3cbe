"""Runs a scenario: looks, conducts, acts, heals whatever happens, and judges."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from decoupled_diloco.errors import DilocoError
from diloco_fleet.chaos.conductor import Action, Arm, Begin, Conductor, Heal, Phase
from diloco_fleet.chaos.injector import Injector
from diloco_fleet.chaos.judge import Verdict, check_all, compute_figures, decide
from diloco_fleet.chaos.result import Result
from diloco_fleet.chaos.scenario import Scenario
from diloco_fleet.chaos.schedule import Strike
from diloco_fleet.chaos.targets import is_learner
from diloco_fleet.metrics import RunMetrics

LOOK_S: Final = 0.2
"""Time between two samples."""

_SAY_S: Final = 10.0
"""Time between two lines about what is waited for."""

_STEP_LOOKS: Final = 10
_STEP_LOOK_S: Final = 0.5


@dataclass(slots=True)
class Interruption:
    """Set by whoever wants the scenario to end; safe in a signal handler.

    Attributes:
        why: the reason; empty while nobody does.
        times: how often somebody did.
    """

    why: str = ""
    times: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a runner needs of the world.

    Attributes:
        say: takes a line for people.
        wall: unix time.
        sleep: waits, seconds.
        interruption: asks for the end.
    """

    say: Callable[[str], None]
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    interruption: Interruption = field(default_factory=Interruption)


def run_scenario(
    scenario: Scenario,
    schedule: Sequence[Strike],
    injector: Injector,
    world: World,
    *,
    seed: int,
) -> tuple[Result, RunMetrics]:
    """Runs a scenario on a fleet that is there; everything is healed when it returns or raises.

    Args:
        scenario: the scenario.
        schedule: drawn from it by the seed.
        injector: entered.
        world: see `World`.
        seed: for the record.

    Returns:
        The result, and what the fleet has written.
    """
    conductor = Conductor(scenario=scenario, schedule=schedule, names=injector.names())
    begin = world.wall()
    try:
        world.say(f"{scenario.name}: waiting for a steady state, {scenario.ready_s:g} s at most")
        begin = _conduct(conductor, injector, world)
    finally:
        unhealed = injector.heal_all()
    end = world.wall()
    world.say(f"not healed: {'; '.join(unhealed)}" if unhealed else "everything is healed")
    metrics = _settled(end, injector, world)
    num_learners = sum(is_learner(name) for name in injector.names())
    figures = compute_figures(
        metrics,
        num_learners=num_learners,
        begin=begin,
        end=end,
        restarts=sum(conductor.restarts.values()),
    )
    checks = check_all(conductor, figures, injector.sync_interval())
    verdict = decide(checks, stopped=conductor.stopped, interrupted=bool(world.interruption.why))
    if unhealed and verdict is Verdict.PASSED:
        verdict = Verdict.FAILED
    result = Result(
        scenario=scenario,
        injector=injector.name,
        seed=seed,
        verdict=verdict,
        stopped=conductor.stopped,
        figures=figures,
        checks=tuple(checks),
        records=tuple(conductor.records),
        unhealed=tuple(unhealed),
        unreadable=metrics.problems,
        begin=begin,
        end=end,
    )
    return result, metrics


def _settled(end: float, injector: Injector, world: World) -> RunMetrics:
    """What the fleet has written, once it has settled; where that fails, only why: no result is
    lost for that.
    """
    try:
        injector.settle()
        return _metrics_beyond(end, injector, world)
    except (DilocoError, OSError) as error:
        message = _message(error)
        world.say(message)
        return RunMetrics(problems=(message,))


def _message(error: DilocoError | OSError) -> str:
    return error.message if isinstance(error, DilocoError) else str(error)


def _metrics_beyond(end: float, injector: Injector, world: World) -> RunMetrics:
    """What the fleet has written; where it goes on, with the steps under way at the end."""
    metrics = injector.metrics()
    for _ in range(_STEP_LOOKS):
        newest = max((steps[-1].time for steps in metrics.steps.values()), default=end)
        if newest >= end:
            break
        world.sleep(_STEP_LOOK_S)
        metrics = injector.metrics()
    return metrics


def _conduct(conductor: Conductor, injector: Injector, world: World) -> float:
    """Conducts to the end; returns the unix time of the steady state, else of the beginning."""
    begin = said = world.wall()
    while not conductor.is_over:
        if world.interruption.why:
            world.say(f"{world.interruption.why}: healing everything")
            actions = conductor.stop(f"by {world.interruption.why}")
        else:
            before = conductor.phase
            try:
                actions = conductor.handle(injector.look())
            except DilocoError as error:
                actions = conductor.stop(f"nobody can look any more: {error.message}")
            if before is Phase.STEADYING:
                begin = world.wall() if conductor.phase is Phase.STRIKING else begin
            _say_phase(world, conductor, before)
            if conductor.phase is not before or not conductor.awaited:
                said = world.wall()
            elif world.wall() >= said + _SAY_S:
                said = world.wall()
                world.say(f"         {conductor.awaited}")
        for action in actions:
            _act(action, injector, conductor, world)
        if not conductor.is_over:
            world.sleep(LOOK_S)
    return begin


def _say_phase(world: World, conductor: Conductor, before: Phase) -> None:
    if conductor.phase is before:
        return
    if conductor.phase is Phase.STRIKING:
        num_strikes = len(conductor.schedule)
        strikes = f"{num_strikes} strike{'' if num_strikes == 1 else 's'}"
        world.say(f"the fleet is steady; {strikes} in {conductor.scenario.duration_s:g} s")
    elif conductor.phase is Phase.SETTLING:
        world.say(
            f"no more faults; waiting for recoveries, {conductor.scenario.settle_s:g} s at most"
        )
    elif conductor.stopped:
        world.say(conductor.stopped)


def _act(action: Action, injector: Injector, conductor: Conductor, world: World) -> None:
    record = conductor.records[action.number]
    try:
        if isinstance(action, Begin):
            whom = " from ".join(", ".join(group) for group in action.groups)
            world.say(f"{record.began_s:6.1f} s  {action.fault.fault} {whom}")
            injector.begin(action)
        elif isinstance(action, Arm):
            world.say(f"         armed: {action.fault.fault} {action.process} at {action.fault.on}")
            injector.arm(action)
        elif isinstance(action, Heal):
            injector.heal(action.number)
            armed = record.healed_s is None
            when = "        " if armed else f"{record.healed_s:6.1f} s"
            # What could not be done was said; a part of it may have been.
            if not record.problem:
                world.say(f"{when}  {'disarmed' if armed else 'healed'}: {record.fault.fault}")
    except (DilocoError, OSError) as error:
        message = _message(error)
        world.say(f"         {message}")
        conductor.failed(action.number, message)
