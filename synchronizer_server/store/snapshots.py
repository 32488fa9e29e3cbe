"""Snapshots on disk: what a record names, pinned by hard links, and the manifest written last.

    PATH/snapshots/TERM.STEP/round-0000000123.json            the record of the cut
    PATH/snapshots/TERM.STEP/fragment-0003-0000000123.safetensors
    PATH/snapshots/TERM.STEP/LEARNER.safetensors              parts of learners that share the disk
    PATH/snapshots/TERM.STEP/manifest.json                    last: only now it is complete

Files of the store are never changed, only replaced, so a link to one is as good as a copy.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.fault_points import FaultPoint, reach
from decoupled_diloco.snapshots import MANIFEST, SnapshotName
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.base import snapshot_missing
from synchronizer_server.store.envelope import (
    Envelope,
    decode_manifest,
    decode_record,
    encode_manifest,
)
from synchronizer_server.store.files import (
    make_directory,
    read_if_exists,
    storage_errors,
    sync_path,
    write_atomic,
)
from synchronizer_server.store.lineage import read_fragments
from synchronizer_server.store.manifest import Manifest
from synchronizer_server.store.paths import StorePaths, listing

logger = logging.getLogger(__name__)

_NO_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP}
)
"""What file systems without hard links answer: the file is copied."""


class DiskSnapshots:
    """The snapshots of one store.

    Args:
        paths: where things lie.
    """

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths

    def pin(self, name: SnapshotName, envelope: Envelope) -> None:
        """Links a record and what it names; forced out before it returns.

        Raises:
            DilocoError: ``DISK_FULL`` or ``STORAGE_FAILED``.
        """
        directory = self._directory(name)
        make_directory(directory)
        for source, target in self._files(directory, envelope):
            _link(source, target)
            reach(FaultPoint.MID_SNAPSHOT)
        sync_path(directory)

    def keep(self, manifest: Manifest, keep: int) -> None:
        """Writes the manifest, then removes what it outdates; that may fail without harm.

        Raises:
            DilocoError: ``DISK_FULL`` or ``STORAGE_FAILED``.
        """
        directory = self._directory(manifest.name)
        write_atomic(directory / MANIFEST, encode_manifest(manifest), sync=True)
        sync_path(directory)
        complete = [found.name for found in self.complete()]
        kept = set(complete[-keep:]) | {manifest.name}
        self._remove_all(name for name in self._names() if name not in kept)

    def drop(self, name: SnapshotName) -> None:
        """Removes a snapshot, its manifest first.

        Raises:
            DilocoError: ``STORAGE_FAILED``.
        """
        directory = self._directory(name)
        with storage_errors(directory):
            if not directory.is_dir():
                return
            manifest = directory / MANIFEST
            if manifest.exists():
                manifest.unlink()
                sync_path(directory)
            shutil.rmtree(directory)

    def clean(self) -> None:
        """Removes what a crash left incomplete."""
        self._remove_all(
            name for name in self._names() if not (self._directory(name) / MANIFEST).exists()
        )

    def complete(self) -> list[Manifest]:
        """The complete ones, oldest first; one with a damaged manifest is none, and is told.

        Raises:
            DilocoError: ``STORAGE_FAILED``.
        """
        found = []
        for name in self._names():
            data = read_if_exists(self._directory(name) / MANIFEST)
            if data is None:
                continue
            try:
                manifest = decode_manifest(data)
            except DilocoError as error:
                logger.warning("snapshot %s cannot be used: %s", name, error.message)
                continue
            if manifest.name == name:
                found.append(manifest)
        return found

    def read(
        self, name: SnapshotName, run_id: str, group: int
    ) -> tuple[Envelope, dict[int, FragmentState]]:
        """Reads the cut of a complete snapshot, every byte checked.

        Raises:
            DilocoError: ``SNAPSHOT_NOT_FOUND``, ``STORE_CORRUPT`` or ``STORE_LOST``.
        """
        complete = self.complete()
        if name not in {manifest.name for manifest in complete}:
            raise snapshot_missing(name, complete)
        directory = self._directory(name)
        path = directory / self._paths.record(name.term, name.global_step).name
        try:
            envelope = decode_record(read_if_exists(path) or b"")
            record = envelope.record
            if (record.run_id, record.group) != (run_id, group):
                raise DilocoError(Reason.STORE_CORRUPT, f"{path} belongs to another run or group")
            if (record.term, record.global_step) != (name.term, name.global_step):
                raise DilocoError(Reason.STORE_CORRUPT, f"{path} is not the record of its name")
            return envelope, read_fragments(
                envelope, path, lambda p, ref: directory / self._paths.file_of(p, ref).name
            )
        except DilocoError as error:
            raise DilocoError(
                error.reason,
                f"snapshot {name} cannot be used ({error.message}); take another one",
                snapshot=name,
            ) from error

    def put_back(self, name: SnapshotName, envelope: Envelope) -> None:
        """Links what the record names to where the store has it, if it is no longer there.

        Raises:
            DilocoError: ``DISK_FULL`` or ``STORAGE_FAILED``.
        """
        directory = self._directory(name)
        touched = set()
        for p, ref in enumerate(envelope.files):
            target = self._paths.file_of(p, ref)
            make_directory(target.parent)
            _link(directory / target.name, target)
            touched.add(target.parent)
        for parent in sorted(touched):
            sync_path(parent)

    def _directory(self, name: SnapshotName) -> Path:
        return self._paths.snapshots / str(name)

    def _files(self, directory: Path, envelope: Envelope) -> Iterator[tuple[Path, Path]]:
        """Where the files of a record are, and where they are to be."""
        record = envelope.record
        sources = [self._paths.file_of(p, ref) for p, ref in enumerate(envelope.files)]
        sources.append(self._paths.record(record.term, record.global_step))
        for source in sources:
            yield source, directory / source.name

    def _names(self) -> list[SnapshotName]:
        """Names of all that is there, complete or not, oldest first."""
        if not self._paths.snapshots.is_dir():
            return []
        names = []
        for path in listing(self._paths.snapshots):
            with contextlib.suppress(UsageError):
                names.append(SnapshotName.parse(path.name))
        return sorted(names)

    def _remove_all(self, names: Iterable[SnapshotName]) -> None:
        for name in list(names):
            try:
                self.drop(name)
            except DilocoError as error:
                logger.warning("snapshot %s could not be removed yet: %s", name, error.message)


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name, durably; what has that name already is replaced."""
    with storage_errors(target):
        sync_path(source)  # with durability async it may not be on the disk yet
        if target.exists() and target.samefile(source):
            return
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            write_atomic(target, source.read_bytes(), sync=True)
