"""Which rounds stand and which are lost, from metrics written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from test_run_report import committed, mark, report_of, step, text, undisturbed

from diloco_fleet.lineage import leaderships, lost_rounds, standing_rounds
from diloco_fleet.metrics import parse_metrics
from diloco_fleet.report_text import markdown


def lost(rounds: dict[str, str], *applied: tuple[int, int, str]) -> set[tuple[int, int]]:
    """Which of the versions (term, global step, digest) that a learner applied are lost."""
    learner = text(*(step(1.0, t, applied=[[t % 2, term, t, d]]) for term, t, d in applied))
    metrics = parse_metrics({**rounds, "learner-0": learner})
    return lost_rounds(metrics.rounds, leaderships(metrics), metrics.steps)


def one(time: float, term: int, global_step: int, digest: str = "aa") -> dict[str, Any]:
    return committed(time, global_step, "0", "0", term=term, digest=digest)


def term(time: float, number: int, global_step: int) -> dict[str, Any]:
    return mark("start", time, term=number, global_step=global_step, restored=global_step > 0)


def alone(*lines: dict[str, Any]) -> dict[str, str]:
    return {"synchronizer": text(*lines)}


def test_no_round_is_lost_when_the_synchronizer_goes_on_where_it_was() -> None:
    rounds = alone(term(0, 1, 0), one(1, 1, 1), one(2, 1, 2), term(3, 2, 2), one(4, 2, 3))
    assert lost(rounds, (1, 0, "aa"), (1, 1, "aa"), (1, 2, "aa"), (2, 3, "aa")) == set()


def test_a_round_that_was_applied_and_committed_again_is_lost() -> None:
    rounds = alone(
        term(0, 1, 0), one(1, 1, 1), one(2, 1, 2), one(3, 1, 3), term(4, 2, 1), one(5, 2, 2, "bb")
    )
    applied = ((1, 1, "aa"), (1, 2, "aa"), (1, 3, "aa"), (2, 2, "bb"))
    assert lost(rounds, *applied) == {(1, 2), (1, 3)}


def test_a_lost_round_that_nobody_applied_is_not_counted() -> None:
    rounds = alone(term(0, 1, 0), one(1, 1, 1), one(2, 1, 2), term(4, 2, 1), one(5, 2, 2, "bb"))
    assert lost(rounds, (1, 1, "aa"), (2, 2, "bb")) == set()


def test_a_round_with_other_bits_than_were_committed_is_lost() -> None:
    assert lost(alone(term(0, 1, 0), one(1, 1, 1)), (1, 1, "bb")) == {(1, 1)}


def test_a_commit_whose_record_was_lost_stands_when_a_later_term_rests_on_it() -> None:
    """Killed between persisting a round and writing its line: the round is on the lineage."""
    rounds = alone(term(0, 1, 0), one(1, 1, 1), term(3, 2, 2), one(4, 2, 3))
    assert lost(rounds, (1, 2, "aa"), (2, 3, "aa")) == set()


def test_a_round_beyond_the_end_of_the_lineage_is_lost() -> None:
    assert lost(alone(term(0, 1, 0), one(1, 1, 1)), (1, 1, "aa"), (1, 2, "aa")) == {(1, 2)}


def test_the_lineage_goes_by_terms_and_not_by_time() -> None:
    """A leader that was frozen commits once more after another one has taken over."""
    rounds = {
        "synchronizer-0": text(term(0, 1, 0), one(1, 1, 1), one(2, 1, 2), one(9, 1, 3, "late")),
        "synchronizer-1": text(term(5, 2, 2), one(6, 2, 3), one(7, 2, 4)),
    }
    metrics = parse_metrics(rounds)
    standing = standing_rounds(metrics.rounds, leaderships(metrics))
    assert [(x.term, x.global_step, x.synchronizer) for x in standing] == [
        (1, 1, "synchronizer-0"),
        (1, 2, "synchronizer-0"),
        (2, 3, "synchronizer-1"),
        (2, 4, "synchronizer-1"),
    ]
    assert lost(rounds, (1, 2, "aa"), (2, 3, "aa"), (1, 3, "late")) == {(1, 3)}


def test_the_figures_of_several_synchronizers_are_those_of_the_fleet() -> None:
    files = undisturbed()
    files["synchronizer-0"] = files.pop("synchronizer")
    files["synchronizer-1"] = text(
        term(113.0, 2, 4), committed(114.5, 5, "01", "01", term=2, bytes_up=7, bytes_down=9)
    )
    report = report_of(files)
    assert (report.rounds, report.rounds_lost) == (5, 0)
    assert (report.bytes_up, report.bytes_down) == (400 + 7, 800 + 9)
    assert [(x.term, x.synchronizer, x.global_step) for x in report.leader_changes] == [
        (2, "synchronizer-1", 4)
    ]
    assert report.leader_changes[0].without_merging_s == pytest.approx(4.5)
    page = markdown(report)
    assert "| 2 | synchronizer-1 |" in page
    assert "| leader changes | 1 (at most 4.5 s without merging) |" in page


def test_the_pause_before_a_resumed_session_is_not_time_without_merging() -> None:
    """Its synchronizer dies before it has merged anything."""
    files = undisturbed()
    files["fleet"] += text(mark("start", 500.0))
    files["synchronizer"] += text(
        term(501.0, 2, 4), term(502.0, 3, 4), committed(503.0, 5, "0", "0", term=3)
    )
    [change] = report_of(files).leader_changes
    assert change.term == 3
    assert change.without_merging_s == pytest.approx(3.0)


def test_a_start_of_the_fleet_is_not_a_leader_change_and_is_counted_apart() -> None:
    files = undisturbed()
    assert "starts of the fleet |" not in markdown(report_of(files)), "nothing was resumed"
    files["fleet"] += text(mark("start", 500.0))
    files["synchronizer"] += text(term(501.0, 2, 4), committed(503.0, 5, "0", "0", term=2))
    report = report_of(files)
    assert (report.leader_changes, report.fleet_starts) == ((), 2)
    assert "| leader changes | 0 |" in markdown(report)
    assert "| starts of the fleet | 2 |" in markdown(report)
