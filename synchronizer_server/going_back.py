"""Going back to a snapshot: a new term begins on its cut; what was newer is given up, and told."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.snapshots import SnapshotName
from synchronizer_server.core.leases import DataLeases
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.store.base import RoundStore
from synchronizer_server.store.manifest import Manifest

logger = logging.getLogger(__name__)

LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class WentBack:
    """What became of it.

    Attributes:
        manifest: the snapshot.
        term: the new term.
        num_given_up: newer rounds that are not on the lineage any more; None where what was newer
            is damaged.
    """

    manifest: Manifest
    term: int
    num_given_up: int | None

    def describe(self) -> str:
        """What became of it, for people."""
        rounds = (
            "all newer rounds, which are damaged,"
            if self.num_given_up is None
            else (f"{self.num_given_up} newer rounds")
        )
        return (
            f"back to snapshot {self.manifest.name}, as term {self.term}: {rounds} are given up; "
            "they stay in the directories of their terms until those are outdated"
        )


def choose(manifests: Sequence[Manifest], choice: str) -> Manifest:
    """Returns the snapshot that is meant.

    Args:
        manifests: the complete ones, oldest first.
        choice: ``latest``, a name (``TERM.STEP``), or a global step, then of its newest term.

    Raises:
        DilocoError: SNAPSHOT_NOT_FOUND; UsageError CONFIG_INVALID for what cannot be a name.
    """
    if choice == LATEST:
        found = list(manifests)
    elif choice.isascii() and choice.isdecimal():
        found = [m for m in manifests if m.name.global_step == int(choice)]
    else:
        name = SnapshotName.parse(choice)
        found = [m for m in manifests if m.name == name]
    if not found:
        there = ", ".join(str(m.name) for m in manifests) or "none"
        raise UsageError(
            Reason.SNAPSHOT_NOT_FOUND,
            f"there is no complete snapshot {choice}; there are: {there}",
            snapshot=choice,
        )
    return found[-1]


def go_back(store: RoundStore, choice: str, *, term: int = 0) -> WentBack:
    """Makes a snapshot the state of the run; the next start of a synchronizer goes on from it.

    Where a run has several stores, all of them go back, under one term, or the one that did not
    could lead on with what is given up.

    Args:
        store: a store of the run; no synchronizer runs on it.
        choice: see ``choose``.
        term: the new term at least.

    Raises:
        DilocoError: as ``choose`` and as the store says it; nothing has changed then.
    """
    manifest = choose(store.snapshots(), choice)
    try:
        loaded = store.load()
    except DilocoError as error:
        logger.warning("what is newer than snapshot %s is damaged: %s", manifest.name, error)
        loaded = None
    record, _ = store.go_back(manifest.name)
    term = max(term, 1 + store.highest_term())
    store.begin_term(
        term,
        dataclasses.replace(
            _data_of(record, manifest, term),
            term=term,
            fragment=None,
            contributions=(),
            dropped=(),
        ),
    )
    given_up = None if loaded is None else max(loaded[0].global_step - record.global_step, 0)
    return WentBack(manifest=manifest, term=term, num_given_up=given_up)


def _data_of(record: RoundRecord, manifest: Manifest, term: int) -> RoundRecord:
    """The record of the cut, with its data leases for those who are in the snapshot alone."""
    if not record.data.num_issued:
        return record
    book = DataLeases(
        length=record.data.length, lease_length=1, record=record.data, leases=record.leases
    )
    book.went_back(str(manifest.name), term, manifest.participants)
    return dataclasses.replace(record, data=book.record, leases=book.leases)
