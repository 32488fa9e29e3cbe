"""The synchronizer's journal: one JSON object per line for everything worth a figure later."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from decoupled_diloco.errors import Reason, UsageError

logger = logging.getLogger(__name__)


class Journal:
    """Appends events to a file; without a path it writes nothing.

    Losing a line never harms training: an error is logged once and the journal goes silent.

    Args:
        path: the file, appended to over restarts.
        wall: wall clock, seconds since the epoch; for people, never for decisions.

    Raises:
        UsageError: CONFIG_INVALID where the file cannot be written.
    """

    def __init__(self, path: Path | None, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._file: TextIO | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8", buffering=1)
            except OSError as error:
                raise UsageError(
                    Reason.CONFIG_INVALID, f"journal {path} cannot be written: {error}"
                ) from error

    def write(self, kind: str, **fields: object) -> None:
        """Appends one event."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"kind": kind, "time": self._wall(), **fields}) + "\n")
        except OSError as error:
            logger.error("the journal ends here: %s", error)
            self._file = None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
