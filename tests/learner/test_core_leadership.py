"""Who leads, as far as was heard, and when to ask: pure, fed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner_client.core.leadership import MAX_LEARNT, Answer, Leadership, Stall

A, B, C = "a:1", "b:2", "c:3"


def leads(address: str, term: int) -> Answer:
    return Answer(address=address, leads=True, term=term)


def follows(address: str, term: int) -> Answer:
    return Answer(address=address, follows=True, term=term)


def silent(address: str) -> Answer:
    return Answer(address=address)


def joined_at(address: str, term: int) -> Leadership:
    leadership = Leadership((A, B, C))
    leadership.chosen(leads(address, term))
    leadership.joined(term)
    return leadership


# -- whom to follow ------------------------------------------------------------------------


def test_the_highest_term_counts_not_the_order_of_the_addresses():
    leadership = Leadership((A, B, C))
    assert leadership.choose([leads(A, 1), leads(B, 3), leads(C, 2)]).address == B
    assert leadership.highest == 3


def test_a_term_that_a_follower_has_heard_of_rules_out_earlier_ones():
    leadership = Leadership((A, B))
    assert leadership.choose([leads(A, 1), follows(B, 2)]) is None
    assert leadership.choose([leads(A, 1), silent(B)]) is None, "it is remembered"
    assert leadership.choose([silent(A), leads(B, 2)]).address == B


def test_of_two_that_claim_the_same_term_the_current_one_stays_else_the_first_counts():
    assert joined_at(B, 2).choose([leads(A, 2), leads(B, 2)]).address == B
    assert joined_at(C, 1).choose([leads(A, 2), leads(B, 2), silent(C)]).address == A


def test_one_that_declined_comes_after_another_that_claims_the_same_term():
    leadership = joined_at(B, 2)
    leadership.declined()
    answers = [leads(A, 2), leads(B, 2)]
    assert leadership.choose(answers).address == A
    assert leadership.choose([silent(A), leads(B, 2)]).address == B, "though it is not ruled out"
    leadership.joined(2)
    assert leadership.choose(answers).address == B


def test_nothing_new_is_no_reason_to_leave():
    leadership = joined_at(A, 2)
    assert leadership.stays([leads(A, 2), follows(B, 2), silent(C)])
    assert leadership.stays([silent(A), leads(B, 1), leads(C, 2)])


@pytest.mark.parametrize(
    "answers",
    [
        [leads(A, 2), leads(B, 3)],
        [leads(A, 2), follows(B, 3)],
        [leads(A, 3), silent(B)],
        [follows(A, 2), silent(B)],
    ],
)
def test_left_is_whoever_leads_an_earlier_term_or_says_that_it_does_not_lead(answers):
    assert not joined_at(A, 2).stays(answers)


def test_a_forged_claim_is_forgotten_down_to_who_was_joined():
    leadership = joined_at(A, 2)
    leadership.heard(99)
    assert leadership.choose([leads(A, 2)]) is None
    leadership.disowned()
    assert leadership.choose([leads(A, 2)]).address == A


TERMS = st.integers(0, 4)
ANSWERS = st.fixed_dictionaries(
    {}, optional={a: st.tuples(st.sampled_from("LFS"), TERMS) for a in (A, B, C)}
)


@given(st.lists(st.tuples(ANSWERS, st.booleans()), max_size=12))
def test_a_term_once_obeyed_or_heard_of_is_never_gone_below(rounds):
    """Against a dumb reference: the maximum of everything said so far."""
    leadership, said = Leadership((A, B, C)), 0
    for answers, is_lost in rounds:
        told = [
            Answer(address=a, leads=kind == "L", follows=kind == "F", term=0 if kind == "S" else t)
            for a, (kind, t) in answers.items()
        ]
        said = max([said, *(a.term for a in told)])
        if is_lost:
            best = leadership.choose(told)
            able = [a for a in told if a.leads and a.term == said]
            assert (best is not None) == bool(able)
            if best is not None:
                assert best in able
                leadership.chosen(best)
                leadership.joined(best.term)
        else:
            own = [a for a in told if a.address == leadership.current and a.follows]
            assert leadership.stays(told) == (leadership.term == said and not own)
        assert leadership.highest == said


# -- addresses -----------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 40), max_size=100), max_size=8), st.integers(0, 7))
def test_addresses_are_bounded_unique_and_those_of_the_settings_stay(batches, follow_at):
    leadership = Leadership((A, B, A))
    for index, batch in enumerate(batches):
        leadership.learnt(f"h{n}:1" for n in batch)
        if index == follow_at:
            leadership.chosen(leads(leadership.addresses[-1], 1))
        known = leadership.addresses
        assert known[:2] == (A, B)
        assert len(known) == len(set(known)) <= 2 + MAX_LEARNT
        assert leadership.current in known, "who is followed is never forgotten"
        assert {f"h{n}:1" for n in batch[: MAX_LEARNT - 1]} <= set(known)


def test_a_hostile_number_of_addresses_is_read_only_at_its_beginning():
    leadership, num_read = Leadership((A,)), 0

    def endless():
        nonlocal num_read
        while True:
            num_read += 1
            yield f"h{num_read}:1"

    leadership.learnt(endless())
    assert len(leadership.addresses) == 1 + MAX_LEARNT
    assert num_read < 100


# -- when to ask ---------------------------------------------------------------------------


def test_others_are_asked_after_three_leases_without_a_version_and_again_after_three_more():
    stall = Stall(2.0)
    due = [t for t in range(20) if stall.is_due(float(t), online=True, num_versions=0)]
    assert due == [6, 12, 18]


def test_only_time_online_counts_and_every_version_starts_anew():
    stall = Stall(1.0)
    assert not any(stall.is_due(float(t), online=False, num_versions=0) for t in range(100))
    assert not any(stall.is_due(100.0 + t, online=True, num_versions=t) for t in range(100))
    assert not stall.is_due(201.0, online=True, num_versions=99)
    assert stall.is_due(202.5, online=True, num_versions=99)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.booleans(), st.booleans()), max_size=60),
    st.integers(1, 4),
)
def test_when_to_ask_is_as_counted_by_hand(ticks, lease):
    stall, now, num, waited = Stall(float(lease)), 0, 0, 0
    assert not stall.is_due(0.0, online=True, num_versions=0)
    for seconds, online, is_new in ticks:
        now, num = now + seconds, num + is_new
        waited = 0 if is_new else waited + seconds * online
        is_due = waited >= 3 * lease
        assert stall.is_due(float(now), online=online, num_versions=num) == is_due
        waited = 0 if is_due else waited
