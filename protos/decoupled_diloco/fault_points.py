"""Named points of the protocol at which a test has a process die, stop or hang.

A process without the variable ``DILOCO_FAULTS`` has no faults: `reach` is one comparison. With it
(JSON, see `Faults.parse`), the process does what the variable says when it gets to a point, after
it has written one line to the log of the faults, so that a test can count what was hit. A fault
happens once, over all lives of all processes that share the log. The same variable may name a
folder from which the wall clock of each process is set wrong, see `wall`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from decoupled_diloco.errors import EXIT_INTERNAL, Reason, UsageError

VARIABLE: Final = "DILOCO_FAULTS"
"""Environment variable that holds the faults; no setting, and given to no process by default."""


class FaultPoint(StrEnum):
    """Points of the protocol, in the order of a round, then of a take-over, then of the rest."""

    MID_PUSH = "mid_push"
    """Synchronizer: half of a push has come, and is not staged. Learner: half of it is sent."""
    BEFORE_PERSIST = "before_persist"
    """Synchronizer: a round is merged in memory and nothing of it is durable."""
    AFTER_PERSIST = "after_persist"
    """Synchronizer: a round is durable here, and not yet acknowledged by a standby."""
    BEFORE_PUBLISH = "before_publish"
    """Synchronizer: a round is durable wherever it must be, and nobody has seen it."""
    AFTER_PUBLISH = "after_publish"
    """Synchronizer: a round is before the watchers and not in the journal."""
    MID_WATCH = "mid_watch"
    """Synchronizer: half of an update is sent. Learner: half of it has come."""
    MID_REPLICATE = "mid_replicate"
    """Leader: the record of a round is sent to a standby, its tensors are not. Standby: a round is
    here and not durable."""
    BEFORE_ACKNOWLEDGE = "before_acknowledge"
    """Standby: a round is durable and the leader does not know."""
    MID_TAKEOVER = "mid_takeover"
    """Standby: it holds the lease of a new term and has served nobody."""
    MID_SNAPSHOT = "mid_snapshot"
    """Synchronizer and learner: its part of a snapshot is begun, and not whole."""
    MID_RECOVERY = "mid_recovery"
    """Donor: half of the inner state is sent. Learner: half of it has come."""


class FaultAction(StrEnum):
    """What a process does at a point."""

    KILL = "kill"
    """Dies at once, as by ``kill -9``."""
    STOP = "stop"
    """Stands still, as by SIGSTOP, until somebody sends SIGCONT."""
    EXIT = "exit"
    """Ends with the exit code of a fault of ours, without cleaning up."""
    HANG = "hang"
    """Holds the thread that got there for ``hang_s`` seconds, and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a script.

    Attributes:
        name: names it in the log; unique within a script.
        point: where.
        action: what.
        nth: how often the point is reached before it happens, from 1, within one life.
        process: pattern of the name of the process (``learner-*``); empty for any.
        hang_s: how long `FaultAction.HANG` takes, seconds.
        after: file without which the point is not counted, None to count from the start; what
            stands in it, if anything, is one more pattern of the process.
    """

    name: str
    point: FaultPoint
    action: FaultAction
    nth: int = 1
    process: str = ""
    hang_s: float = 0.0
    after: Path | None = None

    def counts_for(self, process: str) -> bool:
        """Whether a process that gets to the point now counts."""
        patterns = [self.process]
        if self.after is not None:
            try:
                patterns.append(self.after.read_text(encoding="utf-8").strip())
            except FileNotFoundError:
                return False
        return all(fnmatchcase(process, pattern or "*") for pattern in patterns)

    def to_json(self) -> dict[str, object]:
        """The fault as JSON values."""
        return {
            "name": self.name,
            "point": str(self.point),
            "action": str(self.action),
            "nth": self.nth,
            "process": self.process,
            "hang_s": self.hang_s,
            "after": None if self.after is None else str(self.after),
        }


def _act(fault: Fault) -> None:
    if fault.action is FaultAction.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action is FaultAction.STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action is FaultAction.EXIT:
        os._exit(EXIT_INTERNAL)
    else:
        time.sleep(fault.hang_s)


@dataclass(slots=True, kw_only=True)
class Faults:
    """The faults of one process.

    Attributes:
        log: file of JSON lines, one per fault that happened, shared by all processes.
        process: name of this process.
        faults: the script.
        clock: folder in which a file of the name of a process holds the offset of its wall clock
            in seconds; None for clocks that are right.
        act: does what a fault says; tests give their own.
    """

    log: Path
    faults: Sequence[Fault]
    process: str = ""
    clock: Path | None = None
    act: Callable[[Fault], None] = _act
    _counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Reads the value of the variable: an object with ``log``, ``process`` and ``faults``.

        Raises:
            UsageError: CONFIG_INVALID where it is none.
        """
        try:
            values = json.loads(text)
            faults = [_fault_from(entry) for entry in values["faults"]]
            clock = values.get("clock")
            return cls(
                log=Path(values["log"]),
                process=str(values.get("process", "")),
                faults=faults,
                clock=None if clock is None else Path(clock),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"{VARIABLE} is no script of faults ({error}); unset it: it is for tests",
            ) from error

    def to_text(self) -> str:
        """The value of the variable for this process."""
        return json.dumps(
            {
                "log": str(self.log),
                "process": self.process,
                "faults": [fault.to_json() for fault in self.faults],
                "clock": None if self.clock is None else str(self.clock),
            }
        )

    @property
    def offset_s(self) -> float:
        """By how much the wall clock of this process is wrong now."""
        if self.clock is None:
            return 0.0
        try:
            return float((self.clock / self.process).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0.0

    def reach(self, point: FaultPoint) -> None:
        """Counts, and does what is due; where nothing is, it returns."""
        for fault in self.faults:
            if fault.point is not point or not fault.counts_for(self.process):
                continue
            count = self._counts[fault.name] = self._counts.get(fault.name, 0) + 1
            if count >= fault.nth and self._claim(fault):
                self.act(fault)

    def _claim(self, fault: Fault) -> bool:
        """Writes the fault into the log; False where it has happened before."""
        with self.log.open("a+b") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            log.seek(0)
            if any(json.loads(line)["name"] == fault.name for line in log):
                return False
            entry = {
                "name": fault.name,
                "time": time.time(),
                "point": str(fault.point),
                "action": str(fault.action),
                "process": self.process,
                "pid": os.getpid(),
            }
            log.write(json.dumps(entry).encode() + b"\n")
            log.flush()
            return True


def _fault_from(values: Mapping[str, Any]) -> Fault:
    after = values.get("after")
    return Fault(
        name=str(values["name"]),
        point=FaultPoint(values["point"]),
        action=FaultAction(values["action"]),
        nth=int(values.get("nth", 1)),
        process=str(values.get("process", "")),
        hang_s=float(values.get("hang_s", 0.0)),
        after=None if after is None else Path(after),
    )


def for_process(text: str, process: str) -> str:
    """Returns the value of the variable for the process of a name."""
    faults = Faults.parse(text)
    faults.process = process
    return faults.to_text()


_faults: Faults | None = None


def arm(environ: Mapping[str, str]) -> None:
    """Takes the faults from an environment, where there are any; a process's entry point calls it.

    Raises:
        UsageError: CONFIG_INVALID.
    """
    global _faults  # noqa: PLW0603 - one process has one script
    text = environ.get(VARIABLE)
    _faults = Faults.parse(text) if text else None


def reach(point: FaultPoint) -> None:
    """The process is at a point."""
    if _faults is not None:
        _faults.reach(point)


def wall() -> float:
    """Seconds since the epoch, as this process has it: the one wall clock, for people alone."""
    return time.time() + (_faults.offset_s if _faults is not None else 0.0)


def crosses_half(offset_bytes: int, num_bytes: int, total_bytes: int) -> bool:
    """Whether a chunk is the one with which a transfer gets past its half.

    Args:
        offset_bytes: where the chunk begins.
        num_bytes: its size.
        total_bytes: size of the whole.
    """
    return 2 * offset_bytes <= total_bytes < 2 * (offset_bytes + num_bytes)
