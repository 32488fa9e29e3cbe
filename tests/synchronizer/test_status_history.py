"""What the status page remembers is bounded, and says what happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from decoupled_diloco.journal import Journal
from synchronizer_server.http import history as history_module
from synchronizer_server.http.history import MAX_EVENTS, SHARE_ROUNDS, History, LossCurve
from synchronizer_server.http.sentences import sentence

ROUND = {
    "global_step": 1, "fragment": 0, "contributors": ["a", "b"], "weights": [3.0, 1.0],
    "dropped": {}, "loss": 2.5,
}  # fmt: skip


def told(history: History) -> list[tuple[str, str]]:
    return [(x.subject, x.text) for x in history.remembered().events]


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
    history = History(wall=iter(range(10_000)).__next__)
    for i in range(2 * MAX_EVENTS):
        history.take("quorum", {"quorum": i, "before": 0})
    assert len(history.remembered().events) == MAX_EVENTS
    for _ in range(3):
        history.take("round", ROUND | {"dropped": {"a": "TOO_LATE"}})
    newest = history.remembered().events[0]
    assert (newest.subject, newest.text) == ("a", "was left out of a round: TOO_LATE")
    assert newest.times == 3
    assert newest.time > history.remembered().events[1].time, "it is as old as the last time"
    numbers = [x.number for x in history.remembered().events]
    assert numbers == sorted(set(numbers), reverse=True)


def test_a_text_of_somebody_else_is_cut() -> None:
    history = History()
    history.take("drain", {"learner_id": "a", "reason": "x" * 10_000})
    assert len(told(history)[0][1]) <= 300


def test_a_store_that_fails_is_said_once_and_again_when_it_works() -> None:
    history = History()
    for _ in range(3):
        history.take("persist_failed", {"global_step": 7, "reason": "DISK_FULL"})
    assert history.remembered().store_trouble == "DISK_FULL"
    history.take("round", ROUND)
    assert history.remembered().store_trouble == ""
    assert told(history) == [
        ("store", "persists again"),
        ("store", "round 7 is not persisted, merging waits: DISK_FULL"),
    ]


def test_what_it_cannot_read_is_said_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    history = History()
    Journal(None, observer=history.take).write("wait", nonsense=1)
    assert "the status page lost an event: wait" in caplog.text
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
