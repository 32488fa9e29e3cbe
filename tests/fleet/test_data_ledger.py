"""The ledger of leased data in the report, from lines written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_fleet.data_ledger import DataLedger, RoundData, compute_ledger
from diloco_fleet.metrics import parse_metrics
from diloco_fleet.report import compute_report
from diloco_fleet.report_text import summary_lines


def line(merged: int, *ranges: tuple[int, int, int], **changes: int) -> RoundData:
    values: dict[str, Any] = {"length": 10, "issued": 15, "free": 0, "returned": 0, **changes}
    values.setdefault("leased", values["issued"] - merged - values["free"])
    return RoundData(merged=merged, ranges=ranges, **values)


def ledger(*lines: RoundData | None) -> DataLedger:
    found = compute_ledger(lines)
    assert found is not None
    return found


def test_what_adds_up():
    found = ledger(line(4, (0, 0, 4)), None, line(12, (0, 4, 10), (1, 0, 2), returned=3))
    assert found == DataLedger(
        passes=1.5, leased=15, merged=12, open=3, returned=3, twice=0, skipped=0, unlisted=0
    )
    assert compute_ledger([None, None]) is None


@pytest.mark.parametrize(
    ("ranges", "twice"),
    [
        ([(0, 0, 4), (0, 4, 8)], 0),
        ([(0, 0, 4), (1, 0, 4)], 0),
        ([(0, 0, 4), (0, 2, 8)], 2),
        ([(0, 0, 8), (0, 1, 2), (0, 5, 9)], 4),
        ([(0, 3, 5), (0, 3, 5), (0, 3, 5)], 4),
    ],
)
def test_samples_that_are_merged_twice_are_counted(ranges, twice):
    assert ledger(line(0, *ranges)).twice == twice


def test_samples_that_are_nowhere_are_skipped_though_later_lines_add_up():
    assert ledger(line(4, (0, 0, 4), leased=9), line(4)).skipped == 2


def test_rounds_whose_line_was_lost_are_said():
    assert ledger(line(4, (0, 0, 4)), line(10, (0, 8, 10))).unlisted == 4


def test_the_report_shows_it_and_a_run_with_shards_has_none():
    def figures(**data: Any) -> str:
        values = {
            "kind": "round", "time": 1.0, "global_step": 1, "fragment": 0, "contributors": ["a"],
            "live": ["a"], "tokens": 5, "measured_h": None, "bytes_up": 1, "bytes_down": 1, **data,
        }  # fmt: skip
        metrics = parse_metrics({"synchronizer": json.dumps(values) + "\n"})
        assert len(metrics.rounds) == 1
        report = compute_report(metrics, run_id="r", num_learners=1, settings={})
        return "\n".join(summary_lines(report))

    totals = {"length": 10, "issued": 15, "merged": 4, "leased": 11, "free": 0, "returned": 2}
    text = figures(data={**totals, "ranges": [[0, 0, 4]]})
    assert "15 samples leased (1.50 passes): 4 merged, 11 open; 0 merged twice, 0 skipped" in text
    assert "2 given back" in text
    assert "samples leased" not in figures()
