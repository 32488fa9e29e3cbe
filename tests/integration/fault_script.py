"""Scripts of faults for a fleet of real processes: named points, armed when a test says so.

::

    faults = FaultScript(folder)
    dies = faults.at(FaultPoint.AFTER_PERSIST, FaultAction.KILL, process="synchronizer*")
    fleet = Fleet(folder, ..., faults=faults)
    ...
    hit = faults.strike(fleet, dies)     # arms it, waits for it; what was written down of it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleet_view import FleetView, read_lines

from decoupled_diloco.fault_points import VARIABLE, Fault, FaultAction, FaultPoint, Faults


class FaultScript:
    """The faults of one fleet; none happens before it is armed, and each happens once.

    Args:
        folder: takes the log and the files that arm.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._faults: list[Fault] = []
        self._armed: list[Fault] = []

    def at(
        self,
        point: FaultPoint,
        action: FaultAction = FaultAction.KILL,
        *,
        process: str = "",
        nth: int = 1,
        hang_s: float = 0.0,
    ) -> Fault:
        """Adds a fault; before the fleet is started."""
        name = f"{len(self._faults):02}-{point}-{action}"
        fault = Fault(
            name=name, point=point, action=action, nth=nth, process=process, hang_s=hang_s,
            after=self._folder / f"arm-{name}",
        )  # fmt: skip
        self._faults.append(fault)
        return fault

    def environment(self) -> dict[str, str]:
        """What the fleet gets into its environment."""
        return {VARIABLE: Faults(log=self.log, faults=self._faults).to_text()}

    @property
    def log(self) -> Path:
        """File in which the processes write down what happened."""
        return self._folder / "faults.jsonl"

    def arm(self, fault: Fault, process: str = "") -> None:
        """Lets a fault happen from now on, to the named process where one is named."""
        assert fault.after is not None
        new = fault.after.with_suffix(".new")
        new.write_text(process)
        new.replace(fault.after)
        self._armed.append(fault)

    def hits(self) -> list[dict[str, Any]]:
        """What has happened: name, time, point, action, process and pid, in order."""
        return read_lines(self.log)

    def hit(self, fault: Fault) -> dict[str, Any] | None:
        """What was written down of a fault; None while it has not happened."""
        return next((line for line in self.hits() if line["name"] == fault.name), None)

    def strike(self, fleet: FleetView, fault: Fault, process: str = "") -> dict[str, Any]:
        """Arms a fault and waits until it has happened."""
        self.arm(fault, process)
        return fleet.wait_until(lambda: self.hit(fault), f"fault {fault.name} to be hit")

    def assert_all_hit(self) -> None:
        """Every fault that was armed has happened, once, and no other one has."""
        happened = sorted(line["name"] for line in self.hits())
        assert happened == sorted(fault.name for fault in self._armed)
