"""Files written whole or not at all, and the errors of the disk under them."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from decoupled_diloco.errors import DilocoError, Reason

_READ_BYTES = 1 << 20


@contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """Turns an OSError raised inside into one clear error that names ``path``.

    Args:
        path: the file or folder at work.
        doing: what was being done to it, as in "writing".

    Raises:
        DilocoError: DISK_FULL without space or quota, else STORAGE_FAILED.
    """
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DilocoError(
                Reason.DISK_FULL,
                f"no space left {doing} {path}; free some space or choose another folder",
                path=path,
            ) from error
        raise DilocoError(
            Reason.STORAGE_FAILED,
            f"{doing} {path} failed: {error.strerror or error}; check the path and its permissions",
            path=path,
        ) from error


def fsync_path(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file so that a reader sees either the old file or the whole new one.

    Args:
        path: the file to replace; its folder exists.
        write: writes the content to the path it is given (a temporary name beside ``path``).

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED; ``path`` is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path, "writing"):
        try:
            write(temporary)
            fsync_path(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_path(path.parent)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
