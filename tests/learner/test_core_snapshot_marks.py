"""Which cut a learner records, and what of its counters belongs to it: by clocks alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from decoupled_diloco.versions import Version
from learner_client.core.counters import Counters, Totals
from learner_client.core.snapshots import SnapshotMarks


def marks(term: int = 3, cut: int = 0) -> SnapshotMarks:
    made = SnapshotMarks()
    made.joined(term, cut)
    return made


def version(term: int, global_step: int) -> Version:
    return Version(term, global_step, b"x" * 32)


def test_the_first_clock_with_a_newer_cut_is_the_marker_and_later_ones_are_none():
    m = marks()
    m.heard(3, 0)
    assert m.due == 0
    m.heard(3, 40)
    assert m.due == 40
    m.captured()
    m.heard(3, 40)
    m.heard(3, 30)
    assert m.due == 0
    assert m.recorded == 0, "captured is not written"
    m.written(3, 40)
    assert m.recorded == 40
    m.heard(3, 50)
    assert (m.due, m.recorded) == (50, 40)


def test_a_cut_of_another_term_or_from_before_the_join_is_none_of_ours():
    m = marks(3, cut=40)
    m.heard(3, 40)
    m.heard(2, 90)
    m.heard(4, 90)
    assert m.due == 0
    m.heard(3, 41)
    assert m.due == 41


def test_a_new_term_abandons_what_was_pending_and_counts_its_cuts_anew():
    m = marks()
    m.heard(3, 40)
    m.joined(4, 0)
    assert m.due == 0
    m.written(3, 40)
    assert m.recorded == 0
    m.heard(4, 40)
    assert m.due == 40, "the same step on another lineage"
    m.written(4, 40)
    m.joined(4, 40)
    assert m.recorded == 40, "joining again in one term forgets nothing"


def test_what_is_over_is_not_recorded_any_more():
    m = marks()
    m.heard(3, 40)
    m.over(40)
    assert m.due == 0
    m.over(60)
    m.heard(3, 60)
    assert m.due == 0, "the notice was faster than the clock"


def test_an_update_above_the_cut_ends_the_chance_to_record_it():
    m = marks()
    m.heard(3, 40)
    for below in (version(3, 40), version(3, 7), version(2, 900)):
        assert not m.is_beyond(below)
        m.applied(below)
    assert m.due == 40
    for above in (version(3, 41), version(4, 1)):
        assert m.is_beyond(above)
    m.applied(version(3, 41))
    assert m.due == 0
    assert not m.is_beyond(version(3, 41)), "with nothing due, nothing is held back"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.integers(0, 50)),
        st.tuples(st.just("applied"), st.integers(0, 2)),
        st.tuples(st.just("copy"), st.integers(0, 2)),
        st.tuples(st.just("accepted"), st.integers(0, 2)),
    ),
    max_size=60,
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(STEPS)
def test_undoing_acceptances_is_as_if_nothing_had_been_accepted_since_the_last_update(steps):
    ours, never = Counters(3), Counters(3)
    copies: dict[int, Totals] = {}
    for what, value in steps:
        if what == "count":
            ours.count(value)
            never.count(value)
        elif what == "applied":
            ours.applied(value)
            never.applied(value)
            copies.pop(value, None)
        elif what == "copy":
            copies[value] = ours.totals
        elif value in copies:
            ours.reset(value, copies[value])
    undone = ours.without_acceptances()
    assert undone.totals == never.totals
    assert undone.origins == never.origins == undone.applied_origins
    for p in range(3):
        assert undone.of(p).num_steps >= ours.of(p).num_steps
