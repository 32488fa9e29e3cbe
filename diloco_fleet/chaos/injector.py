"""The seam between a scenario and a fleet: who is there, what is seen, what is done and undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.chaos.conductor import Arm, Begin
from diloco_fleet.chaos.sample import Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind, Scenario
from diloco_fleet.chaos.schedule import Strike
from diloco_fleet.chaos.targets import REST, check_exists
from diloco_fleet.metrics import RunMetrics
from diloco_fleet.standby import REDIS

_OF_REDIS: Final = frozenset({FaultKind.REDIS_LOSS, FaultKind.REDIS_EMPTY})


class Injector(ABC):
    """Does faults to one fleet. Use as a context manager: entered, the fleet is there.

    What is begun is healed by `heal` of the same number, and everything by `heal_all`, at any time,
    also twice, and whatever else has failed. Its methods are called from one thread.

    Attributes:
        name: what it is called.
    """

    name: ClassVar[str]

    @abstractmethod
    def refusal(self, fault: Fault) -> str:
        """Says why it cannot do a fault; empty where it can. Nothing has been started yet."""

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Every process of the fleet, running or not; known before it is entered."""

    @abstractmethod
    def __enter__(self) -> Injector:
        """Starts the fleet, or begins to watch the one that runs.

        Raises:
            DilocoError: why that cannot be.
        """

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Heals everything, and ends what was started; also of one that was never entered."""

    @abstractmethod
    def look(self) -> Sample:
        """What is seen now; never waits for long."""

    @abstractmethod
    def begin(self, action: Begin) -> None:
        """Does a fault.

        Raises:
            DilocoError: why it cannot be done after all.
        """

    @abstractmethod
    def arm(self, action: Arm) -> None:
        """Lets who gets to a point of the protocol strike itself.

        Raises:
            DilocoError: why that cannot be.
        """

    @abstractmethod
    def heal(self, number: int) -> None:
        """Ends what was begun under a number.

        Raises:
            DilocoError: why it cannot be ended.
        """

    @abstractmethod
    def heal_all(self) -> list[str]:
        """Ends everything that is not ended; returns what could not be, for people."""

    @abstractmethod
    def settle(self) -> None:
        """Ends the work of a fleet that was started for the scenario; waits until it has ended."""

    @abstractmethod
    def metrics(self) -> RunMetrics:
        """What the fleet has written."""

    @abstractmethod
    def sync_interval(self) -> int | None:
        """The setting of H; None where nobody tells."""


def refuse_impossible(injector: Injector, scenario: Scenario) -> None:
    """Refuses what an injector or its fleet cannot do, before anything is started.

    Raises:
        UsageError: FAULT_IMPOSSIBLE with the reason, TARGET_NOT_FOUND.
    """
    names = injector.names()
    for fault in scenario.faults:
        where = f"scenario {scenario.name}, fault {fault.fault}"
        why = injector.refusal(fault)
        if why:
            raise UsageError(
                Reason.FAULT_IMPOSSIBLE, f"{where}: injector {injector.name} cannot do it: {why}"
            )
        wanted = [fault.who, *(target for group in fault.groups for target in group)]
        if fault.fault in _OF_REDIS:
            wanted.append(REDIS)
        for target in wanted:
            if target and target != REST:
                check_exists(target, names, where)


def strikes_at_points(scenario: Scenario, schedule: Sequence[Strike]) -> list[Strike]:
    """Returns the strikes that processes do to themselves."""
    return [strike for strike in schedule if scenario.faults[strike.fault_index].at_point]
