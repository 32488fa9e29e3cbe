"""What one incarnation has on lease, how far it is in it, and what of it is merged."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.data_records import DataLease, DataRange

_MAX_MARKS: Final = 4096
_MAX_REQUESTS: Final = 8


@dataclass(slots=True, kw_only=True)
class OpenLease:
    """A lease that is not merged as a whole."""

    lease: DataLease
    merged_to: int

    @property
    def rest(self) -> DataRange:
        """What of it is not merged."""
        where = self.lease.where
        return DataRange(where.epoch, self.merged_to, where.stop)


@dataclass(slots=True, kw_only=True)
class Holder:
    """One incarnation that has, or had, leases.

    Attributes:
        incarnation: who.
        leases: its leases that are not merged, in order of their ids.
        in_use: the lease in which it trains, as reported last; what it claimed as it joined counts
            as trained, until its first report says more.
        marks: (local step, lease in use, position in it) as reported, in order.
        contributed: highest local step of a committed contribution, by fragment.
        requests: the newest requests and what they got.
    """

    incarnation: Incarnation
    leases: dict[int, OpenLease] = field(default_factory=dict)
    in_use: int = 0
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    contributed: dict[int, int] = field(default_factory=dict)
    requests: OrderedDict[str, DataLease] = field(default_factory=OrderedDict)

    @property
    def num_untrained(self) -> int:
        """Leases that it has not used up, as far as it has said."""
        return sum(lease_id > self.in_use for lease_id in self.leases)

    def answered(self, request_id: str, lease: DataLease) -> None:
        """Remembers what a request got."""
        self.requests[request_id] = lease
        while len(self.requests) > _MAX_REQUESTS:
            self.requests.popitem(last=False)

    def mark(self, local_step: int, lease_id: int, position: int) -> None:
        """Takes how far it is; what cannot be is left out."""
        if not self.leases or lease_id > next(reversed(self.leases)):
            return
        mark = (local_step, lease_id, position)
        if self.marks and (local_step <= self.marks[-1][0] or mark[1:] < self.marks[-1][1:]):
            return
        self.in_use = max(self.in_use, lease_id)
        self.marks.append(mark)
        if len(self.marks) > _MAX_MARKS:
            # A mark that is missing puts a merge off; it never makes one too many.
            del self.marks[1 : _MAX_MARKS // 2 : 2]

    def roll(self) -> list[DataRange]:
        """Merges what was trained up to the lowest local step contributed to any fragment."""
        floor = min(self.contributed.values())
        reached = None
        while self.marks and self.marks[0][0] <= floor:
            reached = self.marks.pop(0)
        if reached is None:
            return []
        _, lease_id, position = reached
        merged = []
        for open_lease in list(self.leases.values()):
            where = open_lease.lease.where
            if open_lease.lease.lease_id > lease_id:
                break
            in_use = open_lease.lease.lease_id == lease_id
            merged_to = min(max(position, open_lease.merged_to), where.stop)
            merged_to = merged_to if in_use else where.stop
            if merged_to > open_lease.merged_to:
                merged.append(DataRange(where.epoch, open_lease.merged_to, merged_to))
                open_lease.merged_to = merged_to
            if merged_to == where.stop:
                del self.leases[open_lease.lease.lease_id]
        return merged
