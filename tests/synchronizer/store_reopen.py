"""A store that is opened again and again, as by a synchronizer that restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from synchronizer_server.store import DiskStore, MemoryStore
from synchronizer_server.store.base import RoundStore
from tests.synchronizer.store_scenario import RUN

Reopen = Callable[[], RoundStore]


@contextlib.contextmanager
def reopening(kind: str, path: Path) -> Iterator[Reopen]:
    """Gives the store as a restarted synchronizer finds it; the one before is closed.

    ``kind`` is ``memory`` or a durability.
    """
    opened: list[RoundStore] = []

    def restart() -> RoundStore:
        if opened:
            opened[-1].close()
        if kind == "memory":
            opened.append(opened[-1] if opened else MemoryStore())
        else:
            opened.append(DiskStore(path / "store", RUN, durability=kind))
        return opened[-1]

    yield restart
    if opened:
        opened[-1].close()
