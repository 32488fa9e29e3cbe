"""Becomes another program that dies with the process that started it.

``python -m diloco_fleet.launch PARENT_PID PROGRAM ARGUMENT...`` asks the kernel for SIGKILL at the
death of the parent and then executes the program, so that no learner outlives its fleet, whatever
killed that. A step of its own, as nothing but an exec is safe between fork and exec where the
parent has threads. Where the system is not Linux, the program just runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def launch_command(command: list[str]) -> list[str]:
    """Returns the command that runs ``command`` bound to the life of this process."""
    return [sys.executable, "-m", "diloco_fleet.launch", str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Binds this process to its parent and becomes the program; returns only on failure."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the kernel was asked.
        if os.getppid() != parent:
            os._exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
