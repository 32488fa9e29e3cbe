"""Data leases of who trains on without merges, and of a run that went back: nobody is stuck."""

from __future__ import annotations

from leases_kit import ONE, TWO, grant, reloaded

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.data_records import (
    DataRange,
)
from synchronizer_server.core.leases import (
    MAX_OPEN_LEASES,
    MAX_UNTRAINED_LEASES,
    DataLease,
    DataLeases,
)


def test_who_has_much_to_train_on_gets_more_once_it_says_that_it_has_trained():
    book = DataLeases(length=0, lease_length=1)
    for _ in range(MAX_UNTRAINED_LEASES):
        newest = grant(book, "a")
    assert book.grant("a", ONE, "more") is None
    assert not book.is_full("a", ONE), "it waits for its own steps, not for merges"
    assert book.grant("b", ONE, "more") is not None
    book.reported("a", ONE, local_step=1, lease_id=newest.lease_id, position=newest.where.stop)
    assert book.grant("a", ONE, "more") is not None


def train_alone(book: DataLeases, num_leases: int) -> list[DataLease]:
    """A learner that trains, and of which nothing is merged."""
    held = []
    for step in range(1, num_leases + 1):
        lease = grant(book, "a")
        held.append(lease)
        book.reported("a", ONE, local_step=step, lease_id=lease.lease_id, position=lease.where.stop)
    return held


def test_a_learner_of_which_nothing_is_merged_gets_longer_leases_and_goes_on():
    book = DataLeases(length=0, lease_length=2)
    held = train_alone(book, MAX_OPEN_LEASES)
    lengths = [x.where.num_samples for x in held]
    assert set(lengths[:MAX_UNTRAINED_LEASES]) == {2}, "as set, for what a cycle of merges needs"
    assert lengths == sorted(lengths)
    assert sum(lengths) > 64 * MAX_OPEN_LEASES, "a bounded number is enough for very long"
    assert book.grant("a", ONE, "more") is None
    assert book.is_full("a", ONE)
    assert not book.is_full("a", TWO)


def test_a_process_that_joins_again_with_all_leases_used_up_gets_more():
    """Nothing of it is merged before it has taken another step."""
    book = DataLeases(length=0, lease_length=1)
    claims = train_alone(book, MAX_UNTRAINED_LEASES + 10)
    again = reloaded(book, length=0, lease_length=1)
    assert again.why_lost("a", ONE, ONE, claims, may_claim=True) is None
    again.joined("a", TWO, ONE, claims)
    assert again.grant("a", TWO, "more") is not None


def test_a_long_lease_of_after_the_last_record_is_claimed_as_any():
    book = DataLeases(length=0, lease_length=1)
    train_alone(book, MAX_UNTRAINED_LEASES + 200)
    again = reloaded(book, length=0, lease_length=1)
    late = grant(book, "a")
    assert late.where.num_samples > 1
    assert again.why_lost("a", ONE, ONE, [late], may_claim=True) is None


def test_a_process_that_joined_again_since_the_last_record_keeps_what_it_claims():
    book = DataLeases(length=40, lease_length=4)
    first, second = grant(book, "a"), grant(book, "a")
    again = reloaded(book, length=40, lease_length=4)
    assert again.why_lost("a", TWO, TWO, [first], may_claim=True) is None
    again.joined("a", Incarnation(2, 3), TWO, [first])
    assert [x.lease_id for x in again.leases] == [first.lease_id]
    assert again.record.returned == (second.where,)


def back_at_the_cut(**participants: Incarnation) -> tuple[DataLeases, DataLease, DataLease]:
    """A run that went back to a snapshot; ``a`` and ``b`` had a lease each at the cut."""
    book = DataLeases(length=40, lease_length=4)
    leases = grant(book, "a"), grant(book, "b")
    book.went_back("1.7", 2, participants)
    return reloaded(book, length=40, lease_length=4), *leases


def why_lost(book: DataLeases, held: DataLease, previous: Incarnation, snapshot: str = "",
             current: Incarnation = ONE) -> str:  # fmt: skip
    why = book.why_lost("a", previous, current, [held], may_claim=True, snapshot=snapshot)
    return why or ""


def test_after_going_back_a_learner_goes_on_from_its_part_alone():
    book, held, _ = back_at_the_cut(a=ONE, b=ONE)
    later = Incarnation(1, 9)
    assert why_lost(book, held, ONE, "1.7") == ""
    assert why_lost(book, held, ONE, "1.7", current=later) == "", "that life is undone"
    assert "went back" in why_lost(book, held, ONE)
    assert "went back" in why_lost(book, held, later, current=later)
    assert "has not gone back" in why_lost(book, held, ONE, "1.8")
    assert "has served" in why_lost(book, held, later, "1.7")
    book.joined("a", Incarnation(2, 2), ONE, [held])
    assert "has served" in why_lost(book, held, ONE, "1.7")
    assert book.returning.awaited == ("b",)


def test_after_going_back_what_others_had_is_free_and_may_be_in_a_part():
    """It died, and its lease went to one who had not recorded its part yet."""
    book, held, of_dead = back_at_the_cut(a=ONE)
    assert book.record.returned == (of_dead.where,)
    again = DataLease(lease_id=3, where=of_dead.where)
    assert why_lost(book, again, ONE, "1.7") == ""
    assert book.joined("a", Incarnation(2, 2), ONE, [held, again]) == 0
    assert [x.lease_id for x in book.leases] == [held.lease_id, 3]
    assert book.record.returned == ()


def test_a_part_that_comes_after_its_leases_were_given_back_has_lost_them():
    book, held, _ = back_at_the_cut(a=ONE, b=ONE)
    assert book.give_back("a", ONE) == held.where.num_samples
    assert "too late" in why_lost(book, held, ONE, "1.7")
    assert book.record.returned == (DataRange(0, 0, 4),)
