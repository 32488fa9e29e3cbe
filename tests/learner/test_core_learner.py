"""The learner's pure core, fed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Version
from learner_client.core.connection import TRANSITIONS, Connection, Event, State
from learner_client.core.counters import Counters, Totals
from learner_client.core.due import DueFragments
from learner_client.core.learner_core import AnswerDecline, AnswerPush, LearnerCore, PullRequest
from learner_client.core.pending import PendingUpdates
from learner_client.core.reports import StepReport, merge_reports
from learner_client.core.retry import Backoff, is_fatal

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


# -- pending updates -----------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers()), max_size=30))
def test_taking_pending_updates_ends_as_applying_all_in_order(offers):
    pending: PendingUpdates[tuple[int, int]] = PendingUpdates()
    expected: dict[int, int] = {}
    for fragment, value in offers:
        pending.offer(fragment, (fragment, value))
        expected[fragment] = value
    assert len(pending) <= 4
    items = pending.take()
    assert dict(items) == expected
    assert len(items) == len(expected)
    assert pending.take() == []


def test_pending_updates_keep_the_order_of_arrival():
    pending: PendingUpdates[str] = PendingUpdates()
    for fragment, item in [(2, "a"), (0, "b"), (2, "c")]:
        pending.offer(fragment, item)
    assert pending.take() == ["b", "c"]


# -- reports -------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.none() | st.floats(0, 9), st.integers(0, 50)),
        min_size=1,
        max_size=10,
    )
)
def test_a_merged_report_says_what_all_said(steps):
    merged = None
    for index, (tokens, loss, tenths) in enumerate(steps, start=1):
        merged = merge_reports(
            merged,
            StepReport(
                local_step=index,
                num_steps=1,
                num_tokens=tokens,
                loss=loss,
                step_s=tenths / 10,
                overhead_s=0.001,
                applied=(index,),
            ),
        )
    assert merged is not None
    assert merged.local_step == merged.num_steps == len(steps)
    assert merged.num_tokens == sum(tokens for tokens, _, _ in steps)
    losses = [loss for _, loss, _ in steps if loss is not None]
    assert merged.loss == (losses[-1] if losses else None)
    mean = sum(tenths for _, _, tenths in steps) / 10 / len(steps)
    assert merged.step_s == pytest.approx(mean)
    assert merged.applied == (len(steps),)


def test_a_report_is_taken_once():
    core = make_core()
    core.count(3)
    core.report(num_tokens=3, loss=1.0, step_s=0.1, overhead_s=0.0)
    taken = core.take_report()
    assert taken is not None
    assert taken.num_tokens == 3
    assert core.take_report() is None


# -- retry ---------------------------------------------------------------------------------


def test_backoff_doubles_its_bound_up_to_the_most_and_starts_over():
    backoff = Backoff(first_s=1.0, most_s=5.0)
    assert [backoff.failed(0.5) for _ in range(5)] == [0.5, 1.0, 2.0, 2.5, 2.5]
    backoff.succeeded()
    assert backoff.failed(1.0) == 1.0


@given(st.integers(0, 3000), st.floats(0, 1, exclude_max=True))
def test_backoff_stays_within_its_bounds_for_ever(num_failures, random):
    backoff = Backoff(first_s=0.1, most_s=5.0)
    for _ in range(num_failures):
        backoff.failed(random)
    assert 0 <= backoff.failed(random) < 5.0


@pytest.mark.parametrize(
    ("reason", "fatal"),
    [
        (Reason.FENCED, True),
        (Reason.LAYOUT_MISMATCH, True),
        (Reason.NO_SHARD_LEFT, True),
        (Reason.RUN_MISMATCH, True),
        (Reason.PROTOCOL_MISMATCH, True),
        (Reason.UNAVAILABLE, False),
        (Reason.UNKNOWN_LEARNER, False),
        (Reason.STALE_TERM, False),
        (Reason.NOT_LEADING, False),
        (Reason.STARTING, False),
        (Reason.INTERNAL, False),
    ],
)
def test_only_what_no_waiting_heals_ends_a_learner(reason, fatal):
    assert is_fatal(DilocoError(reason, "x")) is fatal


# -- connection ----------------------------------------------------------------------------


def reach(*events: Event) -> Connection:
    connection = Connection()
    for event in events:
        connection.happened(event)
    return connection


def test_the_way_of_a_seeding_learner():
    connection = reach(Event.SEED_GRANTED)
    assert connection.state is State.SEEDING
    connection.happened(Event.SEEDED)
    connection.happened(Event.SYNCED)
    assert connection.state is State.TRAINING


def test_a_learner_that_trains_trains_on_when_the_connection_is_lost():
    connection = reach(Event.JOINED, Event.SYNCED)
    connection.up()
    assert connection.happened(Event.LOST) is None
    change = connection.down(Reason.UNAVAILABLE, "refused")
    assert change is not None
    assert (change.state, change.online) == (State.TRAINING, False)
    assert connection.down(Reason.UNAVAILABLE, "refused again") is None, "said once"
    assert connection.down(Reason.STARTING, "soon") is not None, "another reason is news"
    assert connection.up() is not None
    assert connection.up() is None


@pytest.mark.parametrize("events", [(), (Event.JOINED,), (Event.SEED_GRANTED,)])
def test_a_learner_that_does_not_train_yet_joins_anew_when_the_connection_is_lost(events):
    connection = reach(*events)
    connection.happened(Event.LOST)
    assert connection.state is State.JOINING


@given(st.sampled_from([State.FENCED, State.REFUSED, State.FINISHED, State.LEFT]))
def test_an_end_is_an_end(state):
    assert not [pair for pair in TRANSITIONS if pair[0] is state]


@given(st.lists(st.sampled_from(list(Event)), max_size=30))
def test_every_state_that_is_reached_is_in_the_table_and_a_change_is_said_iff_there_is_one(events):
    connection = Connection()
    for event in events:
        before = connection.state
        change = connection.happened(event)
        assert (change is not None) == (connection.state is not before)
        assert connection.state is TRANSITIONS.get((before, event), before)


def test_a_wait_is_said_once_per_reason():
    connection = reach(Event.JOINED)
    assert connection.waits("first_parameters", "waiting") is not None
    assert connection.waits("first_parameters", "waiting") is None
    assert connection.reason == "first_parameters"
