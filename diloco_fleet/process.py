"""One process of the fleet: how it is started, what its end means, when it starts again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import (
    EXIT_DRAINED,
    EXIT_INCOMPATIBLE,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_TOLD_TO_LEAVE,
    EXIT_USAGE,
    Reason,
    UsageError,
)
from diloco_fleet.launch import launch_command
from diloco_fleet.run_files import ProcessEntry

HOPELESS: Final = frozenset({EXIT_USAGE, EXIT_INCOMPATIBLE, EXIT_STORAGE})
"""Exit codes that another start of the same process would only repeat."""

STABLE_S: Final = 30.0
"""A process that lived for this long starts again as if it had never failed."""

_BACKOFF_FIRST_S = 0.5
_LOG_TAIL_BYTES = 8192


class Restart(StrEnum):
    """Which ends of a process are followed by another start."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


class State(StrEnum):
    """State of one process."""

    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    DRAINED = "drained"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start.

    Attributes:
        name: ``synchronizer``, ``evaluator``, ``learner-0`` and so on; with a standby
            ``synchronizer-0``, ``synchronizer-1`` and ``redis``.
        command: program and arguments.
        log: file to which its output is appended.
        environment: its whole environment.
        finishes: True where exit code 0 means that its work is done.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str]
    finishes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a process that ended by itself is started again.

    Attributes:
        restart: which ends are followed by another start; the exit codes of ``HOPELESS`` never
            are, and that of a learner that an operator drained.
        max_restarts: give up after so many starts in a row of which none lived for ``STABLE_S``.
        max_wait_s: longest wait before a start; waits double from start to start up to this.
    """

    restart: Restart = Restart.ALWAYS
    max_restarts: int = 10
    max_wait_s: float = 15.0

    def delay_s(self, exit_code: int, num_short_lives: int) -> float | None:
        """Returns how long to wait before the next start; None for no further start.

        Args:
            exit_code: of the life that ended; minus the signal's number for a signal.
            num_short_lives: lives in a row that were shorter than ``STABLE_S``, this one too.
        """
        if exit_code in HOPELESS | {EXIT_TOLD_TO_LEAVE} or self.restart is Restart.NEVER:
            return None
        on_purpose = exit_code in (EXIT_OK, EXIT_DRAINED, -signal.SIGTERM)
        if on_purpose and self.restart is Restart.ON_FAILURE:
            return None
        if num_short_lives > self.max_restarts:
            return None
        return float(
            min(_BACKOFF_FIRST_S * 2 ** min(max(num_short_lives - 1, 0), 30), self.max_wait_s)
        )


class Process:
    """A process and its lives. Time is a monotonic clock's, as an argument."""

    def __init__(self, spec: ProcessSpec, policy: RestartPolicy, root: Path) -> None:
        self.spec = spec
        self.state = State.WAITING
        self.num_restarts = 0
        self.exit_code: int | None = None
        self._policy = policy
        self._root = root
        self._popen: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._due = 0.0
        self._num_short_lives = 0
        self._told_to_stop = False

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._popen.pid if self._popen else None

    @property
    def ended(self) -> bool:
        """True when it neither runs nor will be started again."""
        return self.state in (State.DONE, State.DRAINED, State.STOPPED, State.FAILED)

    def start(self, now: float) -> None:
        """Starts a life.

        Raises:
            UsageError: CONFIG_INVALID when the program is missing.
            DilocoError: DISK_FULL or STORAGE_FAILED for the log.
        """
        # Not at the top: learner_client imports torch, for which this module's readers do not wait.
        from learner_client.files import storage_errors

        with storage_errors(self.spec.log, "opening"):
            log = self.spec.log.open("ab", buffering=0)
        try:
            # A session of its own: Ctrl-C at the terminal reaches the supervisor alone.
            self._popen = subprocess.Popen(
                launch_command(list(self.spec.command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.spec.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                Reason.CONFIG_INVALID, f"{self.name} cannot be started: {error}"
            ) from error
        finally:
            log.close()
        self._started = now
        self.state = State.RUNNING

    def poll(self, now: float) -> bool:
        """Notices an end; returns True once for each life that has ended."""
        if self._popen is None:
            return False
        exit_code = self._popen.poll()
        if exit_code is None:
            return False
        self._popen = None
        self.exit_code = exit_code
        short = now - self._started < STABLE_S
        self._num_short_lives = self._num_short_lives + 1 if short else 0
        delay_s = self._policy.delay_s(exit_code, self._num_short_lives)
        if exit_code == EXIT_OK and self.spec.finishes:
            self.state = State.DONE
        elif self._told_to_stop:
            self.state = State.STOPPED
        elif exit_code == EXIT_TOLD_TO_LEAVE:
            self.state = State.DRAINED
        elif delay_s is None:
            self.state = State.FAILED
        else:
            self.state = State.WAITING
            self._due = now + delay_s
        return True

    def restart_if_due(self, now: float) -> bool:
        """Starts the next life when its time has come; returns True if it did."""
        if self.state is not State.WAITING or now < self._due:
            return False
        self.num_restarts += 1
        self.start(now)
        return True

    def stop(self, number: signal.Signals) -> None:
        """Sends a signal, or drops a restart that waits; there will be no further life."""
        self._told_to_stop = True
        if self._popen is not None:
            self._popen.send_signal(number)
        elif self.state is State.WAITING:
            self.state = State.STOPPED

    def entry(self) -> ProcessEntry:
        """Returns this process as ``fleet.json`` shows it."""
        return ProcessEntry(
            name=self.name,
            pid=self.pid,
            state=self.state.value,
            restarts=self.num_restarts,
            exit_code=self.exit_code,
            log=os.path.relpath(self.spec.log, self._root),
        )

    def last_words(self) -> str:
        """Returns the last error line of the log, else its last line; empty without any."""
        try:
            with self.spec.log.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
                lines = log.read().decode("utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or [""])[-1].strip()


def describe_exit(exit_code: int) -> str:
    """Returns an exit code in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
