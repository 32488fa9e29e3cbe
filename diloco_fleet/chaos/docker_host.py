"""The host of the engine: signals to processes of containers, and programs that change links."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason

_PROCESSES: Final = Path("/proc")
_COMMAND_S: Final = 20.0


class Host:
    """This machine, where the engine runs."""

    def refusal(self, *probe: str) -> str:
        """Says why processes cannot be struck, or links not be shaped here; empty where they can.

        Args:
            *probe: the discipline that is wanted, as ``tc qdisc add ... root`` takes it; empty
                where a signal is all that is wanted.
        """
        if os.geteuid() != 0:
            return "it needs root on the host of the engine"
        if not probe:
            return ""
        why = self.missing("nsenter", "unshare", "tc", "ip")
        if why:
            return why
        try:
            self.run("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *probe)
        except DilocoError as error:
            kind = probe[0]
            lacking = f"the kernel of the host has no {kind} (sch_{kind}): {error.message}"
            return missing_right(error) or lacking
        return ""

    def missing(self, *programs: str) -> str:
        """Says which program is missing; empty where none is."""
        for program in programs:
            if shutil.which(program) is None:
                return f"it needs the program {program} on the host of the engine"
        return ""

    def owns(self, pid: int, container_id: str) -> bool:
        """Whether a process of this machine belongs to a container.

        It does not where the engine runs on another machine, or the process has ended.
        """
        try:
            text = (_PROCESSES / str(pid) / "cgroup").read_text(encoding="utf-8")
        except OSError:
            return False
        return container_id in text

    def shares_network(self, pid: int) -> bool:
        """Whether a process is in the network namespace of this one."""
        try:
            theirs = (_PROCESSES / str(pid) / "ns" / "net").stat()
        except OSError:
            return False
        return theirs.st_ino == (_PROCESSES / "thread-self" / "ns" / "net").stat().st_ino

    def signal(self, pid: int, container_id: str, number: signal.Signals) -> None:
        """Sends a signal to a process of a container, and to no other that has its pid by now.

        Raises:
            DilocoError: TARGET_NOT_FOUND, FAULT_IMPOSSIBLE without permission.
        """
        try:
            descriptor = os.pidfd_open(pid)
            try:
                if not self.owns(pid, container_id):
                    raise ProcessLookupError
                signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
        except ProcessLookupError as error:
            raise DilocoError(
                Reason.TARGET_NOT_FOUND, f"process {pid} is none of the container's on this machine"
            ) from error
        except PermissionError as error:
            raise DilocoError(
                Reason.FAULT_IMPOSSIBLE, f"no permission to signal process {pid} of a container"
            ) from error

    def run(self, *command: str) -> str:
        """Runs a program; returns what it wrote.

        Raises:
            DilocoError: FAULT_IMPOSSIBLE with its error.
        """
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_COMMAND_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"{command[0]}: {error}") from error
        if done.returncode != 0:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"{command[0]}: {said}")
        return done.stdout


def missing_right(error: DilocoError) -> str:
    """Says which right a program lacked; empty where it failed for another reason."""
    if "unshare failed" in error.message:
        return f"SYS_ADMIN is missing: {error.message}"
    if "not permitted" in error.message or "Permission denied" in error.message:
        return f"NET_ADMIN is missing: {error.message}"
    return ""
