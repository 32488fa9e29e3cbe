"""What is done to processes of this machine, and undone: signals, links, disks, clocks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from redis import Redis, RedisError

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.chaos import disks
from diloco_fleet.chaos.conductor import Arm, Begin
from diloco_fleet.chaos.frozen import Frozen
from diloco_fleet.chaos.point_faults import PointFaults
from diloco_fleet.chaos.proxy import Cut, Link
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.targets import REST, speaks_of_synchronizers
from diloco_fleet.chaos.undo import Undo
from diloco_fleet.chaos.wiring import Wiring
from diloco_fleet.run_files import RunFiles

_BYTES_PER_MBIT: Final = 125_000.0
_REDIS_S: Final = 5.0

_ON_LINKS: Final = frozenset(
    {FaultKind.PARTITION, FaultKind.LATENCY, FaultKind.BANDWIDTH, FaultKind.REDIS_LOSS}
)
_NO_LINK: Final = "no link leads from one group to the other, so that nothing would be cut"
_SIGNALS: Final = {FaultKind.KILL: signal.SIGKILL, FaultKind.RESTART: signal.SIGTERM}


class ProcessFleet(Protocol):
    """The processes of a fleet, however they were started."""

    files: RunFiles

    @property
    def parent_pid(self) -> int:
        """Who started the processes."""

    @property
    def ended(self) -> str:
        """Why the fleet has ended; empty while it is at work."""

    def pids(self) -> dict[str, int | None]:
        """Every process by name, with its pid while it runs."""

    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""


def no_such_fault_because(fault: Fault, *, attached: bool) -> str:
    """Says why processes cannot be struck by a fault; empty where they can."""
    if fault.fault is FaultKind.LOSS:
        return (
            "a proxy carries whole streams, and single packets are the kernel's; use latency or "
            "bandwidth, or injector docker"
        )
    if fault.fault is FaultKind.DISK_FULL:
        if attached:
            return "the store of a running fleet has no small disk; let it start its own fleet"
        return disks.no_disk_because()
    if fault.fault is FaultKind.PARTITION and not attached:
        named = [target for group in fault.groups for target in group]
        # Every link has a synchronizer at one end.
        if not any(x == REST or speaks_of_synchronizers(x) for x in named):
            return _NO_LINK
    if attached and fault.fault in _ON_LINKS:
        return "the links of a running fleet are direct; let it start its own fleet"
    if attached and (fault.at_point or fault.fault is FaultKind.CLOCK_SKEW):
        return "a running fleet was started without faults; let it start its own fleet"
    return ""


@contextmanager
def open_child(pid: int, parent_pid: int) -> Iterator[int]:
    """Opens a child of a process, and nobody else, whatever became of the pid.

    Yields:
        A descriptor: signals sent by it never get to another process.

    Raises:
        ProcessLookupError: it is gone, or is another's.
    """
    descriptor = os.pidfd_open(pid)
    try:
        # The pid cannot go to another process while the descriptor is open and it is alive.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        if int(stat.rpartition(")")[2].split()[1]) != parent_pid:
            raise ProcessLookupError(pid)
        yield descriptor
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    finally:
        os.close(descriptor)


class ProcessFaults:
    """Does faults to processes and undoes them; every undoing is kept by its number.

    Args:
        fleet: the processes.
        wiring: the links between them; None where they are direct.
        points: script of what processes do to themselves; None without one.
        redis_url: where Redis is; empty for none.
    """

    def __init__(
        self,
        fleet: ProcessFleet,
        wiring: Wiring | None,
        points: PointFaults | None,
        redis_url: str,
    ) -> None:
        self._fleet = fleet
        self._wiring = wiring
        self._points = points
        self._redis_url = redis_url
        self._undo = Undo()

    def begin(self, action: Begin) -> None:
        """Does a fault; see `Injector.begin`."""
        fault, number = action.fault, action.number
        names = [name for group in action.groups for name in group]
        if fault.fault in _SIGNALS:
            for name in names:
                with self._open(name) as process:
                    signal.pidfd_send_signal(process, _SIGNALS[fault.fault])
        elif fault.fault is FaultKind.FREEZE:
            for name in names:
                self._freeze(number, name)
        elif fault.fault is FaultKind.REDIS_EMPTY:
            self._empty_redis()
        elif fault.fault is FaultKind.DISK_FULL:
            for folder in map(self._store_of, names):
                self._undo.add(number, partial(disks.make_room, folder))
                disks.fill(folder)
        elif fault.fault is FaultKind.CLOCK_SKEW:
            assert self._points is not None, "refused else"
            assert fault.offset_s is not None, "checked"
            for name in names:
                self._undo.add(number, partial(self._points.set_clock_right, name))
                self._points.set_clock_wrong(name, fault.offset_s)
        else:
            self._disturb(action)

    def _disturb(self, action: Begin) -> None:
        wiring, fault = self._wiring, action.fault
        assert wiring is not None, "refused else"
        self._undo.add(action.number, lambda: wiring.heal(action.number))
        if fault.fault is FaultKind.PARTITION:
            one, other = action.groups
            links = [link for a in one for b in other for link, _ in wiring.between(a, b)]
            if not links:
                raise DilocoError(Reason.FAULT_IMPOSSIBLE, _NO_LINK)
            wiring.disturb(action.number, links, lambda link: link.cut(Cut.BLACKHOLE))
            return
        for name in action.groups[0]:
            wiring.disturb(action.number, wiring.links_of(name), lambda link: _apply(fault, link))

    def arm(self, action: Arm) -> None:
        """Lets who gets to a point strike itself; see `Injector.arm`."""
        assert self._points is not None, "refused else"
        self._undo.add(action.number, partial(self._points.disarm, action.number))
        self._points.arm(action.number, action.process)

    def heal(self, number: int) -> None:
        """Ends what was begun under a number; see `Injector.heal`."""
        try:
            self._undo.heal(number)
        finally:
            self._thaw_at_points(number)

    def heal_all(self) -> list[str]:
        """Ends everything; see `Injector.heal_all`."""
        unhealed = self._undo.heal_all()
        self._thaw_at_points(None)
        return unhealed

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Opens a process of the fleet, to send it a signal."""
        pid = self._fleet.pids().get(name)
        try:
            if pid is None:
                raise ProcessLookupError(name)
            with open_child(pid, self._fleet.parent_pid) as process:
                yield process
        except ProcessLookupError as error:
            raise DilocoError(
                Reason.TARGET_NOT_FOUND, f"{name} is not running now; it cannot be struck"
            ) from error
        except PermissionError as error:
            raise DilocoError(
                Reason.FAULT_IMPOSSIBLE, f"{name} belongs to another user: {error.strerror}"
            ) from error

    def _freeze(self, number: int, name: str) -> None:
        """Stops a process; who it was is kept, whatever becomes of its fleet meanwhile."""
        with self._open(name) as process:
            self._undo.add(number, Frozen(process).thaw)

    def _thaw_at_points(self, number: int | None) -> None:
        """Lets go on who stopped itself at a point, also after it was healed."""
        struck = self._points.struck() if self._points is not None else {}
        for name in [who for x, who in struck.items() if number in {None, x}]:
            # Who has died meanwhile is frozen no more.
            with suppress(DilocoError), self._open(name) as process:
                signal.pidfd_send_signal(process, signal.SIGCONT)

    def _store_of(self, name: str) -> Path:
        number = name.rpartition("-")[2]
        return self._fleet.files.store_of(int(number) if number.isdigit() else 0)

    def _empty_redis(self) -> None:
        try:
            with Redis.from_url(self._redis_url, socket_timeout=_REDIS_S) as client:
                client.flushall()
        except RedisError as error:
            raise DilocoError(
                Reason.MEMBERSHIP_UNAVAILABLE, f"Redis cannot be emptied: {error}"
            ) from error


def _apply(fault: Fault, link: Link) -> None:
    if fault.fault is FaultKind.REDIS_LOSS:
        link.cut(Cut.RESET)
    elif fault.delay_s is not None:
        link.delay(fault.delay_s)
    elif fault.mbit_per_s is not None:
        link.limit(fault.mbit_per_s * _BYTES_PER_MBIT)
