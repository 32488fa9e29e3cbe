"""Faults for the tests of the store on disk: file operations that fail or are logged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.store import DiskStore
from synchronizer_server.store.envelope import Durability
from tests.synchronizer.store_scenario import RUN


class Crash(BaseException):
    """The process ends here; no handler of ours may run."""


@contextlib.contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, operation: str, at: int, error: BaseException, *, after: bool
) -> Iterator[list[int]]:
    """Lets the n-th call of one file operation fail, before or after it took effect.

    Yields the number of calls so far, so that a test can tell when n is beyond the last call.
    """
    real = getattr(os, operation)
    calls = [0]

    def fake(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] != at:
            return real(*args, **kwargs)
        if after:
            with contextlib.suppress(FileNotFoundError):
                real(*args, **kwargs)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fake)
        yield calls


@contextlib.contextmanager
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Logs what is forced out and what gets its name, in order."""
    log: list[str] = []
    fsync, rename = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        log.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def logged_replace(source: Path, target: Path) -> None:
        log.append(f"name {target.name}")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", logged_fsync)
        patch.setattr(os, "replace", logged_replace)
        yield log


def open_disk(path: Path, durability: Durability = "disk", keep_rounds: int = 2) -> DiskStore:
    return DiskStore(path, RUN, durability=durability, keep_rounds=keep_rounds)


def refused(store: DiskStore, reason: Reason, file: Path) -> None:
    with pytest.raises(DilocoError, match="restore it from a backup") as caught:
        store.load()
    assert caught.value.reason is reason
    assert str(file) in caught.value.message
