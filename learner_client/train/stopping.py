"""Being asked to stop: a training loop finishes its step, everything before it ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from decoupled_diloco.errors import EXIT_DRAINED


class StopRequest(threading.Event):
    """Set where the process is asked to stop.

    Until somebody heeds it, that is, while the process waits for a synchronizer, for the first
    parameters or for its own start, there is nothing to finish: asked then, it ends at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heeded = False

    def heed(self) -> None:
        """From now on somebody looks at it regularly."""
        self._heeded = True

    def ask(self) -> None:
        """Asks to stop.

        Raises:
            SystemExit: with the exit code of a drained process, where nobody heeds it yet.
        """
        self.set()
        if not self._heeded:
            raise SystemExit(EXIT_DRAINED)


def stop_on_signals() -> StopRequest:
    """Returns a request that SIGTERM and SIGINT make."""
    stop = StopRequest()

    def handler(_number: int, _frame: FrameType | None) -> None:
        stop.ask()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    return stop
