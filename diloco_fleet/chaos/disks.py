"""A small disk of its own under a folder, for as long as this process and its children live.

It is mounted where this process alone sees it: nothing of it is left behind, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason

DISK_BYTES: Final = 256 << 20
"""Size of a disk; what is stored beyond that does not fit, full or not."""

_CLONE_NEWNS: Final = 0x00020000
_FILLER: Final = ".filler"
_AGAIN_S: Final = 0.1


def no_disk_because() -> str:
    """Says why this process can mount no disk; empty where it can."""
    if sys.platform != "linux":
        return "disks of their own are mounted on Linux alone"
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "it needs the programs unshare and mount"
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", os.sep + "tmp"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    return f"mounting a tmpfs is not permitted here ({done.stderr.strip()}); it needs root"


class Disks:
    """Small disks under folders of this process's own view. Call before it has threads."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._copied: set[Path] = set()
        """Those that are unmounted, and whose copy is whole."""

    def mount(self, folder: Path) -> None:
        """Puts a disk under a folder.

        Raises:
            DilocoError: STORAGE_FAILED.
        """
        if not self._folders:
            if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
                raise _failed(folder, os.strerror(ctypes.get_errno()))
            _run(folder, "mount", "--make-rprivate", os.sep)
        folder.mkdir(parents=True, exist_ok=True)
        _run(folder, "mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
        self._folders.append(folder)

    def keep(self) -> None:
        """Unmounts every disk; what was on it is in its folder then.

        A disk of which that fails stays, and stops no other: call it again.

        Raises:
            DilocoError: STORAGE_FAILED, for the first of them.
        """
        failures: list[DilocoError | OSError] = []
        for folder in tuple(self._folders):
            try:
                self._keep(folder)
            except (DilocoError, OSError) as error:
                failures.append(error)
            else:
                self._folders.remove(folder)
        for failure in failures:
            if isinstance(failure, DilocoError):
                raise failure
            why = f"what was on a disk of its own cannot be kept: {failure}"
            raise DilocoError(Reason.STORAGE_FAILED, why) from failure

    def _keep(self, folder: Path) -> None:
        copy = folder.with_name(f"{folder.name}.copy")
        if folder not in self._copied:
            # An earlier copy may be a part of what there is.
            if copy.exists():
                shutil.rmtree(copy)
            shutil.copytree(folder, copy)
            _run(folder, "umount", "--lazy", str(folder))
            self._copied.add(folder)
        if copy.exists():
            if folder.exists():
                shutil.rmtree(folder)
            copy.replace(folder)
        self._copied.discard(folder)


def fill(folder: Path) -> None:
    """Fills the disk of a folder, and keeps it full until `make_room`.

    A store makes room as it goes, by removing what is outdated: that is taken, too.
    """
    filler = folder / _FILLER
    filler.touch()
    _append(filler)
    threading.Thread(target=_keep_full, args=(filler,), name="filler", daemon=True).start()


def _keep_full(filler: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        while True:
            time.sleep(_AGAIN_S)
            _append(filler)


def _append(filler: Path) -> None:
    """Writes until the disk is full; to a filler that is there."""
    descriptor = os.open(filler, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, b"x" * size)
    finally:
        os.close(descriptor)


def make_room(folder: Path) -> None:
    """Ends `fill`."""
    (folder / _FILLER).unlink(missing_ok=True)


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _failed(folder, done.stderr.strip())


def _failed(folder: Path, why: str) -> DilocoError:
    return DilocoError(
        Reason.STORAGE_FAILED, f"no disk of its own can be mounted at {folder}: {why}", path=folder
    )
