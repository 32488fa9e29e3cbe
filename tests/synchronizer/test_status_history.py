"""What the status page remembers is bounded, and says what happened."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from decoupled_diloco import fault_points
from decoupled_diloco.journal import Journal
from synchronizer_server.http import history as history_module
from synchronizer_server.http.history import (
    MAX_EVENTS,
    MAX_LEFT_OUT,
    SHARE_ROUNDS,
    History,
    LossCurve,
)
from synchronizer_server.http.sentences import sentence

ROUND = {
    "global_step": 1, "fragment": 0, "contributors": ["a", "b"], "weights": [3.0, 1.0],
    "dropped": {}, "loss": 2.5,
}  # fmt: skip


def told(history: History) -> list[tuple[str, str]]:
    return [(x.subject, x.text) for x in history.remembered().events]


def test_ages_stay_where_the_wall_clock_is_set_anew() -> None:
    """By hours, and back: an event was never hours ago, nor is it still to come."""
    wall, clock = [1000.0], [5.0]
    history = History(wall=lambda: wall[0], clock=lambda: clock[0])
    history.take("seeded", {})
    for off_s in (10800.0, -10800.0, 0.0):
        clock[0] += 2.0
        wall[0] = 1000.0 + clock[0] - 5.0 + off_s
        [event] = history.remembered().events
        assert wall[0] - event.time == pytest.approx(clock[0] - 5.0)


def test_the_times_of_the_page_are_those_of_the_one_clock_that_may_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fault_points, "_faults", SimpleNamespace(offset_s=10800.0))
    history = History()
    history.take("seeded", {})
    [event] = history.remembered().events
    assert event.time == pytest.approx(time.time() + 10800.0, abs=60.0)


def test_a_curve_keeps_first_and_newest_in_a_bounded_number_of_points() -> None:
    curve = LossCurve(8)
    for step in range(1, 1001):
        curve.add(step, float(step))
        points = curve.points()
        assert len(points) <= 8
        assert points[-1][0] == step, "the newest round is in"
    steps = [step for step, _ in curve.points()]
    assert steps == sorted(set(steps))
    assert steps[0] <= 1000 / 4, "the beginning is still there"
    for step, loss in curve.points():
        assert step - 1000 / 4 <= loss <= step, "a point is a mean of the rounds up to its step"


def test_a_curve_that_goes_back_forgets_what_lay_above() -> None:
    curve = LossCurve(8)
    for step in range(1, 31):
        curve.add(step, 1.0)
    curve.go_back(12)
    assert all(step <= 12 for step, _ in curve.points())
    curve.add(13, 0.5)
    assert curve.points()[-1][0] == 13


def test_absurd_losses_become_no_number_that_json_cannot_hold() -> None:
    curve = LossCurve(2)
    for step in range(9):
        curve.add(step, 1.7e308)
    assert all(loss < float("inf") for _, loss in curve.points())


def test_the_share_in_the_weight_is_a_mean_over_the_last_rounds() -> None:
    history = History()
    for _ in range(SHARE_ROUNDS):
        history.take("round", ROUND)
    assert history.remembered().shares == {"a": 0.75, "b": 0.25}
    alone = ROUND | {"contributors": ["a"], "weights": [9.0]}
    for _ in range(SHARE_ROUNDS // 2):
        history.take("round", alone)
    assert history.remembered().shares == {"a": 0.875, "b": 0.125}
    history.take("round", ROUND | {"contributors": [], "weights": [], "rolled_back": "diverged"})
    assert history.remembered().shares == {"a": 0.875, "b": 0.125}, "a roll-back weighs nothing"
    for _ in range(SHARE_ROUNDS):
        history.take("round", alone)
    assert history.remembered().shares == {"a": 1.0}, "who has left is forgotten"


def test_events_are_few_and_what_repeats_is_counted() -> None:
    history = History(clock=iter(range(10_000)).__next__)
    for i in range(2 * MAX_EVENTS):
        history.take("quorum", {"quorum": i, "before": 0})
    assert len(history.remembered().events) == MAX_EVENTS
    for _ in range(3):
        history.take("round", ROUND | {"dropped": {"a": "TOO_LATE", "b": "NO_PROGRESS"}})
    newest, before, news, *_ = history.remembered().events
    assert (before.subject, before.text) == ("a", "was left out of a round: TOO_LATE")
    assert (newest.subject, newest.text) == ("b", "was left out of a round: NO_PROGRESS")
    assert newest.times == before.times == 3
    assert newest.time > before.time > news.time, "it is as old as the last time"
    numbers = [x.number for x in history.remembered().events]
    assert numbers == sorted(set(numbers), reverse=True)


def test_learners_that_are_late_all_the_time_push_nothing_out() -> None:
    history = History()
    history.take("quorum", {"quorum": 2, "before": 1})
    for _ in range(3):
        history.take("round", ROUND | {"dropped": {f"learner-{i}": "TOO_LATE" for i in range(500)}})
    events = history.remembered().events
    assert len(events) == 1 + MAX_LEFT_OUT
    assert ("quorum", "is 2, was 1") in told(history)


def test_a_text_of_somebody_else_is_cut() -> None:
    history = History()
    history.take("drain", {"learner_id": "a", "reason": "x" * 10_000})
    assert len(told(history)[0][1]) <= 300


def test_a_store_that_fails_is_said_once_and_again_when_it_works() -> None:
    history = History()
    for _ in range(3):
        history.take("persist_failed", {"global_step": 7, "reason": "DISK_FULL"})
    history.take("round", ROUND)
    assert told(history) == [
        ("store", "persists again"),
        ("store", "round 7 is not persisted, merging waits: DISK_FULL"),
    ]


def test_a_store_that_failed_in_an_earlier_term_does_not_persist_again_in_this_one() -> None:
    history = History()
    failed = ("store", "round 7 is not persisted, merging waits: DISK_FULL")
    history.take("persist_failed", {"global_step": 7, "reason": "DISK_FULL"})
    history.take("start", {"term": 2, "global_step": 6})
    history.take("round", ROUND)
    assert ("store", "persists again") not in told(history)
    history.take("persist_failed", {"global_step": 7, "reason": "DISK_FULL"})
    assert told(history)[0] == failed, "and it is news again"


def test_a_text_of_somebody_else_does_nothing_to_the_line() -> None:
    history = History()
    history.take("drain", {"learner_id": "a", "reason": "x\u202ey\x1b[31m\nz"})
    assert told(history) == [("a", "is asked to leave: x\ufffdy\ufffd[31m\ufffdz")]


def test_absurd_weights_become_no_number_that_json_cannot_hold() -> None:
    history = History()
    for weights in ([1e308, 1e308], [0.0, 0.0], [float("inf"), 1.0], [3.0, 1.0]):
        history.take("round", ROUND | {"weights": weights})
    assert history.remembered().shares == {"a": 0.75 / 4, "b": 0.25 / 4}


def test_what_it_cannot_read_is_said_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    history = History()
    for _ in range(3):
        Journal(None, observer=history.take).write("wait", nonsense=1)
    assert caplog.text.count("the status page lost an event: wait") == 1
    history.take("seeded", {})
    assert told(history) == [("run", "is seeded")]


def test_every_kind_of_event_is_known() -> None:
    """Words for all that the journal is told, but for rounds, which the curve shows."""
    root = Path(history_module.__file__).parents[1]
    sources = "\n".join(path.read_text() for path in root.rglob("*.py"))
    calls = re.findall(r"journal\.write\(\s*([^,)]+)", sources)
    kinds = {kind for call in calls for kind in re.findall(r'"(\w+)"', call)}
    assert {"start", "snapshot", "snapshot_failed", "recovered"} <= kinds

    class Any(dict[str, object]):
        def __missing__(self, key: str) -> object:
            return {"left_out": {}, "seconds": 1.0}.get(key, key)

    for kind in kinds - {"round"} | {"complete", "drained"}:
        assert sentence(kind, Any()) is not None, kind
