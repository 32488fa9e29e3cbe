"""What the tests of the book of data leases share."""

from __future__ import annotations

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.data_records import (
    check_data,
    data_from,
    data_to,
    lease_from,
    lease_to,
)
from synchronizer_server.core.leases import DataLease, DataLeases

ONE, TWO = Incarnation(1, 1), Incarnation(1, 2)


def reloaded(book: DataLeases, *, length: int, lease_length: int) -> DataLeases:
    """A book that goes on from what the records of this one say, through JSON."""
    data = data_from(data_to(book.record), "data")
    leases = [lease_from(lease_to(x), "lease") for x in book.leases]
    check_data(data, leases)
    return DataLeases(length=length, lease_length=lease_length, record=data, leases=leases)


def grant(book: DataLeases, who: str) -> DataLease:
    """The next range for the first life of a learner."""
    lease = book.grant(who, ONE, f"r{book.record.next_lease_id}")
    assert lease is not None
    return lease
