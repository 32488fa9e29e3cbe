"""A learner's parts of the fleet's snapshots: captured at a boundary, written beside the training.

The training thread makes a copy on the host and goes on; the background thread writes it. Only then
do the learner's clocks show the cut, which is what the synchronizer waits for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import DilocoError, UsageError
from decoupled_diloco.fault_points import FaultPoint, reach
from decoupled_diloco.snapshots import SnapshotName, part_name
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import Version
from learner_client.core.snapshots import SnapshotMarks
from learner_client.files import fsync_path, storage_errors
from learner_client.runtime import Runtime
from learner_client.training_state import TrainingState, save_training_state

_LOG: Final = logging.getLogger("learner_client")


class SnapshotDirectory:
    """Where parts are written: ``PATH/SNAPSHOT/LEARNER.safetensors``.

    Args:
        path: the directory; created when the first part is written.
        keep: newest parts of a learner that stay; None where the synchronizer shares the directory
            (``STORE/snapshots``) and removes what is outdated.
    """

    def __init__(self, path: Path, *, keep: int | None = None) -> None:
        assert keep is None or keep >= 1, "at least the newest part is kept"
        self._path = path
        self._keep = keep

    def part(self, name: SnapshotName, learner_id: str) -> Path:
        """File of one part."""
        return self._path / str(name) / part_name(learner_id)

    def write(self, name: SnapshotName, learner_id: str, state: TrainingState) -> None:
        """Writes a part, durably and whole or not at all.

        Raises:
            DilocoError: ``DISK_FULL`` or ``STORAGE_FAILED``.
        """
        path = self.part(name, learner_id)
        with storage_errors(path, "writing"):
            path.parent.mkdir(parents=True, exist_ok=True)
            reach(FaultPoint.MID_SNAPSHOT)
            save_training_state(path, state)
            for directory in (self._path, self._path.parent):
                fsync_path(directory)
        if self._keep is not None:
            self._prune(learner_id, self._keep)

    def _prune(self, learner_id: str, keep: int) -> None:
        names = []
        for path in self._path.iterdir():
            try:
                names.append(SnapshotName.parse(path.name))
            except UsageError:
                continue
        own = [name for name in sorted(names) if self.part(name, learner_id).exists()]
        for name in own[:-keep]:
            path = self.part(name, learner_id)
            with storage_errors(path, "removing"):
                path.unlink(missing_ok=True)
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()


class PartExchange:
    """Marks and the captured part, shared by training thread and background thread.

    Its lock is held for a few assignments at a time.

    Args:
        directory: where parts go; None where this learner takes no part in snapshots.
    """

    def __init__(self, directory: SnapshotDirectory | None = None) -> None:
        self._lock = threading.Lock()
        self._marks = SnapshotMarks()
        self._directory = directory
        self._captured: tuple[SnapshotName, TrainingState] | None = None
        self._missing: list[tuple[SnapshotName, str]] = []

    @property
    def records_parts(self) -> bool:
        """Whether this learner takes part in snapshots."""
        return self._directory is not None

    @property
    def due(self) -> SnapshotName | None:
        """The cut to record now."""
        with self._lock:
            marks = self._marks
            if self._directory is None or not marks.due:
                return None
            return SnapshotName(marks.term, marks.due)

    @property
    def recorded(self) -> int:
        """The cut that this learner's clocks carry."""
        with self._lock:
            return self._marks.recorded

    def joined(self, term: int, cut: int) -> None:
        """A Join was answered."""
        with self._lock:
            self._marks.joined(term, cut)

    def heard(self, clock: types_pb2.Clock) -> None:
        """A message of the synchronizer came; before anything else of it is used."""
        if clock.snapshot:
            with self._lock:
                self._marks.heard(clock.term, clock.snapshot)

    def noticed(self, term: int, cut: int, *, over: bool) -> None:
        """A notice came."""
        with self._lock:
            if over:
                self._marks.over(cut)
            else:
                self._marks.heard(term, cut)

    def is_beyond(self, version: Version) -> bool:
        """Whether an update is above the cut that is due."""
        with self._lock:
            return self._marks.is_beyond(version)

    def applied(self, version: Version) -> None:
        """An update is in the model."""
        with self._lock:
            if self._directory is not None and self._marks.is_beyond(version):
                name = SnapshotName(self._marks.term, self._marks.due)
                self._missing.append((name, "an update above the cut was applied first"))
            self._marks.applied(version)

    def captured(self, name: SnapshotName, state: TrainingState | None) -> None:
        """A part is copied, or (None) could not be; an older one not yet written is dropped."""
        with self._lock:
            self._marks.captured()
            if state is not None:
                self._captured = (name, state)
            else:
                self._missing.append((name, "its state could not be copied; its log says why"))

    def take_missing(self) -> list[tuple[SnapshotName, str]]:
        """Takes the snapshots of which there will be no part, each with the reason."""
        with self._lock:
            missing, self._missing = self._missing, []
            return missing

    def write(self, learner_id: str) -> None:
        """Writes what was captured, where there is something; a failure is told, and that is all.

        The synchronizer leaves out who says so, or does not return the marker.
        """
        with self._lock:
            captured, self._captured = self._captured, None
        if captured is None:
            return
        assert self._directory is not None, "captured with a directory only"
        name, state = captured
        try:
            self._directory.write(name, learner_id, state)
        except DilocoError as error:
            _LOG.error("%s: no part of snapshot %s: %s", learner_id, name, error)
            with self._lock:
                self._missing.append((name, str(error)))
            return
        with self._lock:
            self._marks.written(name.term, name.global_step)
        _LOG.info("%s: its part of snapshot %s is written", learner_id, name)


async def write_parts(
    parts: PartExchange, learner_id: str, captured: asyncio.Event, runtime: Runtime
) -> None:
    """Writes a learner's parts as they are captured; runs until cancelled.

    Args:
        parts: shared with the training thread.
        learner_id: whose they are.
        captured: set where there is something to write.
        runtime: where the disk does not hold up the event loop.
    """
    while True:
        await captured.wait()
        captured.clear()
        await runtime.offload(lambda: parts.write(learner_id))
