"""What the proof of the storm reads off its runs."""

from __future__ import annotations

import math

import pytest

from benchmarks.proofs.storm import excess, is_within, loss_at, loss_by_tokens, scenario
from diloco_fleet.chaos.own_fleet import resolve_shape
from diloco_fleet.chaos.schedule import draw_schedule
from diloco_fleet.metrics import Evaluation, Round, RunMetrics, Step


def step(time: float) -> Step:
    return Step(
        time=time, global_step=0, loss=1.0, num_tokens=10, step_s=1.0, overhead_s=0.0, life=0
    )


def committed(global_step: int, time: float) -> Round:
    return Round(
        time=time, global_step=global_step, fragment=0, contributors=(), live=(), tokens=0,
        measured_h=None, bytes_up=0, bytes_down=0,
    )  # fmt: skip


def test_a_loss_belongs_to_the_tokens_of_all_learners_until_its_copy_was_committed() -> None:
    """An evaluator that is late makes no loss later, and none better."""
    metrics = RunMetrics(
        steps={"learner-0": (step(1.0), step(2.0)), "learner-1": (step(1.5),)},
        rounds=(committed(5, 1.6), committed(9, 8.0)),
        evaluations=tuple(
            Evaluation(time=time, global_step=global_step, loss=loss)
            for time, global_step, loss in ((1.9, 0, 5.0), (2.9, 5, 4.0), (9.0, 9, 3.0))
        ),
    )
    assert loss_by_tokens(metrics) == [(0.0, 5.0), (20.0, 4.0), (30.0, 3.0)]


@pytest.mark.parametrize(
    ("tokens", "loss"),
    [(0.0, 5.0), (10.0, 4.5), (20.0, 4.0), (25.0, 3.5), (30.0, 3.0), (99.0, 3.0)],
)
def test_between_evaluations_a_loss_is_interpolated(tokens: float, loss: float) -> None:
    assert loss_at([(0.0, 5.0), (20.0, 4.0), (30.0, 3.0)], tokens) == pytest.approx(loss)


def test_a_loss_may_be_two_percent_off_in_the_mean_of_all_plays() -> None:
    """Either way: who is far better has not trained on equal tokens."""
    high, low = {"storm": 3.12, "undisturbed": 3.0}, {"storm": 2.88, "undisturbed": 3.0}
    assert excess([high]) == pytest.approx(0.04)
    assert not is_within([high])
    assert not is_within([low])
    assert is_within([high, low])
    assert is_within([{"storm": 3.05, "undisturbed": 3.0}])
    assert not is_within([{"storm": math.nan, "undisturbed": 3.0}])


def test_the_fleet_that_is_left_alone_differs_in_nothing_but_the_kills() -> None:
    storm = scenario("storm", mtbf_s=20.0, seconds=600.0, learners=4, pace=0.2)
    quiet = scenario("quiet", mtbf_s=None, seconds=600.0, learners=4, pace=0.2)
    assert storm.fleet == quiet.fleet
    assert resolve_shape(storm.fleet, "storm", {}).trainer.value.total_global_steps == 1_000_000
    assert draw_schedule(quiet, 0) == ()
    assert 15 <= len(draw_schedule(storm, 0)) <= 45
