"""What a round record says of the training data: leases, and where the rest of it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.strict_json import Reader, corrupt, incarnation_from, incarnation_to


@dataclass(frozen=True, slots=True, order=True)
class DataRange:
    """Positions ``start`` to ``stop`` (not included) of one pass over the data.

    Attributes:
        epoch: the pass, from 0.
        start: first position.
        stop: position behind the last one.
    """

    epoch: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """How many positions it has."""
        return self.stop - self.start

    def common(self, other: DataRange) -> DataRange | None:
        """What both have; None where that is nothing."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        if self.epoch != other.epoch or start >= stop:
            return None
        return DataRange(self.epoch, start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLease:
    """A range as it was leased, or as its holder claims it back.

    Attributes:
        lease_id: names it within the incarnation; goes up.
        where: the range.
    """

    lease_id: int
    where: DataRange


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A range of data leased to one incarnation (design section 6).

    Attributes:
        learner_id: who holds it.
        incarnation: the holder's incarnation.
        lease_id: names it within the incarnation.
        epoch: pass over the data.
        start: first position of the range.
        stop: position behind the range.
        merged_to: position up to which the range is merged into every fragment.
    """

    learner_id: str
    incarnation: Incarnation
    lease_id: int
    epoch: int
    start: int
    stop: int
    merged_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WentBack:
    """That the run went back to a snapshot, for the leases of learners that lived before.

    Attributes:
        snapshot: its name.
        term: the first term after it; what was leased in an earlier one is claimed by nobody but
            by who goes on from its part of that snapshot.
        awaited: incarnation at the cut of every learner in the snapshot that is not back yet.
    """

    snapshot: str
    term: int
    awaited: Mapping[str, Incarnation]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """Where the leased data stands; all zero where shards are fixed.

    Attributes:
        length: samples of one pass; 0 for data without an end.
        epoch: pass of the next sample that was never leased.
        position: its position.
        next_lease_id: id of the next lease.
        num_merged: samples merged into every fragment, over all passes.
        num_returned: samples that were given back, over all passes.
        returned: ranges that were given back and wait for a new holder, in order.
        lost: incarnations whose leases were taken back, by learner id.
        went_back: the last time that the run went back to a snapshot; None where it never did.
    """

    length: int = 0
    epoch: int = 0
    position: int = 0
    next_lease_id: int = 1
    num_merged: int = 0
    num_returned: int = 0
    returned: tuple[DataRange, ...] = ()
    lost: Mapping[str, Incarnation] = field(default_factory=dict)
    went_back: WentBack | None = None

    @property
    def num_issued(self) -> int:
        """Samples that were ever leased, each counted once per pass."""
        return self.epoch * self.length + self.position


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTotals:
    """Where the leased data stands, in samples.

    Attributes:
        length: samples of one pass; 0 for data without an end.
        issued: samples that were ever leased, each once per pass: the sum of the next three.
        merged: samples merged into every fragment.
        leased: samples on lease and not merged.
        free: samples that were given back and wait for a new holder.
        returned: samples that were ever given back.
    """

    length: int
    issued: int
    merged: int
    leased: int
    free: int
    returned: int


def lease_to(lease: LeaseRecord) -> dict[str, object]:
    """A lease as JSON values."""
    return {
        "learner_id": lease.learner_id,
        "incarnation": incarnation_to(lease.incarnation),
        "lease_id": lease.lease_id,
        "epoch": lease.epoch,
        "start": lease.start,
        "stop": lease.stop,
        "merged_to": lease.merged_to,
    }


def lease_from(value: object, where: str) -> LeaseRecord:
    """Reads what ``lease_to`` wrote.

    Raises:
        DilocoError: ``STORE_CORRUPT``.
    """
    reader = Reader(value, where)
    lease = LeaseRecord(
        learner_id=reader.text("learner_id"),
        incarnation=reader.nested("incarnation", incarnation_from),
        lease_id=reader.integer("lease_id"),
        epoch=reader.integer("epoch"),
        start=reader.integer("start"),
        stop=reader.integer("stop"),
        merged_to=reader.integer("merged_to"),
    )
    reader.done()
    if not lease.start <= lease.merged_to < lease.stop:
        raise corrupt(where, "merged_to lies outside the range, or the range is merged")
    return lease


def data_to(data: DataRecord) -> dict[str, object]:
    """The record as JSON values."""
    return {
        "length": data.length,
        "epoch": data.epoch,
        "position": data.position,
        "next_lease_id": data.next_lease_id,
        "num_merged": data.num_merged,
        "num_returned": data.num_returned,
        "returned": [{"epoch": x.epoch, "start": x.start, "stop": x.stop} for x in data.returned],
        "lost": {k: incarnation_to(v) for k, v in data.lost.items()},
        "went_back": None if data.went_back is None else _went_back_to(data.went_back),
    }


def data_from(value: object, where: str) -> DataRecord:
    """Reads what ``data_to`` wrote.

    Raises:
        DilocoError: ``STORE_CORRUPT``.
    """
    reader = Reader(value, where)
    data = DataRecord(
        length=reader.integer("length"),
        epoch=reader.integer("epoch"),
        position=reader.integer("position"),
        next_lease_id=reader.integer("next_lease_id"),
        num_merged=reader.integer("num_merged"),
        num_returned=reader.integer("num_returned"),
        returned=reader.sequence("returned", _range_from),
        lost=reader.mapping("lost", incarnation_from),
        went_back=reader.nested("went_back", _went_back_from),
    )
    reader.done()
    return data


def _went_back_to(went_back: WentBack) -> dict[str, object]:
    return {
        "snapshot": went_back.snapshot,
        "term": went_back.term,
        "awaited": {k: incarnation_to(v) for k, v in went_back.awaited.items()},
    }


def _went_back_from(value: object, where: str) -> WentBack | None:
    if value is None:
        return None
    reader = Reader(value, where)
    found = WentBack(
        snapshot=reader.text("snapshot"),
        term=reader.integer("term"),
        awaited=reader.mapping("awaited", incarnation_from),
    )
    reader.done()
    return found


def _range_from(value: object, where: str) -> DataRange:
    reader = Reader(value, where)
    found = DataRange(reader.integer("epoch"), reader.integer("start"), reader.integer("stop"))
    reader.done()
    if found.start >= found.stop:
        raise corrupt(where, "the range is empty")
    return found


def check_data(data: DataRecord, leases: Iterable[LeaseRecord]) -> None:
    """Refuses data that does not add up: every sample issued is merged, on lease or given back.

    Raises:
        DilocoError: ``STORE_CORRUPT``.
    """
    where = "record.data"
    if (data.length and data.position >= data.length) or (not data.length and data.epoch):
        raise corrupt(where, f"position {data.position} of epoch {data.epoch} cannot be")
    open_ranges = [DataRange(x.epoch, x.merged_to, x.stop) for x in leases]
    ranges = sorted([*open_ranges, *data.returned])
    for before, after in pairwise(ranges):
        if before.epoch == after.epoch and before.stop > after.start:
            raise corrupt(where, f"two have {after}")
    for found in ranges:
        whole = found.epoch < data.epoch and found.stop <= data.length
        if not whole and not (found.epoch == data.epoch and found.stop <= data.position):
            raise corrupt(where, f"{found} was never leased")
    num_open = sum(x.num_samples for x in ranges)
    if num_open + data.num_merged != data.num_issued:
        raise corrupt(
            where,
            f"{data.num_issued} samples were leased, {data.num_merged} are merged and {num_open} "
            "open: that does not add up",
        )
