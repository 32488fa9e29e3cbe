"""Files that survive crashes: atomic writes, one error border, the lock of the single writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason

TEMPORARY_SUFFIX: Final = ".tmp"
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def storage_errors(path: Path, *, num_bytes: int = 0) -> Iterator[None]:
    """Maps every ``OSError`` inside to the catalogue.

    Args:
        path: what is being worked on, for the message.
        num_bytes: how much was to be written.

    Raises:
        DilocoError: ``DISK_FULL`` when there is no room, a quota or a limit on file sizes is
            reached; else ``STORAGE_FAILED``.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            needed = f" for {num_bytes} bytes" if num_bytes else ""
            raise DilocoError(
                Reason.DISK_FULL,
                f"no room{needed} at {path} ({why}); free some space, or raise the quota, on that "
                "file system",
                path=path,
                needed_bytes=num_bytes,
            ) from error
        raise DilocoError(
            Reason.STORAGE_FAILED,
            f"{path}: {why}; check that the path is a writable directory on a healthy disk",
            path=path,
        ) from error


def write_atomic(path: Path, data: bytes, *, sync: bool) -> None:
    """Writes a whole file under a temporary name, then renames it.

    With ``sync`` the contents are on the disk before the name is; the name itself is there after
    ``sync_directory``. When writing fails the temporary file is removed.

    Raises:
        DilocoError: as ``storage_errors``.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with storage_errors(path, num_bytes=len(data)):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def sync_path(path: Path) -> None:
    """Forces a file's contents, or a directory's names, to the disk.

    Raises:
        DilocoError: as ``storage_errors``.
    """
    with storage_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_all(paths: set[Path]) -> None:
    """Forces files, then the directories that name them, to the disk."""
    for path in sorted(paths):
        sync_path(path)
    for directory in sorted({path.parent for path in paths}):
        sync_path(directory)


def make_directory(path: Path) -> None:
    """Creates a directory and its parents, durably; an existing one is fine.

    Raises:
        DilocoError: as ``storage_errors``.
    """
    with storage_errors(path):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
    # an existing one too: whoever made it may have crashed before it was forced out
    for directory in {path, *missing}:
        sync_path(directory.parent)


def read_if_exists(path: Path) -> bytes | None:
    """Returns the contents, or None when there is no such file.

    Raises:
        DilocoError: ``STORAGE_FAILED``.
    """
    with storage_errors(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


class WriterLock:
    """Held by the one process that may write; the kernel drops it when that process dies.

    Args:
        path: the lock file; its directory exists.

    Raises:
        DilocoError: ``STORE_LOCKED`` when another writer holds it, ``STORAGE_FAILED``.
    """

    def __init__(self, path: Path) -> None:
        with storage_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._descriptor: int | None = descriptor
        try:
            with storage_errors(path):
                self._take(path, descriptor)
        except BaseException:
            self.release()
            raise

    @staticmethod
    def _take(path: Path, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise DilocoError(
                Reason.STORE_LOCKED,
                f"{path.parent} is in use by another synchronizer (process {holder}); "
                "stop that one, or give this one a store of its own",
                path=path.parent,
                holder=holder,
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)

    def check(self, path: Path, *others: Path) -> None:
        """Checks that the lock is where it was taken, and the others beside it.

        Args:
            path: the lock file.
            others: what must be there, too.

        Raises:
            DilocoError: ``STORE_REMOVED``; ``STORAGE_FAILED`` where that cannot be told.
        """
        assert self._descriptor is not None, "it was not released"
        with storage_errors(path):
            try:
                there = os.path.samestat(os.stat(path), os.fstat(self._descriptor))
                if there and all(other.exists() for other in others):
                    return
            except (FileNotFoundError, NotADirectoryError):
                pass
        raise DilocoError(
            Reason.STORE_REMOVED,
            f"{path.parent} was removed or replaced while it was in use; put it back, or start "
            "this synchronizer anew: another one that is in sync fills an empty store",
            path=path.parent,
        )

    def release(self) -> None:
        """Lets the next writer in. Calling it again does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
