"""For how long merging waited, by reason, from metrics written by hand."""

from __future__ import annotations

import json

from diloco_fleet.metrics import parse_metrics
from diloco_fleet.report import compute_report
from diloco_fleet.report_text import markdown, summary_lines
from diloco_fleet.waiting import WaitTime, wait_times


def wait(time: float, subject: str, reason: str, detail: str = "") -> dict[str, object]:
    return {
        "kind": "wait", "time": time, "subject": subject, "reason": reason, "detail": detail,
    }  # fmt: skip


def other(kind: str, time: float) -> dict[str, object]:
    return {"kind": kind, "time": time}


def times_of(*lines: dict[str, object], process: str = "synchronizer") -> dict[str, WaitTime]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return {x.reason: x for x in wait_times(parse_metrics({process: text}))}


def test_a_wait_lasts_from_when_it_is_told_until_it_goes_on() -> None:
    found = times_of(
        wait(10.0, "round 5", "quorum", "1 of 2"),
        wait(13.0, "round 5", "quorum", "1 of 3"),  # the same wait, put into other words
        wait(14.0, "round 5", "persist", "the store failed"),
        wait(14.5, "round 5", ""),
        wait(20.0, "round 9", "quorum", "0 of 2"),
        wait(21.0, "round 9", ""),
    )
    assert found == {
        "quorum": WaitTime(
            reason="quorum", times=2, total_s=5.0, longest_s=4.0, longest_detail="1 of 3"
        ),
        "persist": WaitTime(
            reason="persist", times=1, total_s=0.5, longest_s=0.5, longest_detail="the store failed"
        ),
    }


def test_rounds_that_wait_at_once_count_once_and_what_follows_another_not_at_all() -> None:
    found = times_of(
        wait(10.0, "round 5", "replica"),
        wait(11.0, "round 6", "replica"),
        wait(11.0, "round 7", "earlier_round"),
        wait(14.0, "round 5", ""),
        wait(15.0, "round 6", ""),
        wait(16.0, "round 7", ""),
    )
    assert set(found) == {"replica"}
    assert (found["replica"].total_s, found["replica"].times) == (5.0, 2)


def test_only_merging_counts() -> None:
    """Snapshots and data that wait stop no round."""
    lines = [wait(1.0, "snapshot 8", "snapshot"), wait(1.0, "data", "claims"), other("stop", 9.0)]
    assert not times_of(*lines)
    assert not times_of(wait(1.0, "seed", "learners"), other("stop", 9.0), process="learner-0")


def test_a_wait_ends_with_the_life_that_told_of_it() -> None:
    """What was killed is not known to have waited until it was started again."""
    told = wait(10.0, "seed", "learners")
    assert times_of(told, other("stop", 12.0), other("start", 90.0))["learners"].total_s == 2.0
    killed = times_of(told, other("learner", 13.0), other("start", 90.0), other("learner", 99.0))
    assert killed["learners"].total_s == 3.0
    assert times_of(told, other("learner", 17.0))["learners"].total_s == 7.0, "it waits still"


def test_the_report_names_them() -> None:
    lines = [wait(10.0, "round 5", "quorum", "a|b\nc"), wait(70.0, "round 5", "")]
    metrics = parse_metrics({"synchronizer-1": "".join(json.dumps(x) + "\n" for x in lines)})
    report = compute_report(metrics, run_id="r", num_learners=1, settings={})
    assert r"| `quorum` | 1 | 60 s | 60 s | a\|b c |" in markdown(report)
    assert any(line.split() == ["merging", "waited", "60", "s", "for", "quorum"]
               for line in summary_lines(report))  # fmt: skip
    undisturbed = compute_report(parse_metrics({}), run_id="r", num_learners=1, settings={})
    assert "Merging waited" not in markdown(undisturbed)
