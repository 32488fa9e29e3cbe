"""What the processes of a fleet do to themselves: they die or stop at a point of the protocol, and
have a wall clock that is wrong. Their environment holds the script; files arm it while they run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from decoupled_diloco.fault_points import VARIABLE, FaultAction, FaultPoint, Faults
from decoupled_diloco.fault_points import Fault as PointFault
from diloco_fleet.chaos.scenario import FaultKind, Scenario
from diloco_fleet.chaos.schedule import Strike

_ACTIONS: Final = {FaultKind.KILL: FaultAction.KILL, FaultKind.FREEZE: FaultAction.STOP}


@dataclass(frozen=True, slots=True)
class Skew:
    """A span in which the wall clock of a process was wrong.

    Attributes:
        process: its name.
        offset_s: by how much.
        begin: unix time.
        end: unix time.
    """

    process: str
    offset_s: float
    begin: float
    end: float


class PointFaults:
    """The script of one fleet.

    Args:
        folder: takes the log, what arms, and the clocks.
        scenario: the scenario.
        strikes: those that happen at points.
        wall: unix time.
    """

    def __init__(
        self,
        folder: Path,
        scenario: Scenario,
        strikes: Sequence[Strike],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._wall = wall
        self._since: dict[str, tuple[float, float]] = {}
        self._skews: list[Skew] = []
        self._faults = [
            PointFault(
                name=str(strike.number),
                point=FaultPoint(strike.on),
                action=_ACTIONS[scenario.faults[strike.fault_index].fault],
                after=folder / f"arm-{strike.number}",
            )
            for strike in strikes
        ]

    @property
    def _log(self) -> Path:
        return self._folder / "faults.jsonl"

    @property
    def _clocks(self) -> Path:
        return self._folder / "clocks"

    def environment(self) -> dict[str, str]:
        """Makes the folder; returns what the fleet gets into its environment."""
        self._clocks.mkdir(parents=True)
        script = Faults(log=self._log, faults=self._faults, clock=self._clocks)
        return {VARIABLE: script.to_text()}

    def arm(self, number: int, process: str) -> None:
        """Lets a strike happen from now on to a process whose name fits a pattern."""
        _replace(self._folder / f"arm-{number}", process)

    def disarm(self, number: int) -> None:
        """Lets a strike happen no more."""
        (self._folder / f"arm-{number}").unlink(missing_ok=True)

    def struck(self) -> dict[int, str]:
        """Which strikes have happened, and to whom."""
        try:
            lines = self._log.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return {int(entry["name"]): str(entry["process"]) for entry in found}

    def set_clock_wrong(self, process: str, offset_s: float) -> None:
        """Sets the wall clock of a process wrong."""
        self._since[process] = (self._wall(), offset_s)
        _replace(self._clocks / process, repr(offset_s))

    def set_clock_right(self, process: str) -> None:
        """Sets the wall clock of a process right again."""
        (self._clocks / process).unlink(missing_ok=True)
        if process in self._since:
            begin, offset_s = self._since.pop(process)
            self._skews.append(Skew(process, offset_s, begin, self._wall()))

    def skews(self) -> tuple[Skew, ...]:
        """When which clock was wrong."""
        now = self._wall()
        wrong = [Skew(name, by_s, begin, now) for name, (begin, by_s) in self._since.items()]
        return (*self._skews, *wrong)


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
