"""A process that stands still until it is let go on, or until nobody is left to do that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final

_GUARD: Final = """
import signal, sys
sys.stdin.read()
try:
    signal.pidfd_send_signal(int(sys.argv[1]), signal.SIGCONT)
except ProcessLookupError:
    pass
"""
_END_S: Final = 10.0


class Frozen:
    """Stops a process, whose parent need not be this one.

    A guard of its own session holds the other end of a pipe: where this process is killed, whoever
    is frozen goes on all the same. A descriptor says who that is, whatever becomes of its pid.

    Args:
        process: descriptor of the process; it is copied.

    Raises:
        OSError: it is gone, or another user's, or no guard can be started.
    """

    def __init__(self, process: int) -> None:
        self._process = os.dup(process)
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-ISc", _GUARD, str(self._process)],
                stdin=subprocess.PIPE,
                pass_fds=[self._process],
                start_new_session=True,
            )
        except OSError:
            os.close(self._process)
            raise
        try:
            signal.pidfd_send_signal(self._process, signal.SIGSTOP)
        except OSError:
            self._dismiss()
            raise

    def thaw(self) -> None:
        """Lets it go on, once; who has died meanwhile is frozen no more.

        Raises:
            OSError: why that cannot be; it may be tried again.
            TimeoutExpired: its guard does not end; the same.
        """
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGCONT)
        self._dismiss()

    def _dismiss(self) -> None:
        # The guard lets it go on once more, and is gone before anybody is frozen again.
        self._guard.communicate(timeout=_END_S)
        os.close(self._process)
