"""What the proof of fail-over reads from metrics, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from test_run_report import committed, mark, step, text

from benchmarks.proofs.failover import Evidence, look_at, problems
from diloco_fleet.metrics import parse_metrics


def one(time: float, term: int, global_step: int, digest: str = "aa") -> dict[str, Any]:
    return committed(time, global_step, "0", "0", term=term, digest=digest)


def written(*applied: list[object]) -> dict[str, str]:
    """A take-over from synchronizer-0 to synchronizer-1 after global step 2, at 2.0 to 6.0."""
    return {
        "synchronizer-0": text(
            mark("start", 0.0, term=1, global_step=0), one(1.0, 1, 1), one(2.0, 1, 2)
        ),
        "synchronizer-1": text(mark("start", 5.0, term=2, global_step=2), one(6.0, 2, 3)),
        "learner-0": text(
            step(1.5, 1),
            step(3.0, 2),
            step(7.0, 3, applied=[*applied]),
            mark("stop", 8.0, network_calls=9, network_calls_in_training=0),
        ),
    }


def found_in(files: dict[str, str]) -> Evidence:
    return look_at(parse_metrics(files), [(2.5, "synchronizer-0")])


GOOD = ([1, 1, 1, "aa"], [0, 1, 2, "aa"], [1, 2, 3, "aa"])


def test_a_clean_take_over_is_measured() -> None:
    found = found_in(written(*GOOD))
    assert (found.lost, found.doubled, found.redone) == ((), (), ())
    (kill,) = found.kills
    assert (kill.took_over, kill.steps_meanwhile) == ("synchronizer-1", 1)
    assert kill.without_merging_s == pytest.approx(4.0)
    assert (found.network_calls, found.network_calls_in_training) == (9, 0)


def test_a_lost_and_a_doubled_round_are_found() -> None:
    files = written(*GOOD, [1, 1, 3, "bb"])
    files["synchronizer-0"] += text(one(2.2, 1, 3, "bb"))
    found = found_in(files)
    assert found.lost == ((1, 3),)
    assert found.doubled == (3,)
    assert found.redone == (3,)


def report(**values: object) -> dict[str, Any]:
    return {
        "settings": {"run": {"lease_timeout_s": 3.0, "sync_interval": 8}},
        "step_overhead": {"p99_s": 0.01},
        "participation": 0.9,
        "measured_h": 8.0,
        "rounds_lost": 0,
        "leader_changes": [],
        **values,
    }


def test_what_is_promised_is_checked() -> None:
    found = found_in(written(*GOOD))
    assert problems(found, report(), report(), 1) == []
    assert problems(found, report(), report(), 2) == ["1 kills of 2"]
    slow = report(settings={"run": {"lease_timeout_s": 1.0, "sync_interval": 8}})
    assert problems(found, slow, report(), 1) == ["more than 3 s without merging"]
    held_up = report(step_overhead={"p99_s": 0.03})
    assert problems(found, report(), held_up, 1) == ["p99 in learner.step is 3.00 x"]
    alone = report(participation=0.2, measured_h=12.0)
    assert len(problems(found, alone, report(), 1)) == 2


def test_a_kill_without_a_take_over_and_a_call_in_training_are_problems() -> None:
    files = written(*GOOD)
    del files["synchronizer-1"]
    files["learner-0"] = files["learner-0"].replace('_in_training": 0', '_in_training": 1')
    said = problems(found_in(files), report(), report(), 1)
    assert "a kill was followed by no take-over" in said
    assert "a training thread made network calls" in said
