"""The durable store: one directory per term, files that are never replaced across terms.

    PATH/run.json                                              the run's description
    PATH/group-000/lock                                        held by the single writer
    PATH/group-000/term-00000001/round-0000000123.json         round record
    PATH/group-000/term-00000001/fragment-0003-0000000123.safetensors

A record names for each fragment the file that holds its tensors, with size and SHA-256; so a
record with all its files is a complete cut of the group. A record file appears only after its
fragments' files are safe; a crash in between leaves files that no record names, which the next
commits sweep away.

Durability ``disk`` forces every file out before ``commit`` returns: nothing committed is lost to
a crash of the process, the machine or the power. With ``async`` a round's files are left to the
kernel: a crash of the process loses nothing; a crash of the machine or the power may lose the
newest rounds, at most twice ``keep_rounds``, since older ones are removed only after the kept
ones were forced out. Seed and start of a term are forced out either way.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.base import (
    RunDescription,
    check_begin,
    check_commit,
)
from synchronizer_server.store.envelope import (
    Durability,
    Envelope,
    FileRef,
    decode_run,
    encode_fragment,
    encode_record,
    encode_run,
)
from synchronizer_server.store.files import (
    WriterLock,
    make_directory,
    read_if_exists,
    storage_errors,
    sync_path,
    write_atomic,
)
from synchronizer_server.store.lineage import load_lineage
from synchronizer_server.store.paths import StorePaths, listing

logger = logging.getLogger(__name__)


class DiskStore:
    """A ``RoundStore`` in a directory.

    Args:
        path: directory of the store, created when missing.
        run_id: the run; a store of another run is refused.
        group: group of fragments.
        durability: ``disk`` or ``async``, see the module.
        keep_rounds: round records to keep in each term, at least 1.
        keep_terms: newest terms whose records are kept, at least 1. Fragments' files that a kept
            record names always stay.

    Raises:
        DilocoError: ``STORE_LOCKED`` when another process writes there, ``STORAGE_FAILED``,
            ``DISK_FULL``.
    """

    def __init__(
        self,
        path: str | Path,
        run_id: str,
        *,
        group: int = 0,
        durability: Durability = "disk",
        keep_rounds: int = 4,
        keep_terms: int = 3,
    ) -> None:
        assert durability in ("disk", "async"), f"durability {durability!r} is not known"
        assert keep_rounds >= 1, "keep_rounds is at least 1"
        assert keep_terms >= 1, "keep_terms is at least 1"
        self._root = Path(path)
        self._run_id = run_id
        self._group = group
        self._durability: Durability = durability
        self._keep_rounds = keep_rounds
        self._keep_terms = keep_terms
        self._paths = StorePaths(self._root, group)
        self._loaded = False
        self._term: int | None = None
        self._kept: list[Envelope] = []  # on disk, oldest first; the last one is complete
        self._unsynced: set[Path] = set()
        make_directory(self._paths.directory)
        self._lock = WriterLock(self._paths.lock)
        try:
            self._discard(list(self._paths.temporary()))
        except BaseException:
            self._lock.release()
            raise

    # -- the run ----------------------------------------------------------------------------------

    def read_run(self) -> RunDescription | None:
        """See ``RoundStore.read_run``."""
        path = self._paths.run
        data = read_if_exists(path)
        if data is None:
            if self._paths.records():
                raise DilocoError(
                    Reason.STORE_LOST,
                    f"{path} is missing, but rounds are there; restore it from a backup, or begin "
                    "a new run in an empty directory",
                    path=path,
                )
            return None
        try:
            run_id, description = decode_run(data)
        except DilocoError as error:
            raise DilocoError(
                Reason.STORE_CORRUPT,
                f"{path} is damaged: {error.message}; restore it from a backup, or begin a new "
                "run in an empty directory",
                path=path,
            ) from error
        if run_id != self._run_id:
            raise DilocoError(
                Reason.RUN_MISMATCH,
                f"{self._root} holds run {run_id!r}, not {self._run_id!r}; give this run a "
                "directory of its own",
                path=self._root,
            )
        return description

    def open_run(self, description: RunDescription) -> RunDescription:
        """See ``RoundStore.open_run``."""
        kept = self.read_run()
        seeded = bool(self._paths.records())
        if kept is None or (kept != description and not seeded):
            path = self._paths.run
            write_atomic(path, encode_run(self._run_id, description), sync=True)
            sync_path(self._root)
            kept = self.read_run()
            assert kept is not None, "it was written this instant"
        return kept

    # -- reading ----------------------------------------------------------------------------------

    def highest_term(self) -> int:
        """See ``RoundStore.highest_term``."""
        return max((term for term, _ in self._paths.terms()), default=0)

    def load(self) -> tuple[RoundRecord, dict[int, FragmentState]] | None:
        """See ``RoundStore.load``."""
        self._term, self._kept, self._loaded = None, [], False
        self.read_run()  # another run's store, or one without its description, is told first
        self._kept, fragments = load_lineage(self._paths, self._run_id, self._group)
        self._loaded = True
        return (self._kept[-1].record, fragments) if self._kept else None

    # -- writing ----------------------------------------------------------------------------------

    def begin_term(self, term: int, record: RoundRecord | None = None) -> None:
        """See ``RoundStore.begin_term``."""
        assert self._loaded, "load comes before begin_term"
        tip = self._kept[-1] if self._kept else None
        check_begin(term, record, tip=tip.record if tip else None, highest_term=self.highest_term())
        make_directory(self._paths.term(term))
        self._term = term
        if record is None or tip is None:
            return
        try:
            # the new record counts as forced out, so what it names must be: an earlier process
            # may have left that to the kernel
            _sync_all(self._fragment_paths(tip))
            self.commit(record, {})
        except DilocoError:
            self._term = None
            raise

    def commit(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> None:
        """See ``RoundStore.commit``."""
        assert self._loaded, "load comes before commit"
        tip = self._kept[-1] if self._kept else None
        check_commit(record, fragments, term=self._term, tip=tip.record if tip else None)
        if tip is None:
            assert self.read_run() is not None, "open_run comes before the first record"
        files = dict(enumerate(tip.files)) if tip is not None else {}
        sync = self._durability == "disk" or record.fragment is None
        written: list[Path] = []
        try:
            self._discard([self._record_path(record)])
            for fragment, tensors in fragments.items():
                files[fragment] = self._write_fragment(record, fragment, tensors, written, sync)
            if sync and written:
                sync_path(self._paths.term(record.term))
            envelope = Envelope(
                record=record,
                files=tuple(files[p] for p in range(len(record.versions))),
                durability=self._durability,
            )
            written.append(self._record_path(record))
            write_atomic(written[-1], encode_record(envelope), sync=sync)
            if sync:
                sync_path(self._paths.term(record.term))
        except DilocoError:
            self._undo(written)
            raise
        if not sync:
            self._unsynced.update(written)
        self._kept.append(envelope)
        self._prune()

    def _write_fragment(
        self,
        record: RoundRecord,
        fragment: int,
        tensors: FragmentState,
        written: list[Path],
        sync: bool,
    ) -> FileRef:
        data = encode_fragment(tensors, record, fragment)
        ref = FileRef(
            term=record.term,
            global_step=record.global_step,
            num_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        path = self._paths.fragment(fragment, ref.term, ref.global_step)
        written.append(path)
        write_atomic(path, data, sync=sync)
        return ref

    def _discard(self, paths: list[Path]) -> None:
        """Removes files, newest first; a missing one is fine."""
        for path in reversed(paths):
            with storage_errors(path):
                path.unlink(missing_ok=True)

    def _undo(self, written: list[Path]) -> None:
        """Takes a failed commit back as far as the disk allows; the next commit does the rest."""
        try:
            self._discard(written)
        except DilocoError as error:
            logger.warning("a failed round could not be taken back yet: %s", error.message)

    def close(self) -> None:
        """See ``RoundStore.close``."""
        self._term, self._loaded = None, False
        self._lock.release()

    # -- retention --------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Removes what no kept record names. The commit stands, whatever goes wrong here."""
        counted = sum(envelope.record.term == self._term for envelope in self._kept)
        if self._durability == "async" and counted < 2 * self._keep_rounds:
            return
        keep = self._retained()
        referenced = {self._record_path(envelope.record) for envelope in keep}
        for envelope in keep:
            referenced |= self._fragment_paths(envelope)
        try:
            if self._unsynced:
                _sync_all(self._unsynced & referenced)
                self._unsynced.clear()
            for term, directory in self._paths.terms():
                for path in self._paths.content(directory):
                    if path not in referenced:
                        self._discard([path])
                if term != self._term and not listing(directory):
                    with storage_errors(directory):
                        directory.rmdir()
        except DilocoError as error:
            logger.warning("old rounds could not be removed yet: %s", error.message)
        self._kept = keep

    def _retained(self) -> list[Envelope]:
        """The records to keep: the last of each of the newest terms."""
        terms = sorted({envelope.record.term for envelope in self._kept})[-self._keep_terms :]
        return [
            envelope
            for term in terms
            for envelope in [e for e in self._kept if e.record.term == term][-self._keep_rounds :]
        ]

    def _record_path(self, record: RoundRecord) -> Path:
        return self._paths.record(record.term, record.global_step)

    def _fragment_paths(self, envelope: Envelope) -> set[Path]:
        refs = enumerate(envelope.files)
        return {self._paths.fragment(p, ref.term, ref.global_step) for p, ref in refs}


def _sync_all(paths: set[Path]) -> None:
    """Forces files, then the directories that name them, to the disk."""
    for path in sorted(paths):
        sync_path(path)
    for directory in sorted({path.parent for path in paths}):
        sync_path(directory)
