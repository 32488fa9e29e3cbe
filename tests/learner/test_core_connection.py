"""Pending updates, reports, retry and states of the connection: pure, fed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from learner_client.core.connection import TRANSITIONS, Connection, Event, State
from learner_client.core.pending import PendingUpdates
from learner_client.core.reports import StepReport, merge_reports
from learner_client.core.retry import Backoff, is_fatal

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
