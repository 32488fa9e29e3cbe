"""Injector `process`: faults for the processes of a fleet on this machine.

A fleet of its own gets a link between any two of its processes. One that runs already is known by
its run directory: its processes can be struck, its links cannot.
"""

from __future__ import annotations

import re
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.chaos.conductor import Arm, Begin
from diloco_fleet.chaos.injector import Injector, strikes_at_points
from diloco_fleet.chaos.own_fleet import OwnFleet, resolve_shape
from diloco_fleet.chaos.point_faults import PointFaults
from diloco_fleet.chaos.process_faults import (
    ProcessFaults,
    ProcessFleet,
    no_such_fault_because,
    open_child,
)
from diloco_fleet.chaos.sample import Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind, Scenario
from diloco_fleet.chaos.schedule import Strike
from diloco_fleet.chaos.skew import with_true_times
from diloco_fleet.chaos.watch import Watch, make_sample
from diloco_fleet.fleet_settings import resolve
from diloco_fleet.local import Phase
from diloco_fleet.metrics import (
    EVALUATOR,
    SYNCHRONIZER,
    RunMetrics,
    is_synchronizer,
    read_metrics,
)
from diloco_fleet.process import Restart
from diloco_fleet.run_files import ProcessEntry, RunFiles, is_running, read_fleet
from diloco_fleet.standby import REDIS


class _Processes(Injector):
    """What both have in common."""

    name: ClassVar[str] = "process"

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._points: PointFaults | None = None

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    @abstractmethod
    def _fleet(self) -> ProcessFleet:
        """The fleet, once it is there."""

    def _enter(self, faults: ProcessFaults, addresses: Mapping[str, str]) -> None:
        """Watches the fleet from now on; what is left of faults is healed first at the end."""
        self._watch = self._stack.enter_context(Watch(addresses))
        self._faults = faults
        self._stack.callback(faults.heal_all)

    def look(self) -> Sample:
        """See `Injector.look`."""
        pids = self._fleet.pids()
        sample = make_sample(
            self._watch.answers(),
            at_s=time.monotonic(),
            running=[name for name, pid in pids.items() if pid is not None],
            restarts=self._fleet.restarts(),
            struck=self._points.struck() if self._points is not None else {},
            ended=self._fleet.ended,
        )
        self._note(sample)
        return sample

    def _note(self, sample: Sample) -> None:
        """Takes a sample on its way."""

    def begin(self, action: Begin) -> None:
        """See `Injector.begin`."""
        self._faults.begin(action)

    def arm(self, action: Arm) -> None:
        """See `Injector.arm`."""
        self._faults.arm(action)

    def heal(self, number: int) -> None:
        """See `Injector.heal`."""
        self._faults.heal(number)

    def heal_all(self) -> list[str]:
        """See `Injector.heal_all`."""
        return self._faults.heal_all()

    def metrics(self) -> RunMetrics:
        """See `Injector.metrics`."""
        metrics = read_metrics(self._fleet.files.metrics)
        return metrics if self._points is None else with_true_times(metrics, self._points.skews())


