"""Pace of the fleet: Eq. 3 with its floor, opening interval, limits of a push, step times."""

from __future__ import annotations

import pytest
from core_script import settings

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.events import LearnerJoined, StepReported
from synchronizer_server.core.pacing import Pace
from synchronizer_server.core.roster import Roster


def pace(step=None, quorum=None, sync=None, **changes):
    return Pace(settings(**changes), 4, step_s=step, quorum_s=quorum, sync_s=sync)


@pytest.mark.parametrize(
    ("estimates", "changes", "expected"),
    [
        ((1.0, 0.2, 1.0), {}, 0.9 * 0.8),
        ((1.0, 0.2, 0.1), {}, 1.0),
        ((1.0, 0.0, 1.0), {"grace_gamma": 0.5}, 0.5),
        ((1.0, 1.5, 1.0), {}, 0.25),
        ((1.0, 0.2, 99.0), {}, 0.25),
        ((1.0, 0.2, 99.0), {"grace_min": 0.0}, 0.0),
        ((1.0, 0.2, 1.0), {"overlap": 1}, 0.25),
        ((1.0, 0.2, 2.5), {"overlap": 3}, 0.9 * 0.3),
        ((1.0, None, None), {}, 1.0),
        ((None, None, None), {}, 0.0),
        ((1.0, 0.2, 1.0), {"grace": False}, 0.0),
    ],
)
def test_grace_window_is_eq_3_clipped(estimates, changes, expected):
    assert pace(*estimates, **changes).grace_s() == pytest.approx(expected)


@pytest.mark.parametrize(("step", "expected"), [(None, 0.0), (0.5, 0.5 * 12 / 4)])
def test_opening_interval_is_step_times_h_over_p(step, expected):
    assert pace(step, sync_interval=12).opening_interval_s() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step", "usual", "expected"),
    [
        (None, None, 1.0),
        (0.1, None, 1.0),
        (2.0, None, 4.0),
        (2.0, 0.5, 4.0),
        (2.0, 3.0, 12.0),
        (2.0, 100.0, 60.0),
        (1000.0, None, 60.0),
    ],
)
def test_a_push_gets_the_longest_of_three_limits_and_never_more_than_the_cap(step, usual, expected):
    assert pace(step).push_limit_s(usual) == expected


def test_the_averages_begin_with_the_first_value_and_move_by_the_smoothing():
    p = pace(smoothing=0.5)
    assert not p.known
    p.observe_step(1.0)
    p.observe_step(2.0)
    p.observe_sync(4.0)
    p.observe_sync(0.0)
    p.observe_quorum(3.0)
    assert (p.step_s, p.sync_s, p.quorum_s) == (1.5, 2.0, 3.0)
    assert p.known


def roster_of(**step_times):
    roster = Roster()
    one = Incarnation(1, 1)
    for i, (name, step_s) in enumerate(step_times.items()):
        roster.join(LearnerJoined(learner_id=name, incarnation=one, shard=i), 0.0)
        learner = roster.find(name)
        roster.opened(learner, 0.0)
        for k in range(1, 6):
            event = StepReported(
                learner_id=name, incarnation=one, local_step=k, num_steps=1, num_tokens=10
            )
            assert roster.reported(learner, event, k * step_s)
    return roster


def test_one_slow_learner_of_two_does_not_set_the_pace():
    """A mean of both would hold the merges of the fast one."""
    assert roster_of(fast=0.1, slow=2.0).median_step_s() == pytest.approx(0.11)
    assert roster_of(a=0.1, b=0.1, c=2.0, d=2.0).median_step_s() == pytest.approx(0.11)
    assert roster_of(a=0.1, b=0.102).median_step_s() == pytest.approx(0.101)


def test_the_step_time_of_the_fleet_is_that_of_its_median_learner():
    roster = roster_of(a=0.1, b=0.2, c=5.0)
    assert roster.median_step_s() == pytest.approx(0.2)
    assert roster.find("a").tokens_per_second == pytest.approx(100.0)


def test_a_report_of_several_steps_counts_as_several():
    roster = roster_of(a=0.1)
    learner = roster.find("a")
    event = StepReported(
        learner_id="a", incarnation=Incarnation(1, 1), local_step=15, num_steps=10, num_tokens=100
    )
    for now in (1.5, 2.5, 3.5):
        assert roster.reported(learner, event, now) is (now == 1.5)
    assert learner.intervals[-1] == pytest.approx(0.1)


def test_a_report_tells_versions_and_loss_and_keeps_them_where_the_next_one_does_not():
    roster = roster_of(a=0.1)
    learner = roster.find("a")
    common = {"learner_id": "a", "incarnation": Incarnation(1, 1), "num_tokens": 10}
    told = StepReported(local_step=6, num_steps=1, known_global_steps=(3, 4), loss=2.5, **common)
    assert roster.reported(learner, told, 1.0)
    assert roster.reported(learner, StepReported(local_step=7, num_steps=1, **common), 1.1)
    assert (learner.known_global_steps, learner.loss) == ((3, 4), 2.5)


@pytest.mark.parametrize(("local_step", "num_steps"), [(0, 1), (-1, 1), (9, 0), (9, -1), (5, 1)])
def test_a_report_that_cannot_be_or_is_old_is_a_sign_of_life_and_no_more(local_step, num_steps):
    roster = roster_of(a=0.1)
    learner = roster.find("a")
    event = StepReported(
        learner_id="a", incarnation=Incarnation(1, 1), local_step=local_step, num_steps=num_steps,
        num_tokens=10,
    )  # fmt: skip
    assert not roster.reported(learner, event, 9.0)
    assert (learner.local_step, learner.heard_at) == (5, 9.0)
