"""The seam between the synchronizer and durable storage (design sections 4 and 6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.snapshots import SnapshotName
from decoupled_diloco.versions import Version
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.manifest import Manifest

RunDescription = dict[str, object]
"""What a run is: tensor specifications and settings, as JSON values. The store never looks in."""


class RoundStore(Protocol):
    """Keeps round records and fragments. Synchronous: call it in an executor, one call at a time.

    Order of a life: ``load``, ``open_run`` once the run's description is known, ``begin_term``,
    then ``commit`` for the seed and for every round, in order of t. A round may be published when
    its ``commit`` has returned, never before. The store of a standby has ``install`` in place of
    the last two, until a take-over: then ``begin_term`` follows with the newest record.
    """

    def read_run(self) -> RunDescription | None:
        """Returns the description kept by ``open_run``, or None.

        Raises:
            DilocoError: ``RUN_MISMATCH`` for another run's store, ``STORE_CORRUPT``,
                ``STORE_LOST`` when rounds are there without it, ``STORAGE_FAILED``.
        """

    def open_run(self, description: RunDescription) -> RunDescription:
        """Keeps the description; from the first committed record on the first one stays for good.

        Returns:
            The one that is kept: compare it with what was given.

        Raises:
            DilocoError: as ``read_run``; ``DISK_FULL``.
        """

    def highest_term(self) -> int:
        """The highest term that ever began here, with or without a round; 0 if none."""

    def load(self) -> tuple[RoundRecord, dict[int, FragmentState]] | None:
        """Returns the newest complete cut, every fragment of it checked; None in a fresh store.

        Raises:
            DilocoError: ``STORE_CORRUPT`` or ``STORE_LOST`` when what was committed is damaged or
                gone, ``STORAGE_FAILED`` when it cannot be read, ``STORE_REMOVED`` as for
                ``commit``.
        """

    def begin_term(self, term: int, record: RoundRecord | None = None) -> None:
        """Begins a term. Call ``load`` first.

        Args:
            term: above every term that has a record here, and not below ``highest_term``.
            record: the take-over: the loaded t and versions under the new term. None only in a
                store without a record, where the seed follows.

        Raises:
            DilocoError: ``STALE_TERM`` when the term is not new; as ``commit``.
        """

    def commit(
        self, record: RoundRecord, fragments: Mapping[int, FragmentState], *, force: bool = False
    ) -> None:
        """Makes one record and the fragments that it changed durable.

        Args:
            record: seed, or round of the current term.
            fragments: all for the seed, the merged one for a round. They are copied.
            force: force the round out to the disk, whatever the durability.

        Raises:
            DilocoError: ``STALE_TERM`` when another term is current; ``DISK_FULL``;
                ``STORAGE_FAILED``; ``STORE_REMOVED`` when what is there is not what was loaded.
                The previous record then stays the newest, and the same or a later commit may
                follow.
        """

    def install(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> None:
        """Keeps a record of another process's lineage: what a standby writes.

        Whatever the store held before, ``load`` gives this cut back afterwards. A term that was
        current here ends. A record of the newest term that the store is past, or holds already,
        changes nothing.

        Args:
            record: seed, round or take-over of a term not below ``highest_term``.
            fragments: at least those whose version (the whole of it) differs from that of the
                newest record here; of the others nothing is taken. They are copied.

        Raises:
            DilocoError: ``STALE_TERM`` for a lower term; ``STORE_CORRUPT`` when record and
                fragments do not make a complete cut on top of what is held; ``DISK_FULL``;
                ``STORAGE_FAILED``; ``STORE_REMOVED`` as for ``commit``. The record before then
                stays the newest.
        """

    def flush(self) -> None:
        """Forces out what durability ``standby`` has left to the kernel of the newest record.

        Raises:
            DilocoError: ``STORAGE_FAILED``.
        """

    def pin(self, name: SnapshotName) -> None:
        """Keeps the newest record, with what it names, as the store's part of a snapshot.

        Call it before the next ``commit``; what it keeps outlives that record's removal. The
        snapshot is incomplete, and of no use, until ``keep_snapshot``.

        Args:
            name: term and t of the newest record.

        Raises:
            DilocoError: ``DISK_FULL`` or ``STORAGE_FAILED``; nothing of it counts then.
        """

    def keep_snapshot(self, manifest: Manifest, keep: int) -> None:
        """Makes a pinned snapshot complete, then removes those that it outdates.

        Args:
            manifest: who is in it.
            keep: complete snapshots to keep, the newest, at least 1; of the older ones, and of
                the incomplete ones, nothing stays.

        Raises:
            DilocoError: as ``pin``; the complete snapshots are those of before.
        """

    def drop_snapshot(self, name: SnapshotName) -> None:
        """Removes a snapshot that is not to be completed; a missing one is fine.

        Raises:
            DilocoError: ``STORAGE_FAILED``.
        """

    def snapshots(self) -> list[Manifest]:
        """The complete snapshots, oldest first. May be called at any time.

        Raises:
            DilocoError: ``STORAGE_FAILED``.
        """

    def go_back(self, name: SnapshotName) -> tuple[RoundRecord, dict[int, FragmentState]]:
        """Makes the cut of a snapshot the one to go on from, in place of ``load``.

        It counts once ``begin_term`` has taken it over; until then nothing has changed. Newer
        rounds stay in the directories of their terms as long as others of that age.

        Raises:
            DilocoError: ``SNAPSHOT_NOT_FOUND`` where there is no complete one of that name;
                ``STORE_CORRUPT`` or ``STORE_LOST`` where it is damaged.
        """

    def close(self) -> None:
        """Releases the store. Calling it again does nothing."""


def snapshot_missing(name: SnapshotName, there: Iterable[Manifest]) -> DilocoError:
    """The error for a snapshot that is not there."""
    names = ", ".join(str(manifest.name) for manifest in there) or "none"
    return DilocoError(
        Reason.SNAPSHOT_NOT_FOUND,
        f"there is no complete snapshot {name}; there are: {names}",
        snapshot=name,
    )


def check_begin(
    term: int, record: RoundRecord | None, *, tip: RoundRecord | None, highest_term: int
) -> None:
    """Checks the arguments of ``begin_term`` against the newest record ``tip``.

    Raises:
        DilocoError: ``STALE_TERM``.
    """
    assert term >= 1, "terms count from 1"
    lowest = max(highest_term, 1 if tip is None else tip.term + 1)
    if term < lowest:
        raise DilocoError(
            Reason.STALE_TERM,
            f"term {term} cannot begin: the store knows later ones; take {lowest} or higher",
            term=term,
        )
    assert (record is None) == (tip is None), "a store with rounds is taken over, a fresh one not"
    if record is not None and tip is not None:
        assert record.term == term, "the record belongs to the new term"
        assert record.fragment is None, "a take-over merges no fragment"
        assert record.global_step == tip.global_step, "a take-over goes on at the loaded t"


def check_commit(
    record: RoundRecord,
    fragments: Mapping[int, FragmentState],
    *,
    term: int | None,
    tip: RoundRecord | None,
) -> None:
    """Checks the arguments of ``commit`` against the current term and the newest record.

    Raises:
        DilocoError: ``STALE_TERM``.
    """
    if record.term != term:
        raise DilocoError(
            Reason.STALE_TERM,
            f"round {record.global_step} of term {record.term} cannot be kept: "
            f"the current term is {term}",
            term=record.term,
        )
    if tip is None:
        assert record.fragment is None, "the seed is no round"
        assert set(fragments) == set(range(len(record.versions))), "the seed has all fragments"
    else:
        assert (record.run_id, record.group) == (tip.run_id, tip.group), "a record of another run"
        assert (record.term, record.global_step) > (tip.term, tip.global_step), "t goes up"
        assert set(fragments) == ({record.fragment} - {None}), "a round has its own fragment"
        kept = [p for p in range(len(tip.versions)) if p not in fragments]
        assert len(record.versions) == len(tip.versions), "the number of fragments is fixed"
        assert all(record.versions[p] == tip.versions[p] for p in kept), "other versions stay"
    for fragment, tensors in fragments.items():
        version = record.versions[fragment]
        assert tensors.problem() is None, f"fragment {fragment}: {tensors.problem()}"
        assert (version.term, version.global_step) == (record.term, record.global_step)
        assert version.digest == tensors.digest(), f"fragment {fragment}: digest is not its own"


def check_install(
    record: RoundRecord,
    fragments: Mapping[int, FragmentState],
    *,
    tip: RoundRecord | None,
    highest_term: int,
) -> dict[int, FragmentState] | None:
    """Checks the arguments of ``install`` against the newest record ``tip``.

    Returns:
        The fragments to write; None where the store holds the record, or a later one, already.

    Raises:
        DilocoError: ``STALE_TERM``; ``STORE_CORRUPT``, naming what differs.
    """
    if record.term < highest_term:
        raise DilocoError(
            Reason.STALE_TERM,
            f"round {record.global_step} of term {record.term} cannot be kept: the store knows "
            f"term {highest_term}",
            term=record.term,
        )
    held: dict[int, Version] = {}
    if tip is not None:
        _check_same_run(record, tip)
        if record.term == tip.term and record.global_step <= tip.global_step:
            if record.global_step == tip.global_step and record.to_json() != tip.to_json():
                raise _unfit(record, "the store holds another record of the same term and t")
            return None
        held = dict(enumerate(tip.versions))
    changed = {}
    for fragment, version in enumerate(record.versions):
        if version == held.get(fragment):
            continue
        if fragment not in fragments:
            raise _unfit(
                record,
                f"fragment {fragment} has version {version}, the store {held.get(fragment)}, and "
                "its tensors did not come with it",
            )
        tensors = fragments[fragment]
        if (problem := tensors.problem()) is not None:
            raise _unfit(record, f"fragment {fragment}: {problem}")
        if tensors.digest() != version.digest:
            raise _unfit(record, f"the published copy of fragment {fragment} is not {version}")
        changed[fragment] = tensors
    return changed


def _check_same_run(record: RoundRecord, tip: RoundRecord) -> None:
    for name in ("run_id", "group", "layout_fingerprint"):
        ours, theirs = getattr(tip, name), getattr(record, name)
        if ours != theirs:
            raise _unfit(record, f"its {name} is {theirs!r}, the store's {ours!r}")
    if len(record.versions) != len(tip.versions):
        raise _unfit(
            record, f"it has {len(record.versions)} fragments, the store {len(tip.versions)}"
        )


def _unfit(record: RoundRecord, what: str) -> DilocoError:
    return DilocoError(
        Reason.STORE_CORRUPT,
        f"round {record.global_step} of term {record.term} does not fit this store: {what}; "
        "where that stays so, let this standby begin with an empty store",
        term=record.term,
        global_step=record.global_step,
    )
