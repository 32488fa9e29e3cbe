"""Metrics of one process: one JSON object per line, appended over restarts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TextIO

from learner_client.train.files import storage_errors


class MetricsFile:
    """Appends events to a file of the run.

    A life that was killed may have left a torn line; the next one starts on a line of its own.

    Args:
        path: the file; its folder is created.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage_errors(path, "opening"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
            if self._file.tell() > 0:
                self._file.write("\n")

    def write(self, kind: str, **fields: object) -> None:
        """Appends one event with the wall clock, for people and figures.

        Raises:
            DilocoError: DISK_FULL or STORAGE_FAILED.
        """
        with storage_errors(self._path, "writing"):
            self._file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
