"""The durable store: one directory per term, files that are never replaced across terms.

    PATH/run.json                                              the run's description
    PATH/group-000/lock                                        held by the single writer
    PATH/group-000/first-install/                              there until a standby has a record
    PATH/group-000/term-00000001/round-0000000123.json         round record
    PATH/group-000/term-00000001/fragment-0003-0000000123.safetensors

A record names for each fragment the file that holds its tensors, with size and SHA-256; so a
record with all its files is a complete cut of the group. A record file appears only after its
fragments' files are safe; a crash in between leaves files that no record names, which the next
commits sweep away.

A standby's store gets its records by ``install``. Their files lie in the directory of the term
whose leader sent them, so what an older term left behind is never replaced, even where it is not on
the final lineage.

What each durability survives:

- ``disk`` forces every file out before ``commit`` or ``install`` returns: nothing committed is
  lost to a crash of the process, the machine or the power.
- ``async`` leaves a round's files to the kernel: a crash of the process loses nothing; a crash of
  the machine or the power may lose the newest rounds, at most twice ``keep_rounds``, since older
  ones are removed only after the kept ones were forced out.
- ``standby`` is ``async`` on this disk; the rounds that a crash of this machine takes are those
  that a standby has acknowledged, so only both machines failing at once loses any. Whoever
  commits asks for ``force`` while no standby is in sync: then the round, and all that its cut
  names, survives what it does with ``disk``.

Seed, start of a term and the first record that a standby gets of a term are always forced out.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.snapshots import SnapshotName
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.base import (
    RunDescription,
    check_begin,
    check_commit,
    check_install,
)
from synchronizer_server.store.envelope import (
    Durability,
    Envelope,
    FileRef,
    encode_fragment,
    encode_record,
    encode_run,
)
from synchronizer_server.store.files import (
    WriterLock,
    make_directory,
    storage_errors,
    sync_all,
    sync_path,
    write_atomic,
)
from synchronizer_server.store.lineage import load_lineage, newest_of
from synchronizer_server.store.manifest import Manifest
from synchronizer_server.store.paths import StorePaths, listing
from synchronizer_server.store.run_file import read_run
from synchronizer_server.store.snapshots import DiskSnapshots

logger = logging.getLogger(__name__)


class DiskStore:
    """A ``RoundStore`` in a directory.

    Args:
        path: directory of the store, created when missing.
        run_id: the run; a store of another run is refused.
        group: group of fragments.
        durability: ``disk``, ``standby`` or ``async``, see the module.
        keep_rounds: round records to keep in each term, at least 1.
        keep_terms: newest terms whose records are kept, at least 1. Fragments' files that a kept
            record names always stay.
        snapshots: directory of the snapshots, which synchronizers of a run may share; within the
            store by default.

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
        snapshots: Path | None = None,
    ) -> None:
        assert durability in get_args(Durability), f"durability {durability!r} is not known"
        assert keep_rounds >= 1, "keep_rounds is at least 1"
        assert keep_terms >= 1, "keep_terms is at least 1"
        self._root = Path(path)
        self._run_id = run_id
        self._group = group
        self._durability: Durability = durability
        self._keep_rounds = keep_rounds
        self._keep_terms = keep_terms
        self._paths = StorePaths(self._root, group, snapshots)
        self._snapshots = DiskSnapshots(self._paths)
        self._loaded = False
        self._term: int | None = None
        self._kept: list[Envelope] = []  # on disk, oldest first; the last one is complete
        self._unsynced: set[Path] = set()
        self._written: tuple[Path, ...] = ()  # the tip's files, where this process wrote them
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
        return read_run(self._paths, self._run_id)

    def open_run(self, description: RunDescription) -> RunDescription:
        """See ``RoundStore.open_run``."""
        self._check_there()
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
        self._lock.check(self._paths.lock)
        self._term, self._kept, self._loaded, self._written = None, [], False, ()
        self.read_run()  # another run's store, or one without its description, is told first
        self._kept, fragments = load_lineage(self._paths, self._run_id, self._group)
        self._loaded = True
        self._unsynced = set()
        if (tip := self._tip) is None:
            return None
        self._end_first_install()
        if not tip.forced:  # an earlier process may have left it to the kernel
            self._unsynced = {self._record_path(tip.record), *self._fragment_paths(tip)}
        return tip.record, fragments

    @property
    def _tip(self) -> Envelope | None:
        return self._kept[-1] if self._kept else None

    # -- writing ----------------------------------------------------------------------------------

    def begin_term(self, term: int, record: RoundRecord | None = None) -> None:
        """See ``RoundStore.begin_term``."""
        assert self._loaded, "load comes before begin_term"
        self._check_there()
        tip = self._tip
        check_begin(term, record, tip=tip.record if tip else None, highest_term=self.highest_term())
        make_directory(self._paths.term(term))
        self._term = term
        self._snapshots.clean()
        if record is None:
            return
        try:
            self.commit(record, {})
        except DilocoError:
            self._term = None
            raise

    def commit(
        self, record: RoundRecord, fragments: Mapping[int, FragmentState], *, force: bool = False
    ) -> None:
        """See ``RoundStore.commit``."""
        assert self._loaded, "load comes before commit"
        self._check_there()
        tip = self._tip
        check_commit(record, fragments, term=self._term, tip=tip.record if tip else None)
        if tip is None:
            assert self.read_run() is not None, "open_run comes before the first record"
        self._write(record, fragments, force=force or record.fragment is None)

    def install(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> None:
        """See ``RoundStore.install``."""
        assert self._loaded, "load comes before install"
        self._check_there()
        tip = self._tip.record if self._tip else None
        if tip is None:
            assert self.read_run() is not None, "open_run comes before the first record"
        changed = check_install(record, fragments, tip=tip, highest_term=self.highest_term())
        if (record.run_id, record.group) != (self._run_id, self._group):
            raise DilocoError(
                Reason.RUN_MISMATCH,
                f"{self._root} holds run {self._run_id!r}, group {self._group}, and takes no round "
                f"of run {record.run_id!r}, group {record.group}",
                path=self._root,
            )
        self._term = None
        if changed is None:
            return
        if tip is None:
            make_directory(self._paths.unfinished)
        make_directory(self._paths.term(record.term))
        first = tip is None or tip.term < record.term
        self._write(record, changed, force=first or record.fragment is None)

    def _check_there(self) -> None:
        """Nothing is built on top of what somebody took away under this process."""
        self._lock.check(self._paths.lock, *self._written)

    def _write(
        self, record: RoundRecord, fragments: Mapping[int, FragmentState], *, force: bool
    ) -> None:
        """Writes fragments, then the record on top of the tip; takes all back when that fails."""
        files = dict(enumerate(self._tip.files)) if self._tip is not None else {}
        sync = force or self._durability == "disk"
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
                forced=sync,
            )
            if sync:  # what it names from before counts as forced out with it
                self._force(self._fragment_paths(envelope))
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
        self._written = (self._record_path(record), *self._fragment_paths(envelope))
        try:
            self._end_first_install()
            self._prune()
        except DilocoError as error:  # the commit stands
            logger.warning("old rounds could not be removed yet: %s", error.message)

    # -- snapshots --------------------------------------------------------------------------------

    def pin(self, name: SnapshotName) -> None:
        """See ``RoundStore.pin``."""
        tip = self._kept[-1]
        assert (tip.record.term, tip.record.global_step) == (name.term, name.global_step), name
        self._snapshots.pin(name, tip)

    def keep_snapshot(self, manifest: Manifest, keep: int) -> None:
        """See ``RoundStore.keep_snapshot``."""
        self._snapshots.keep(manifest, keep)

    def drop_snapshot(self, name: SnapshotName) -> None:
        """See ``RoundStore.drop_snapshot``."""
        self._snapshots.drop(name)

    def snapshots(self) -> list[Manifest]:
        """See ``RoundStore.snapshots``."""
        return self._snapshots.complete()

    def go_back(self, name: SnapshotName) -> tuple[RoundRecord, dict[int, FragmentState]]:
        """See ``RoundStore.go_back``."""
        self.read_run()
        envelope, fragments = self._snapshots.read(name, self._run_id, self._group)
        try:
            self.load()
        except DilocoError as error:
            if error.reason not in {Reason.STORE_CORRUPT, Reason.STORE_LOST}:
                raise
            logger.warning("what is newer than snapshot %s is damaged: %s", name, error.message)
        self._snapshots.put_back(name, envelope)
        self._kept = [kept for kept in self._kept if kept.record != envelope.record]
        self._kept.append(envelope)
        self._loaded = True
        return envelope.record, fragments

    # -- writing, in parts ------------------------------------------------------------------------

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
            global_step=record.versions[fragment].global_step,
            num_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        path = self._paths.fragment(fragment, ref.term, ref.global_step)
        kept = [envelope.files[fragment] for envelope in self._kept]
        if (ref.term, ref.global_step) in [(other.term, other.global_step) for other in kept]:
            raise DilocoError(
                Reason.STORE_CORRUPT,
                f"{path} is there already, and its round is kept: term {ref.term} has two "
                "histories; let this standby begin with an empty store",
                path=path,
            )
        written.append(path)
        write_atomic(path, data, sync=sync)
        return ref

    def flush(self) -> None:
        """See ``RoundStore.flush``."""
        if self._durability == "standby" and self._kept:
            newest = self._kept[-1]
            self._force({self._record_path(newest.record), *self._fragment_paths(newest)})

    def _force(self, paths: set[Path]) -> None:
        """Forces out those of the files that were left to the kernel."""
        due = paths & self._unsynced
        sync_all(due)
        self._unsynced -= due

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
        """Removes what no kept record names."""
        newest = self._kept[-1].record.term
        counted = sum(envelope.record.term == newest for envelope in self._kept)
        if self._durability != "disk" and counted < 2 * self._keep_rounds:
            return
        self._kept = newest_of(self._kept, self._keep_terms, self._keep_rounds)
        referenced = {self._record_path(envelope.record) for envelope in self._kept}
        for envelope in self._kept:
            referenced |= self._fragment_paths(envelope)
        self._force(referenced)
        self._unsynced.clear()
        for term, directory in self._paths.terms():
            for path in self._paths.content(directory):
                if path not in referenced:
                    self._discard([path])
            if term != newest and not listing(directory):
                with storage_errors(directory):
                    directory.rmdir()

    def _end_first_install(self) -> None:
        """A record is there: from now on fragments without one are a loss."""
        with storage_errors(self._paths.unfinished), contextlib.suppress(FileNotFoundError):
            self._paths.unfinished.rmdir()

    def _record_path(self, record: RoundRecord) -> Path:
        return self._paths.record(record.term, record.global_step)

    def _fragment_paths(self, envelope: Envelope) -> set[Path]:
        refs = enumerate(envelope.files)
        return {self._paths.fragment(p, ref.term, ref.global_step) for p, ref in refs}
