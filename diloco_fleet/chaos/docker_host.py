"""What is done to containers from the host of the engine, where the engine itself cannot.

Signals to their processes, and the shaping of their links.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason

_BURST: Final = ("burst", "32kb", "latency", "400ms")
_COMMAND_S: Final = 20.0
_INTERFACE: Final = re.compile(r"^\d+: (?P<name>[^@:\s]+)@if(?P<peer>\d+):", re.MULTILINE)


class Host:
    """This machine, where the engine runs."""

    def refusal(self, *probe: str) -> str:
        """Says why links cannot be shaped here; empty where they can.

        Args:
            *probe: the discipline that is wanted, as ``tc qdisc add ... root`` takes it; empty
                where a signal is all that is wanted.
        """
        if os.geteuid() != 0:
            return "it needs root on the host of the engine"
        if not probe:
            return ""
        for program in ("nsenter", "unshare", "tc", "ip"):
            if shutil.which(program) is None:
                return f"it needs the program {program} on the host of the engine"
        try:
            self.run("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *probe)
        except DilocoError as error:
            kind = probe[0]
            if "not permitted" in error.message:
                return f"NET_ADMIN is missing: {error.message}"
            return f"the kernel of the host has no {kind} (sch_{kind}): {error.message}"
        return ""

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to a process of a container.

        Raises:
            DilocoError: TARGET_NOT_FOUND, FAULT_IMPOSSIBLE without permission.
        """
        try:
            os.kill(pid, number)
        except ProcessLookupError as error:
            raise DilocoError(Reason.TARGET_NOT_FOUND, f"process {pid} has ended") from error
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

    def shape(self, pid: int, discipline: Sequence[str], *, both: bool) -> list[list[str]]:
        """Shapes every link of the container of a process.

        Args:
            pid: of a process of the container.
            discipline: as ``tc`` takes it.
            both: what comes to the container, too, at the other end of its links.

        Returns:
            The commands that undo it.

        Raises:
            DilocoError: FAULT_IMPOSSIBLE.
        """
        inside = ["nsenter", "--target", str(pid), "--net"]
        links = _INTERFACE.findall(self.run(*inside, "ip", "-o", "link"))
        ends = {index: name for name, index in self._ends()} if both else {}
        undo = []
        for name, peer in links:
            places = [(inside, name)]
            if both and peer in ends:
                places.append(([], ends[peer]))
            for prefix, device in places:
                self.run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", *discipline)
                undo.append([*prefix, "tc", "qdisc", "del", "dev", device, "root"])
        return undo

    def _ends(self) -> list[tuple[str, str]]:
        """Interfaces of the host, with their indices."""
        lines = self.run("ip", "-o", "link").splitlines()
        found = [re.match(r"(\d+): ([^@:\s]+)", line) for line in lines]
        return [(match[2], match[1]) for match in found if match]


def rate_limit(mbit_per_s: float) -> list[str]:
    """A token bucket."""
    return ["tbf", "rate", f"{max(round(mbit_per_s * 1000), 1)}kbit", *_BURST]


def latency(delay_s: float) -> list[str]:
    """A delay."""
    return ["netem", "delay", f"{delay_s * 1000:g}ms"]


def loss(share: float) -> list[str]:
    """Loss of single packets."""
    return ["netem", "loss", f"{share * 100:g}%"]
