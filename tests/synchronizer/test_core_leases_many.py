"""Thousands of leases, and joiners that ask about a thousand: searched, never walked through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.data_records import DataLease, DataRange, DataRecord
from synchronizer_server.core.free_ranges import FreeRanges
from synchronizer_server.core.leases import MAX_UNTRAINED_LEASES, DataLeases

LIFE = Incarnation(1, 1)
NUM_MERGED = 10_000


def test_a_joiner_with_a_thousand_claims_costs_no_walk_through_all_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claims of what is merged already are let pass, so all of them are looked at, on the loop."""
    merged = DataRecord(position=NUM_MERGED, next_lease_id=2, num_merged=NUM_MERGED)
    book = DataLeases(length=0, lease_length=10, record=merged)
    for i in range(8 * MAX_UNTRAINED_LEASES):
        assert book.grant(f"learner-{i % 8}", LIFE, f"request-{i}") is not None
    for i in range(0, 8, 2):
        assert book.give_back(f"learner-{i}", LIFE)
    num_compared = 0
    common = DataRange.common

    def counted(self: DataRange, other: DataRange) -> DataRange | None:
        nonlocal num_compared
        num_compared += 1
        return common(self, other)

    monkeypatch.setattr(DataRange, "common", counted)
    claims = [DataLease(lease_id=i, where=DataRange(0, i, i + 1)) for i in range(1, 1025)]
    assert book.why_lost("late", LIFE, None, claims, may_claim=True) is None
    assert book.joined("late", Incarnation(1, 2), LIFE, claims) == 0
    assert num_compared < 10 * len(claims)


def test_one_of_many_leases_of_others_is_found() -> None:
    """Wherever a claim touches what another learner has, it is refused."""
    book = DataLeases(length=0, lease_length=10)
    for i in range(100):
        book.grant(f"learner-{i % 4}", LIFE, f"request-{i}")
    for start in (0, 5, 9, 495, 989, 999):
        claim = DataLease(lease_id=7, where=DataRange(0, start, start + 1))
        why = book.why_lost("late", LIFE, None, [claim], may_claim=True)
        assert why == "another learner has a part of lease 7", start


@given(
    st.lists(st.integers(0, 59), unique=True),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 29), st.integers(1, 12)), max_size=8),
)
def test_free_positions_agree_with_a_set(given_back: list[int], wanted: list[tuple[int, int, int]]):
    """What is given back, found and carved out is what a set of positions says."""
    free = FreeRanges(30, epoch=2, position=0, returned=())
    positions = {divmod(x, 30) for x in given_back}
    for epoch, start in (divmod(x, 30) for x in given_back):
        free.give(DataRange(epoch, start, start + 1))
    for epoch, start, num in wanted:
        where = DataRange(epoch, start, min(start + num, 30))
        found = {(epoch, x) for part in free.common(where) for x in range(part.start, part.stop)}
        assert found == {x for x in positions if x[0] == epoch and where.start <= x[1] < where.stop}
        free.carve(where)
        positions -= found
        returned = free.returned
        assert {(x.epoch, y) for x in returned for y in range(x.start, x.stop)} == positions
        assert all((a.epoch, a.stop) < (b.epoch, b.start) for a, b in itertools.pairwise(returned))