class ProcessInjector(_Processes):
    """Starts the fleet that a scenario asks for.

    Args:
        scenario: the scenario.
        schedule: its strikes.
        root: run directory of the fleet; it must not exist.
        environ: this process's environment.
        say: takes lines for people.
        times_asked: how often somebody has asked for the end.

    Raises:
        UsageError: for settings of the scenario that are wrong.
    """

    def __init__(
        self,
        scenario: Scenario,
        schedule: Sequence[Strike],
        root: Path,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        *,
        times_asked: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()
        self._scenario = scenario
        self._schedule = schedule
        self._root = root
        self._say = say
        self._times_asked = times_asked
        # The file of a scenario may have any name.
        run_id = re.sub(r"[^\w.-]+", "-", root.name)
        self._resolved = resolve_shape(scenario.fleet, run_id, environ)
        self._own: OwnFleet | None = None

    @property
    def _fleet(self) -> OwnFleet:
        assert self._own is not None, "entered"
        return self._own

    def refusal(self, fault: Fault) -> str:
        """See `Injector.refusal`."""
        return no_such_fault_because(fault, attached=False)

    def names(self) -> frozenset[str]:
        """See `Injector.names`."""
        shape = self._scenario.fleet
        learners = [f"learner-{index}" for index in range(shape.learners)]
        if shape.standby:
            synchronizers = [f"{SYNCHRONIZER}-0", f"{SYNCHRONIZER}-1", REDIS]
        else:
            synchronizers = [SYNCHRONIZER]
        return frozenset([*learners, *synchronizers, EVALUATOR])

    def __enter__(self) -> ProcessInjector:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        kinds = {fault.fault for fault in self._scenario.faults}
        at_points = strikes_at_points(self._scenario, self._schedule)

        def script(files: RunFiles) -> dict[str, str]:
            if not at_points and FaultKind.CLOCK_SKEW not in kinds:
                return {}
            self._points = PointFaults(files.root / "faults", self._scenario, at_points)
            return self._points.environment()

        self._own = OwnFleet(
            self._root,
            self._resolved,
            faults=script,
            disks=FaultKind.DISK_FULL in kinds,
            say=self._say,
        )
        self._stack.callback(self._own.close)
        plan = self._own.plan
        faults = ProcessFaults(
            self._own,
            self._own.wiring,
            self._points,
            plan.redis.url if plan.redis is not None else "",
        )
        names = [spec.name for spec in plan.synchronizers]
        self._enter(faults, dict(zip(names, plan.addresses, strict=True)))

    def _note(self, sample: Sample) -> None:
        self._fleet.note_leader(sample.leader)

    def settle(self) -> None:
        """See `Injector.settle`."""
        self._fleet.drain(self._times_asked)

    def sync_interval(self) -> int:
        """See `Injector.sync_interval`."""
        return self._resolved.run.value.sync_interval


class RunningFleet:
    """A fleet of ``diloco run`` that is at work, by its run directory.

    Args:
        files: the run directory.

    Raises:
        UsageError: RUN_NOT_FOUND where no fleet is at work there.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.address = read_fleet(files.fleet).address
        if not is_running(files):
            raise UsageError(
                Reason.RUN_NOT_FOUND, f"no fleet is running in {files.root}; start one first"
            )

    @property
    def parent_pid(self) -> int:
        """Who started the processes."""
        return read_fleet(self.files.fleet).pid

    @property
    def ended(self) -> str:
        """Why the fleet has ended; empty while it is at work."""
        if not is_running(self.files):
            return "its `diloco run` has ended"
        with suppress(UsageError):
            state = read_fleet(self.files.fleet).state
            return "" if state == Phase.RUNNING else f"its `diloco run` is {state}"
        return "its run directory is gone"

    def pids(self) -> dict[str, int | None]:
        """Every process by name, with its pid while it runs."""
        return {entry.name: entry.pid for entry in self._processes()}

    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return {entry.name: entry.restarts for entry in self._processes()}

    def _processes(self) -> tuple[ProcessEntry, ...]:
        try:
            return read_fleet(self.files.fleet).processes
        except UsageError:
            return ()  # the run directory is gone, and with it the fleet: see `ended`

    def out_of_reach(self) -> str:
        """Says why no signal gets to its processes from here; empty where one does."""
        for pid in filter(None, self.pids().values()):
            try:
                with open_child(pid, self.parent_pid) as process:
                    signal.pidfd_send_signal(process, 0)
            except ProcessLookupError:
                continue
            except PermissionError:
                return "its processes belong to another user"
            return ""
        return "its processes are not on this machine; run it where they are"


class AttachedInjector(_Processes):
    """Strikes the processes of a fleet that runs already, and leaves them running.

    Args:
        files: its run directory.

    Raises:
        UsageError: RUN_NOT_FOUND where no fleet is at work there, CONFIG_INVALID for its settings.
    """

    def __init__(self, files: RunFiles) -> None:
        super().__init__()
        self._running = RunningFleet(files)
        self._resolved = resolve({}, {}, files.config, default_run_id=files.root.name)

    @property
    def _fleet(self) -> RunningFleet:
        return self._running

    def refusal(self, fault: Fault) -> str:
        """See `Injector.refusal`."""
        if fault.fault is FaultKind.REDIS_EMPTY and not self._redis_url():
            return "its Redis is not the fleet's own"
        if fault.fault in {FaultKind.KILL, FaultKind.RESTART} and not self._comes_back(fault):
            restart = self._resolved.fleet.value.restart
            return f"nobody would start it again: the fleet runs with --restart {restart}"
        return no_such_fault_because(fault, attached=True) or self._running.out_of_reach()

    def _comes_back(self, fault: Fault) -> bool:
        restart = Restart(self._resolved.fleet.value.restart)
        killed = fault.fault is FaultKind.KILL
        return restart is Restart.ALWAYS or (restart is Restart.ON_FAILURE and killed)

    def names(self) -> frozenset[str]:
        """See `Injector.names`."""
        return frozenset(self._running.pids())

    def __enter__(self) -> AttachedInjector:
        names = [name for name in self._running.pids() if is_synchronizer(name)]
        addresses = self._running.address.split(",")
        faults = ProcessFaults(self._running, None, None, self._redis_url())
        self._enter(faults, dict(zip(names, addresses, strict=True)))
        return self

    def _redis_url(self) -> str:
        """Where the Redis of the fleet's own is; empty where it has none."""
        try:
            lines = self._running.files.redis_config.read_text(encoding="utf-8").splitlines()
        except OSError:
            return ""
        values = dict(line.partition(" ")[::2] for line in lines)
        return f"redis://:{values['requirepass']}@{values['bind']}:{values['port']}"

    def settle(self) -> None:
        """The fleet goes on."""

    def sync_interval(self) -> int:
        """See `Injector.sync_interval`."""
        return self._resolved.run.value.sync_interval
