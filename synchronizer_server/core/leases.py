"""Data leases: ranges of the training data, handed out to incarnations (design section 6).

Every pass over the data (epoch) is handed out once, in ranges. A range is merged up to the
position that its holder had at the lowest, over all fragments, local step of an accepted
contribution: everything before is in every fragment. The rest of a holder that dies is given back
and handed out again. So nothing is merged twice into every fragment and nothing is left out; what
is repeated is at most the unmerged rest of what a dead learner held.

The book moves with committed rounds alone, so that a round record and the book agree. Leases that
were handed out after the last record are claimed back by their holders after a restart; until that
time is over, nothing new is handed out.

Who trains is never made to wait for merges, since a merge may need a step of it: what it has
trained, and said so, is in nobody's way. What it holds stays bounded all the same: of the leases
that are not merged, those beyond a usual number are longer and longer, and where that is not enough
all of them are taken back, so that it goes on with others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.data_records import (
    DataLease,
    DataRange,
    DataRecord,
    DataTotals,
    LeaseRecord,
)
from synchronizer_server.core.free_ranges import FreeRanges, overlapping
from synchronizer_server.core.lease_holders import Holder, OpenLease
from synchronizer_server.core.records import ContributionRecord
from synchronizer_server.core.returning import Returning

MAX_UNTRAINED_LEASES: Final = 512
"""Leases of one incarnation that it has not used up; one that has more trains on them first."""

MAX_OPEN_LEASES: Final = 1024
"""Leases of one incarnation that are not merged; at so many they are taken back."""

MAX_CLAIM_AHEAD: Final = 4096
"""So many leases at most are taken to have been handed out after the last record."""

_USUAL_LEASES: Final = 512
_DOUBLED_EVERY: Final = 64
_MOST_DOUBLED: Final = (MAX_OPEN_LEASES - _USUAL_LEASES) // _DOUBLED_EVERY


class DataLeases:
    """The book of all leases of a run.

    Args:
        length: samples of one pass; 0 for data without an end.
        lease_length: most samples of one lease.
        record: where a restart goes on; a new run by default.
        leases: the leases of that record.

    Attributes:
        returning: who goes on from a part of a snapshot.
    """

    def __init__(
        self,
        *,
        length: int,
        lease_length: int,
        record: DataRecord | None = None,
        leases: Sequence[LeaseRecord] = (),
    ) -> None:
        record = record or DataRecord(length=length)
        assert record.length == length, "checked where it was loaded"
        self._length = length
        self._lease_length = lease_length
        self._free = FreeRanges(
            length, epoch=record.epoch, position=record.position, returned=record.returned
        )
        self._next_lease_id = record.next_lease_id
        self._num_merged = record.num_merged
        self._num_returned = record.num_returned
        self._lost: dict[str, Incarnation] = dict(record.lost)
        self.returning = Returning(record.went_back)
        self._holders: dict[str, Holder] = {}
        for lease in sorted(leases, key=lambda x: x.lease_id):
            holder = self._holders.setdefault(
                lease.learner_id, Holder(incarnation=lease.incarnation)
            )
            where = DataRange(lease.epoch, lease.start, lease.stop)
            holder.leases[lease.lease_id] = OpenLease(
                lease=DataLease(lease_id=lease.lease_id, where=where), merged_to=lease.merged_to
            )

    # -- handing out -----------------------------------------------------------------------------

    def grant(self, learner_id: str, incarnation: Incarnation, request_id: str) -> DataLease | None:
        """Leases the next range; a repeated request gets the same lease again.

        Returns:
            None where this incarnation has so many ranges that it is to train on them first.
        """
        holder = self._holder(learner_id, incarnation)
        known = holder.requests.get(request_id)
        if known is not None:
            return known
        num_open = len(holder.leases)
        if holder.num_untrained >= MAX_UNTRAINED_LEASES or num_open >= MAX_OPEN_LEASES:
            return None
        above = num_open - _USUAL_LEASES
        length = self._lease_length << (above // _DOUBLED_EVERY + 1 if above >= 0 else 0)
        lease = DataLease(lease_id=self._next_lease_id, where=self._free.take(length))
        self._open(holder, lease)
        holder.answered(request_id, lease)
        return lease

    def is_full(self, learner_id: str, incarnation: Incarnation) -> bool:
        """Whether an incarnation gets nothing more, however much it trains."""
        holder = self._holders.get(learner_id)
        if holder is None or holder.incarnation != incarnation:
            return False
        return len(holder.leases) >= MAX_OPEN_LEASES

    def _open(self, holder: Holder, lease: DataLease) -> None:
        holder.leases[lease.lease_id] = OpenLease(lease=lease, merged_to=lease.where.start)
        self._next_lease_id = max(self._next_lease_id, lease.lease_id + 1)

    def _holder(self, learner_id: str, incarnation: Incarnation) -> Holder:
        holder = self._holders.get(learner_id)
        if holder is None or holder.incarnation != incarnation:
            assert holder is None or not holder.leases, "moved or given back at the join"
            holder = self._holders[learner_id] = Holder(incarnation=incarnation)
        return holder

    # -- progress --------------------------------------------------------------------------------

    def reported(
        self,
        learner_id: str,
        incarnation: Incarnation,
        *,
        local_step: int,
        lease_id: int,
        position: int,
    ) -> None:
        """A holder says how far it has trained at a local step; what cannot be is left out."""
        holder = self._holders.get(learner_id)
        if holder is not None and holder.incarnation == incarnation:
            holder.mark(local_step, lease_id, position)

    def committed(
        self, contributions: Iterable[ContributionRecord], fragment: int, num_fragments: int
    ) -> tuple[DataRange, ...]:
        """A round is being committed with these contributions.

        Returns:
            The ranges that are merged into every fragment from now on.
        """
        for item in contributions:
            holder = self._holders.get(item.learner_id)
            if holder is not None and holder.incarnation == item.incarnation:
                before = holder.contributed.get(fragment, 0)
                holder.contributed[fragment] = max(before, item.local_step)
        merged: list[DataRange] = []
        for _, holder in sorted(self._holders.items()):
            if len(holder.contributed) == num_fragments and holder.leases:
                merged += holder.roll()
        self._num_merged += sum(x.num_samples for x in merged)
        return tuple(merged)

    # -- going back ------------------------------------------------------------------------------

    def went_back(self, snapshot: str, term: int, participants: Mapping[str, Incarnation]) -> None:
        """The run goes back to a snapshot whose record this book is made of.

        What others had on lease at the cut is free again.

        Args:
            snapshot: its name.
            term: the first term after it.
            participants: incarnation at the cut of every learner in it.
        """
        for learner_id, holder in self._holders.items():
            if participants.get(learner_id) != holder.incarnation:
                self._return(holder, list(holder.leases))
        self.returning.begin(snapshot, term, participants)

    # -- the end of a holder ---------------------------------------------------------------------

    def holders(self) -> list[str]:
        """Ids of learners that have leases that are not merged."""
        return [learner_id for learner_id, holder in self._holders.items() if holder.leases]

    def give_back(self, learner_id: str, incarnation: Incarnation) -> int:
        """Takes back what an incarnation has not merged; returns how many samples that was.

        From then on this incarnation has lost its leases: nothing of it may be merged any more.
        """
        holder = self._holders.get(learner_id)
        if holder is None or holder.incarnation != incarnation or not holder.leases:
            return 0
        self._lost[learner_id] = incarnation
        self.returning.settled(learner_id)
        return self._return(holder, list(holder.leases))

    def _return(self, holder: Holder, lease_ids: Iterable[int]) -> int:
        num_samples = 0
        for lease_id in lease_ids:
            rest = holder.leases.pop(lease_id).rest
            self._free.give(rest)
            num_samples += rest.num_samples
        self._num_returned += num_samples
        return num_samples

    def why_lost(
        self,
        learner_id: str,
        previous: Incarnation | None,
        current: Incarnation | None,
        claims: Sequence[DataLease],
        *,
        may_claim: bool,
        has_missed: bool = False,
        snapshot: str = "",
    ) -> str | None:
        """Why a process that joins again has lost the leases it claims; None where it has not.

        Args:
            learner_id: its id.
            previous: the incarnation under which it got them.
            current: newest incarnation known of this id; None where it is unknown.
            claims: the leases; all that are not known to be merged, and the one in use.
            may_claim: True while leases that were handed out after the last record are claimed.
            has_missed: True where what it got after the last record of its term may have gone to
                another one, and be merged.
            snapshot: the snapshot whose part the process goes on from; empty where from none.
        """
        if not claims:
            return None
        is_older = previous is not None and current is not None and previous < current
        if previous is None or (is_older and not snapshot):
            return "another process has this learner id since"
        why = self.returning.why_not(learner_id, previous, snapshot)
        if why is not None:
            return why
        if self._lost.get(learner_id) == previous:
            return "it was silent for too long, or held too much that was not merged"
        own = self._holders.get(learner_id)
        own_leases = own.leases if own is not None and own.incarnation <= previous else {}
        others = self._rests_of_others(learner_id, previous)
        for claim in claims:
            known = own_leases.get(claim.lease_id)
            if known is not None and known.lease.where != claim.where:
                return f"lease {claim.lease_id} is of another range"
            if known is None:
                why = self._why_not(others, claim, may_claim, has_missed)
                if why is not None:
                    return why
        return None

    def _rests_of_others(self, learner_id: str, previous: Incarnation) -> list[DataRange]:
        """What is on lease to others and not merged, in order."""
        return sorted(
            x.rest
            for name, holder in self._holders.items()
            if name != learner_id or holder.incarnation > previous
            for x in holder.leases.values()
        )

    def _why_not(
        self, rests: Sequence[DataRange], claim: DataLease, may_claim: bool, has_missed: bool
    ) -> str | None:
        """Why a lease that the book does not have cannot be claimed; None where it can.

        What is neither free nor on lease is merged: its holder need not know, where none but the
        holder can have had it.
        """
        first, last = overlapping(rests, claim.where)
        if first < last:
            return f"another learner has a part of lease {claim.lease_id}"
        free = self._free.common(claim.where)
        if has_missed and free != [claim.where]:
            return f"lease {claim.lease_id} may have been handed out again, and merged"
        if not free:
            return None
        ahead = claim.lease_id - self._next_lease_id
        longest = self._lease_length << _MOST_DOUBLED
        longest = min(longest, self._length) if self._length else longest
        is_within = not self._length or claim.where.stop <= self._length
        is_near = ahead < MAX_CLAIM_AHEAD and claim.where.num_samples <= longest and is_within
        is_near = is_near and self._free.ahead(claim.where) <= MAX_CLAIM_AHEAD * longest
        if may_claim and is_near and len(free) == 1:
            return None
        return f"lease {claim.lease_id} is not known here"

    def joined(
        self,
        learner_id: str,
        incarnation: Incarnation,
        previous: Incarnation | None,
        claims: Sequence[DataLease],
    ) -> int:
        """A new incarnation joins: it goes on with the leases that it claims (see ``why_lost``).

        Every other lease of its id is given back. Leases that it has used up need not be claimed:
        those before the newest claim stay with it.

        Returns:
            How many samples were given back.
        """
        before = self._holders.pop(learner_id, None)
        self._lost.pop(learner_id, None)
        self.returning.settled(learner_id)
        newest = max((x.lease_id for x in claims), default=0)
        num_returned = 0
        holder = Holder(incarnation=incarnation, in_use=newest)
        if before is not None:
            # Of a life before the previous one only what is claimed is known to be its own.
            claimed = {x.lease_id for x in claims} if previous is not None else set()
            kept = before.incarnation == previous
            is_older = previous is not None and before.incarnation < previous
            lost = [
                x for x in before.leases if x > newest or not (kept or (is_older and x in claimed))
            ]
            num_returned = self._return(before, lost)
            holder.leases = before.leases
        for claim in sorted(claims, key=lambda x: x.lease_id):
            if claim.lease_id in holder.leases:
                continue
            for free in self._free.common(claim.where):
                self._free.carve(free)
                self._open(holder, DataLease(lease_id=claim.lease_id, where=free))
        holder.leases = dict(sorted(holder.leases.items()))
        if holder.leases:
            self._holders[learner_id] = holder
        return num_returned

    # -- what there is ---------------------------------------------------------------------------

    @property
    def record(self) -> DataRecord:
        """Where the data stands, for a round record."""
        epoch, position = self._free.fresh
        return DataRecord(
            length=self._length,
            epoch=epoch,
            position=position,
            next_lease_id=self._next_lease_id,
            num_merged=self._num_merged,
            num_returned=self._num_returned,
            returned=self._free.returned,
            lost=dict(self._lost),
            went_back=self.returning.record,
        )

    @property
    def leases(self) -> tuple[LeaseRecord, ...]:
        """The leases that are not merged, for a round record."""
        return tuple(
            LeaseRecord(
                learner_id=learner_id,
                incarnation=holder.incarnation,
                lease_id=x.lease.lease_id,
                epoch=x.lease.where.epoch,
                start=x.lease.where.start,
                stop=x.lease.where.stop,
                merged_to=x.merged_to,
            )
            for learner_id, holder in sorted(self._holders.items())
            for x in holder.leases.values()
        )

    @property
    def totals(self) -> DataTotals:
        """Where the data stands, in samples."""
        epoch, position = self._free.fresh
        holders = self._holders.values()
        return DataTotals(
            length=self._length,
            issued=epoch * self._length + position,
            merged=self._num_merged,
            leased=sum(x.rest.num_samples for h in holders for x in h.leases.values()),
            free=sum(x.num_samples for x in self._free.returned),
            returned=self._num_returned,
        )

    def positions(self) -> Mapping[str, tuple[int, int]]:
        """By learner id: position reported last in the lease in use, and where that ends."""
        found = {}
        for learner_id, holder in self._holders.items():
            if not holder.leases:
                continue
            lease_id, position = holder.marks[-1][1:] if holder.marks else (0, 0)
            in_use = holder.leases.get(lease_id) or next(iter(holder.leases.values()))
            where = in_use.lease.where
            found[learner_id] = (min(max(position, where.start), where.stop), where.stop)
        return found
