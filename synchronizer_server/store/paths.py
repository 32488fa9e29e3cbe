"""Where things lie in a store's directory: names only, and the listing of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from synchronizer_server.store.envelope import FileRef
from synchronizer_server.store.files import TEMPORARY_SUFFIX, storage_errors

SNAPSHOTS: Final = "snapshots"
"""Directory of the snapshots within a store."""

_TERM: Final = re.compile(r"term-(\d{8,18})")
_ROUND: Final = re.compile(r"round-(\d{10,18})\.json")
_FRAGMENT: Final = re.compile(r"fragment-(\d{4,18})-(\d{10,18})\.safetensors")


class StorePaths:
    """The names in one group's part of a store.

    Args:
        root: directory of the store.
        group: group of fragments.
        snapshots: directory of the snapshots; within the store by default.

    Attributes:
        root: directory of the store.
        directory: the group's directory.
        run: file of the run's description.
        lock: the writer's lock file.
        unfinished: an empty directory that is there while a first install is under way.
        snapshots: directory of the snapshots of the whole fleet.
    """

    def __init__(self, root: Path, group: int, snapshots: Path | None = None) -> None:
        self.root = root
        self.directory = root / f"group-{group:03d}"
        self.run = root / "run.json"
        self.lock = self.directory / "lock"
        self.unfinished = self.directory / "first-install"
        self.snapshots = snapshots or root / SNAPSHOTS

    def term(self, term: int) -> Path:
        """Directory of a term."""
        return self.directory / f"term-{term:08d}"

    def record(self, term: int, global_step: int) -> Path:
        """File of a round record."""
        return self.term(term) / f"round-{global_step:010d}.json"

    def fragment(self, fragment: int, term: int, global_step: int) -> Path:
        """File of one version of a fragment."""
        return self.term(term) / f"fragment-{fragment:04d}-{global_step:010d}.safetensors"

    def file_of(self, fragment: int, ref: FileRef) -> Path:
        """File that a record names for a fragment."""
        return self.fragment(fragment, ref.term, ref.global_step)

    def terms(self) -> list[tuple[int, Path]]:
        """Terms that have a directory, ascending."""
        return sorted(
            (int(match[1]), path)
            for path in listing(self.directory)
            if (match := _TERM.fullmatch(path.name)) is not None and path.is_dir()
        )

    def records(self) -> list[tuple[int, int, Path]]:
        """Term, t and path of every record file, oldest first."""
        return sorted(
            (term, int(match[1]), path)
            for term, directory in self.terms()
            for path in listing(directory)
            if (match := _ROUND.fullmatch(path.name)) is not None
        )

    def fragments(self) -> list[tuple[int, Path]]:
        """Global step and path of every fragment's file."""
        return [
            (int(match[2]), path)
            for _, directory in self.terms()
            for path in listing(directory)
            if (match := _FRAGMENT.fullmatch(path.name)) is not None
        ]

    def temporary(self) -> Iterator[Path]:
        """Files that a crash left half-written."""
        for directory in [self.root, *(path for _, path in self.terms())]:
            for path in listing(directory):
                name = path.name.removesuffix(TEMPORARY_SUFFIX)
                whole = self.run.name if directory == self.root else None
                if name != path.name and (name == whole or _is_content(name)):
                    yield path

    def content(self, directory: Path) -> list[Path]:
        """Records, then fragments of one term: the files that retention may remove, in order."""
        ours = [path for path in listing(directory) if _is_content(path.name)]
        return sorted(ours, key=lambda path: _ROUND.fullmatch(path.name) is None)


def listing(directory: Path) -> list[Path]:
    """Everything in a directory, sorted.

    Raises:
        DilocoError: ``STORAGE_FAILED``.
    """
    with storage_errors(directory):
        return sorted(directory.iterdir())


def _is_content(name: str) -> bool:
    return _ROUND.fullmatch(name) is not None or _FRAGMENT.fullmatch(name) is not None
