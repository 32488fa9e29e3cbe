"""The seam between the synchronizer and durable storage (design sections 4 and 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState

RunDescription = dict[str, object]
"""What a run is: tensor specifications and settings, as JSON values. The store never looks in."""


class RoundStore(Protocol):
    """Keeps round records and fragments. Synchronous: call it in an executor, one call at a time.

    Order of a life: ``load``, ``open_run`` once the run's description is known, ``begin_term``,
    then ``commit`` for the seed and for every round, in order of t. A round may be published when
    its ``commit`` has returned, never before.
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
                gone, ``STORAGE_FAILED`` when it cannot be read.
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

    def commit(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> None:
        """Makes one record and the fragments that it changed durable.

        Args:
            record: seed, or round of the current term.
            fragments: all for the seed, the merged one for a round. They are copied.

        Raises:
            DilocoError: ``STALE_TERM`` when another term is current; ``DISK_FULL``;
                ``STORAGE_FAILED``. The previous record then stays the newest, and the same or a
                later commit may follow.
        """

    def close(self) -> None:
        """Releases the store. Calling it again does nothing."""


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
