"""A real fleet for tests: started by the command line, read through its files, killed by pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_script import FaultScript
from fleet_view import PATIENCE_S, FleetView, Lines, read_lines, wait_for

from diloco_fleet.run_files import RunFiles

__all__ = [
    "PATIENCE_S", "Fleet", "Lines", "assert_refused", "between", "diloco", "first_after",
    "read_lines", "run_command", "small", "wait_for",
]  # fmt: skip

_SETTINGS = """\
[run]
num_fragments = {interval}
sync_interval = {interval}
heartbeat_interval_s = 0.3
heartbeat_timeout_s = 3.0
[trainer]
sequence_length = 32
batch_size = 2
{trainer}
[fleet]
device = "cpu"
"""


def small(interval: int = 8, trainer: str = "") -> str:
    """Settings of a fleet of which two fit on two busy cores: few tokens per step, H = P."""
    return _SETTINGS.format(interval=interval, trainer=trainer)


def run_command(*arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m ...`` to its end and returns what it said."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def diloco(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a ``diloco`` command to its end."""
    return run_command("diloco_fleet.cli", *arguments)


def assert_refused(
    result: subprocess.CompletedProcess[str], reason: str, *words: str, code: int = 64
) -> None:
    """Asserts one clear error: the exit code, one line with the reason, and what it names."""
    assert result.returncode == code, result.stdout + result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith(f"error: {reason}: "), errors[0]
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in errors[0]


class Fleet(FleetView):
    """One ``diloco run`` and what it leaves.

    Args:
        folder: takes the settings and the run directory.
        *arguments: of ``diloco run``.
        settings: content of the settings file; `small` without it.
        standby: True for two synchronizers and a Redis of the fleet's own.
        faults: script of faults for its processes.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        settings: str | None = None,
        standby: bool = False,
        faults: FaultScript | None = None,
    ) -> None:
        super().__init__(RunFiles((folder / "run").resolve()), standby=standby)
        self.output = folder / "output.txt"
        self._config = folder / "fleet.toml"
        self._config.write_text(small() if settings is None else settings)
        self._popen: subprocess.Popen[bytes] | None = None
        # The tests' redis-server lies beside their Python.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._environment = {**os.environ, "PATH": path}
        self._environment |= faults.environment() if faults else {}
        arguments = (*arguments, "--standby") if standby else arguments
        self.start("--config", str(self._config), *arguments)

    def start(self, *arguments: str) -> None:
        """Starts ``diloco run`` in the fleet's run directory, for example to resume it."""
        assert self._popen is None or self._popen.poll() is not None
        command = [sys.executable, "-m", "diloco_fleet.cli", "run"]
        command += ["--run-dir", str(self.files.root), *arguments]
        with self.output.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    @property
    def pid(self) -> int:
        """Pid of ``diloco run``."""
        assert self._popen is not None
        return self._popen.pid

    def ended(self) -> str:
        """That `diloco run` has ended, with what it said."""
        assert self._popen is not None
        code = self._popen.poll()
        return "" if code is None else f"diloco run ended with {code}:\n{self.text()}"

    def text(self) -> str:
        """What ``diloco run`` has said so far."""
        return self.output.read_text(errors="replace")

    @contextmanager
    def start_other(self, *arguments: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Runs one more process beside the fleet, as somebody would by hand, and kills it."""
        with output.open("wb") as file:
            popen = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            yield popen
        finally:
            popen.kill()
            popen.wait(timeout=PATIENCE_S)

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Sends a signal to ``diloco run``."""
        assert self._popen is not None
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Waits for the end of ``diloco run``; returns its exit code."""
        assert self._popen is not None
        return self._popen.wait(timeout=PATIENCE_S)

    def kill_everything(self) -> None:
        """Ends every process at once, ``diloco run`` too, without a word."""
        assert self._popen is not None
        self._kill_all()
        self._popen.wait(timeout=PATIENCE_S)
        # What was being started meanwhile goes, too; `diloco run` starts nothing any more.
        wait_for(lambda: not self._kill_all(), "the end of every process")

    def _kill_all(self) -> set[int]:
        """Kills what is there; returns what that was."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def close(self) -> None:
        """Ends whatever is still there of this fleet, and sees that it is gone."""
        if self._popen is not None:
            self._popen.kill()
            self.kill_everything()


def first_after(lines: Lines, time_s: float) -> dict[str, Any] | None:
    """The first line that was written after a time."""
    return next((line for line in lines if line["time"] > time_s), None)


def between(lines: Lines, begin: float, end: float) -> Lines:
    """Lines written in a span of time."""
    return [line for line in lines if begin < line["time"] < end]
