"""Journals: one JSON object per line for everything worth a figure later, one file per process."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import wall as wall_clock

logger = logging.getLogger(__name__)

Observer = Callable[[str, Mapping[str, object]], None]
"""Hears of every event, kind and fields, at the moment at which it is written; never raises."""


class Journal:
    """Appends events to a file; without a path it writes nothing.

    Losing a line never harms the work: where the disk is full, lines are lost until it is not, and
    the log says so once at each end. A line that was torn, by that or by the death of an earlier
    life, is ended before the next one.

    Args:
        path: the file, appended to over restarts.
        wall: wall clock, seconds since the epoch; for people, never for decisions.
        observer: hears of every event, with a path and without.

    Raises:
        DilocoError: STORAGE_FAILED or DISK_FULL where it cannot even be opened.
    """

    def __init__(
        self,
        path: Path | None,
        wall: Callable[[], float] = wall_clock,
        observer: Observer | None = None,
    ) -> None:
        self._path = path
        self._wall = wall
        self._observer = observer
        self._file: FileIO | None = None
        self._num_lost = 0
        self._torn = False
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._torn = _is_torn(path)
                self._file = path.open("ab", buffering=0)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise DilocoError(
                    Reason.DISK_FULL if full else Reason.STORAGE_FAILED,
                    f"{path} cannot be opened for writing ({error.strerror}); "
                    + ("free some space" if full else "check the path and its permissions"),
                ) from error

    def write(self, kind: str, **fields: object) -> None:
        """Appends one event."""
        if self._observer is not None:
            self._observer(kind, fields)
        if self._file is None:
            return
        line = json.dumps({"kind": kind, "time": self._wall(), **fields}) + "\n"
        content = (("\n" if self._torn else "") + line).encode()
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._torn = True
            self._num_lost += 1
            if self._num_lost == 1:
                logger.error("%s loses lines, the work goes on: %s", self._path, error)
            return
        self._torn = False
        if self._num_lost:
            logger.warning("%s goes on; %d lines were lost", self._path, self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_torn(path: Path) -> bool:
    """Whether a file's last line has no end."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # it is missing or empty
        return False
