"""From a scenario and a seed to a schedule: the same in every run, on every injector. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from diloco_fleet.chaos.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that is to happen once.

    Attributes:
        number: counts the strikes of a schedule, from 0.
        fault_index: which fault of the scenario.
        at_s: when, seconds since the fleet was steady; for one that waits for an event or a
            point, when it begins to wait.
        on: the event or point; empty for a time.
        pick: from 0 to below 1: chooses among those that it may strike.
    """

    number: int
    fault_index: int
    at_s: float
    on: str
    pick: float


def draw_schedule(scenario: Scenario, seed: int) -> tuple[Strike, ...]:
    """Draws a schedule, in the order of time.

    Each fault has randomness of its own, so that none moves where another one is changed. Times by
    ``mtbf_s`` are a Poisson process: independent exponential gaps, each of which is drawn and then
    waited for.

    Args:
        scenario: the scenario.
        seed: decides every choice.
    """
    drawn: list[tuple[float, int, str, float]] = []
    for index, fault in enumerate(scenario.faults):
        chance = random.Random(f"{seed}/{index}")
        moments = list(fault.at_s)
        if fault.mtbf_s is not None:
            moment = fault.first_s + chance.expovariate(1.0 / fault.mtbf_s)
            while moment < scenario.duration_s:
                moments.append(moment)
                moment += chance.expovariate(1.0 / fault.mtbf_s)
        elif fault.on:
            moments = [fault.first_s]
        drawn += [(moment, index, fault.on, chance.random()) for moment in moments]
    return tuple(
        Strike(number=number, fault_index=index, at_s=at_s, on=on, pick=pick)
        for number, (at_s, index, on, pick) in enumerate(sorted(drawn))
    )
