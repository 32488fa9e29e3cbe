"""The learner's pure core, fed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Version
from learner_client.core.counters import Counters, Totals
from learner_client.core.due import DueFragments
from learner_client.core.learner_core import AnswerDecline, AnswerPush, LearnerCore, PullRequest

P = 4


def version(global_step: int, term: int = 1) -> Version:
    return Version(term, global_step, bytes([global_step % 256]) * 32)


def make_core(**changes) -> LearnerCore:
    core = LearnerCore(num_fragments=P, overlap=1, **changes)
    core.joined(term=1, local_step=0, global_step=0)
    for fragment in range(P):
        core.applied(fragment, version(0))
    return core


def pull(fragment: int, global_step: int = 1, term: int = 1, group: int = 0) -> PullRequest:
    return PullRequest(term=term, group=group, global_step=global_step, fragment=fragment)


def copy(core: LearnerCore, fragment: int):
    stamp = core.stamp(fragment)
    core.copied(stamp)
    return stamp


# -- counters ------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(0, 1000), max_size=30),
    resets=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 30)), max_size=8),
)
def test_counters_run_from_the_latest_reset_in_whatever_order_resets_become_known(tokens, resets):
    """``resets``: (step at which it becomes known, step at which it was), known ones only."""
    counters, history = Counters(1), [Totals()]
    origin = 0
    for now, num_tokens in enumerate(tokens, start=1):
        counters.count(num_tokens)
        history.append(counters.totals)
        for known, was in resets:
            if known == now and was <= now:
                counters.reset(0, history[was])
                origin = max(origin, was)
    found = counters.of(0)
    assert found.num_steps == len(tokens) - origin
    assert found.num_tokens == sum(tokens[origin:])


@given(st.permutations([0, 3, 5, 7]))
def test_resets_commute(order):
    counters, history = Counters(1), [Totals()]
    for num_tokens in range(8):
        counters.count(num_tokens)
        history.append(counters.totals)
    for step in order:
        counters.reset(0, history[step])
    assert counters.of(0) == Totals(num_steps=1, num_tokens=7)


def test_a_reset_of_one_fragment_leaves_the_others():
    counters = Counters(2)
    counters.count(5)
    counters.reset(1)
    counters.count(6)
    assert counters.of(0) == Totals(num_steps=2, num_tokens=11)
    assert counters.of(1) == Totals(num_steps=1, num_tokens=6)


# -- due fragments -------------------------------------------------------------------------


def test_without_a_schedule_the_next_ones_after_the_last_heard_are_due():
    due = DueFragments(4, 2)
    assert due.now() == (1, 2, 3)
    due.heard(6)
    assert due.now() == (3, 0, 1)


def test_a_schedule_is_followed_until_a_newer_step_is_heard():
    due = DueFragments(8, 1)
    due.scheduled(3, [6, 2, 6, 99, -1])
    assert due.now() == (6, 2)
    due.heard(3)
    assert due.now() == (6, 2)
    due.heard(4)
    assert due.now() == (5, 6)


def test_a_new_term_may_start_earlier():
    due = DueFragments(4, 1)
    due.heard(9)
    due.rewound(5)
    assert due.now() == (2, 3)


@given(st.integers(1, 12), st.integers(0, 20), st.integers(0, 1000))
def test_due_fragments_exist_and_come_once(num_fragments, overlap, global_step):
    due = DueFragments(num_fragments, overlap)
    due.heard(global_step)
    found = due.now()
    assert len(set(found)) == len(found) == min(overlap + 1, num_fragments)
    assert set(found) <= set(range(num_fragments))
    assert found[0] == (global_step + 1) % num_fragments


# -- pulls ---------------------------------------------------------------------------------


def test_a_pull_is_answered_from_the_newest_copy_with_its_counters():
    core = make_core()
    core.count(10)
    copy(core, 1)
    core.count(20)
    newest = copy(core, 1)
    core.count(40)
    answer = core.pull(pull(1))
    assert isinstance(answer, AnswerPush)
    assert answer.stamp is newest
    assert answer.counters == Totals(num_steps=2, num_tokens=30)
    assert newest.local_step == 2
    assert newest.base == version(0)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pull(2), Reason.NOT_READY),
        (pull(1, term=2), Reason.STALE_TERM),
        (pull(P), Reason.UNKNOWN_FRAGMENT),
        (pull(-1), Reason.UNKNOWN_FRAGMENT),
        (pull(1, group=1), Reason.UNKNOWN_FRAGMENT),
    ],
)
def test_a_pull_that_cannot_be_met_is_declined(request_, reason):
    core = make_core()
    core.count(1)
    copy(core, 1)
    assert core.pull(request_) == AnswerDecline(pull=request_, reason=reason)


def test_an_update_makes_the_copy_before_it_useless():
    core = make_core()
    core.count(1)
    copy(core, 1)
    core.count(1)
    core.applied(1, version(1))
    assert core.pull(pull(1)) == AnswerDecline(pull=pull(1), reason=Reason.NOT_READY)
    assert 1 not in core.to_copy(), "nothing was trained since"
    core.count(1)
    copy(core, 1)
    answer = core.pull(pull(1))
    assert isinstance(answer, AnswerPush)
    assert answer.counters.num_steps == 1
    assert answer.stamp.base == version(1)


def test_what_was_accepted_is_not_counted_again():
    core = make_core()
    core.count(10)
    stamp = copy(core, 1)
    core.count(20)
    later = copy(core, 1)
    core.accepted(stamp)
    answer = core.pull(pull(1))
    assert isinstance(answer, AnswerPush)
    assert answer.stamp is later
    assert answer.counters == Totals(num_steps=1, num_tokens=20)
    core.accepted(later)
    assert core.pull(pull(1)) == AnswerDecline(pull=pull(1), reason=Reason.NOT_READY)


def test_an_acceptance_that_comes_after_the_update_changes_nothing():
    core = make_core()
    core.count(10)
    stamp = copy(core, 1)
    core.count(10)
    core.applied(1, version(1))
    core.count(10)
    core.accepted(stamp)
    assert core.counters.of(1) == Totals(num_steps=1, num_tokens=10)


@given(st.data())
def test_acceptances_and_updates_lead_to_one_state_in_any_order(data):
    """Both are facts about the past: only which of them is later counts."""
    accepted_at = data.draw(st.lists(st.integers(1, 6), max_size=4))
    order = data.draw(st.permutations(accepted_at))
    states = []
    for sequence in (accepted_at, order):
        core = make_core()
        stamps = {}
        for step in range(1, 7):
            core.count(step)
            stamps[step] = core.stamp(2)
        for step in sequence:
            core.accepted(stamps[step])
        states.append([core.counters.of(p) for p in range(P)])
    assert states[0] == states[1]


def test_only_due_fragments_that_were_trained_are_copied():
    core = make_core()
    assert core.to_copy() == ()
    core.count(1)
    assert core.to_copy() == (1, 2)
    core.due.scheduled(0, [3])
    assert core.to_copy() == (3,)


# -- versions and steps --------------------------------------------------------------------


def test_the_global_step_is_adopted_by_term_then_number():
    core = make_core()
    core.applied(1, version(9))
    core.applied(2, version(6))
    assert core.global_step == 9
    core.applied(3, version(7, term=2))
    assert core.global_step == 7, "a later term decides, though its number is lower"
    assert core.known_global_steps == (0, 9, 6, 7)


def test_no_version_vector_before_all_fragments_have_one():
    core = LearnerCore(num_fragments=2, overlap=1)
    core.applied(0, version(0))
    assert core.known_global_steps == ()


def test_the_local_step_goes_on_from_the_join_and_never_back():
    core = LearnerCore(num_fragments=2, overlap=1)
    core.joined(term=1, local_step=40, global_step=3)
    core.count(1)
    core.joined(term=1, local_step=7, global_step=3)
    assert core.local_step == 41


def test_a_report_is_taken_once():
    core = make_core()
    core.count(3)
    core.report(num_tokens=3, loss=1.0, step_s=0.1, overhead_s=0.0)
    taken = core.take_report()
    assert taken is not None
    assert taken.num_tokens == 3
    assert core.take_report() is None


def test_a_report_that_could_not_be_sent_goes_with_the_next_one():
    core = make_core()
    core.count(3)
    core.report(num_tokens=3, loss=1.0, step_s=0.1, overhead_s=0.0)
    taken = core.take_report()
    assert taken is not None
    core.count(4)
    core.report(num_tokens=4, loss=None, step_s=0.3, overhead_s=0.0)
    core.give_back(taken)
    both = core.take_report()
    assert both is not None
    assert (both.num_steps, both.num_tokens, both.local_step, both.loss) == (2, 7, 2, 1.0)
    core.give_back(both)
    assert core.take_report() == both


def test_what_a_take_over_lost_does_not_hide_what_is_asked_for():
    """Round 2 was published in term 1 and is lost: term 2 begins at round 1 and asks for it."""
    core = make_core()
    core.applied(1, version(1))
    core.joined(term=2, local_step=0, global_step=1)
    core.applied(2, version(2))  # was on its way when the leader was lost
    core.due.scheduled(1, (2,))
    assert core.due.now() == (2,)
    core.applied(2, version(0))
    core.due.scheduled(1, (2,))
    assert core.due.now() == (2,)
    core.applied(2, version(2, term=2))
    assert core.due.now() == (3, 0)
