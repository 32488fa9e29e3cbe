"""The report, from metrics written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_fleet.goodput import measure_stepping, stepping_intervals
from diloco_fleet.metrics import (
    last_evaluation,
    last_round,
    parse_metrics,
    read_metrics,
)
from diloco_fleet.plots import plot_losses
from diloco_fleet.report import Report, compute_report, percentile
from diloco_fleet.report_text import markdown, summary_lines, write_report
from diloco_fleet.run_files import RunFiles


def step(time: float, global_step: int, **values: Any) -> dict[str, Any]:
    base = {"local_step": 0, "loss": 2.0, "num_tokens": 10, "step_s": 1.0, "overhead_s": 0.01}
    return {"kind": "step", "time": time, "global_step": global_step, **base, **values}


def committed(time: float, global_step: int, who: str, live: str, **values: Any) -> dict[str, Any]:
    return {
        "kind": "round",
        "time": time,
        "global_step": global_step,
        "fragment": global_step % 2,
        "contributors": [f"learner-{c}" for c in who],
        "live": [f"learner-{c}" for c in live],
        "tokens": 40,
        "measured_h": 4.0,
        "bytes_up": 100 * global_step,
        "bytes_down": 200 * global_step,
        "term": 1,
        **values,
    }


def mark(kind: str, time: float, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, **values}


def text(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def steps(first: float, last: int, every: float = 1.0, **values: Any) -> list[dict[str, Any]]:
    """Steps that end at first, first + every, ... (``last`` of them)."""
    return [step(first + i * every, 0, step_s=every, **values) for i in range(last)]


def report_of(files: dict[str, str], num_learners: int = 2) -> Report:
    return compute_report(
        parse_metrics(files), run_id="r", num_learners=num_learners, settings={"run": {"quorum": 1}}
    )


def undisturbed() -> dict[str, str]:
    """Two learners step from 100 to 110, without a pause; four rounds, the last at 110."""
    return {
        "learner-0": text(mark("start", 99.0), *steps(101.0, 10)),
        "learner-1": text(mark("start", 99.0), *steps(101.0, 10)),
        "synchronizer": text(
            mark("start", 98.0, term=1, global_step=0),
            committed(102.0, 1, "0", "01"),
            committed(104.0, 2, "01", "01"),
            committed(106.0, 3, "01", "01"),
            committed(110.0, 4, "10", "01", measured_h=6.0),
        ),
        "evaluator": text(
            mark("start", 98.0),
            {"kind": "evaluation", "time": 99.0, "global_step": 0, "loss": 5.5, "num_tokens": 9},
            {"kind": "evaluation", "time": 111.0, "global_step": 4, "loss": 2.5, "num_tokens": 9},
        ),
        "fleet": text(
            mark("start", 97.0), mark("layout", 99.0, num_parameters=300, num_fragments=2)
        ),
    }


def test_figures_of_an_undisturbed_run() -> None:
    report = report_of(undisturbed())
    assert (report.evaluation_loss_before, report.evaluation_loss_after) == (5.5, 2.5)
    assert report.evaluation_global_step == 4
    assert report.tokens == 200
    assert report.tokens_merged == 80
    assert (report.rounds, report.rounds_lost) == (4, 0)
    assert report.window_s == pytest.approx(10.0)
    assert report.goodput == pytest.approx(1.0)
    assert report.uptime == pytest.approx(1.0)
    assert report.tokens_per_second == pytest.approx(20.0)
    assert report.participation == pytest.approx(7 / 8)
    assert report.measured_h == pytest.approx((4 + 2 * 4 + 2 * 4 + 2 * 6) / 7)
    assert report.contributors_histogram == {"1": 1, "2": 3}
    assert report.contributions == {"learner-0": 4, "learner-1": 3}
    assert (report.bytes_up, report.bytes_down) == (400, 800)
    assert report.bytes_per_parameter_per_sync == pytest.approx(1200 / (150 * 8))
    assert (report.restarts, report.restarts_by_process) == (0, {})
    assert report.step_overhead is not None
    assert report.step_overhead.median_s == pytest.approx(0.01)
    assert report.step_overhead.p99_s == pytest.approx(0.01)
    assert report.step_overhead.share == pytest.approx(0.01)
    assert report.problems == ()


def test_a_dead_learner_costs_its_share_of_goodput_and_no_uptime() -> None:
    files = undisturbed()
    files["learner-1"] = text(
        mark("start", 99.0),
        *steps(101.0, 2),
        mark("start", 107.0),
        step(109.0, 0, step_s=1.0),
        step(110.0, 0, step_s=1.0),
    )
    report = report_of(files)
    assert report.goodput == pytest.approx(14 / 20)
    assert report.uptime == pytest.approx(1.0)


def test_uptime_counts_only_the_time_in_which_nobody_stepped_as_lost() -> None:
    """Both learners stand still from 102 to 108; the second one begins a second later again."""
    files = undisturbed()
    files["learner-0"] = text(*steps(101.0, 2), mark("start", 107.5), *steps(109.0, 2))
    files["learner-1"] = text(*steps(101.0, 2), mark("start", 107.5), *steps(110.0, 1))
    report = report_of(files)
    assert report.uptime == pytest.approx(4 / 10)
    assert report.goodput == pytest.approx((4 + 3) / 20)


def test_a_frozen_step_counts_as_one_median_step() -> None:
    """A learner frozen within a step for 50 s was not stepping for 50 s."""
    records = parse_metrics(
        {"learner-0": text(*steps(1.0, 4), step(54.0, 0, step_s=50.0), step(55.0, 0))}
    ).steps["learner-0"]
    assert stepping_intervals(records) == [(0.0, 4.0), (53.0, 55.0)]


def test_steps_after_the_last_committed_round_are_outside_of_the_window() -> None:
    files = undisturbed()
    files["learner-0"] = text(*steps(101.0, 30))
    files["learner-1"] = text(*steps(101.0, 30))
    report = report_of(files)
    assert report.window_s == pytest.approx(10.0)
    assert report.goodput == pytest.approx(1.0)


def test_the_pause_between_two_sessions_is_nobodys() -> None:
    rounds = (committed(4.0, 1, "0", "0"), committed(104.0, 2, "0", "0"))
    metrics = parse_metrics(
        {
            "learner-0": text(*steps(1.0, 4), mark("start", 100.0), *steps(101.0, 4)),
            "synchronizer": text(*rounds),
        }
    )
    once = measure_stepping(metrics.steps, metrics.rounds, num_learners=1)
    twice = measure_stepping(metrics.steps, metrics.rounds, num_learners=1, sessions=[-1.0, 90.0])
    assert once is not None
    assert once.window_s == pytest.approx(104.0)
    assert twice is not None
    assert twice.window_s == pytest.approx(8.0)
    assert twice.goodput == pytest.approx(1.0)


def test_without_an_evaluation_of_the_seed_there_is_no_loss_before() -> None:
    files = undisturbed()
    files["evaluator"] = text(mark("start", 1.0), *(
        {"kind": "evaluation", "time": 1.0, "global_step": t, "loss": 4.0} for t in (3, 2)
    ))  # fmt: skip
    report = report_of(files)
    assert report.evaluation_loss_before is None
    assert (report.evaluation_loss_after, report.evaluation_global_step) == (4.0, 3)


def test_a_run_without_rounds_has_a_report_too() -> None:
    report = report_of({"learner-0": text(*steps(1.0, 3))})
    assert report.goodput is None
    assert report.participation is None
    assert report.evaluation_loss_after is None
    assert "| goodput | - |" in markdown(report)
    assert report_of({}).rounds == 0


def test_restarts_come_from_the_supervisor_where_it_recorded() -> None:
    files = undisturbed()
    files["learner-0"] += text(mark("start", 105.0))
    assert report_of(files).restarts == 0
    files["fleet"] += text(
        mark("restart", 105.0, process="learner-0", pid=1),
        mark("restart", 106.0, process="learner-0", pid=2),
        mark("restart", 107.0, process="synchronizer", pid=3),
    )
    report = report_of(files)
    assert report.restarts == 3
    assert report.restarts_by_process == {"learner-0": 2, "synchronizer": 1}


def test_restarts_are_counted_by_lives_where_nobody_recorded_them() -> None:
    files = undisturbed()
    del files["fleet"]
    files["learner-0"] += text(mark("start", 105.0), mark("start", 107.0))
    assert report_of(files).restarts_by_process == {"learner-0": 2}


def test_bytes_add_up_over_the_lives_of_the_synchronizer() -> None:
    """Each life counts from zero, and may pass the total of the one before by its first round."""
    files = undisturbed()
    files["synchronizer"] += text(
        mark("start", 120.0, term=2, global_step=4),
        committed(125.0, 5, "01", "01", term=2, bytes_up=450, bytes_down=900),
    )
    report = report_of(files)
    assert (report.bytes_up, report.bytes_down) == (400 + 450, 800 + 900)


def test_a_contributor_that_died_before_the_merge_counts_as_live() -> None:
    files = {"synchronizer": text(committed(1.0, 1, "01", "0"))}
    assert report_of(files).participation == pytest.approx(1.0)


def test_a_torn_last_line_is_tolerated() -> None:
    files = undisturbed()
    files["learner-0"] += '{"kind": "step", "time": 11'
    report = report_of(files)
    assert report.problems == ()
    assert report.tokens == 200


@pytest.mark.parametrize(
    "garbage",
    [
        "\x00\x00\x00",
        "[1, 2]",
        '{"kind": "step"}',
        '{"kind": "step", "time": "soon"}',
        '{"kind": "step", "time": NaN, "global_step": 0, "num_tokens": 1, "step_s": 1, '
        '"overhead_s": 0}',
        '{"time": 1.0}',
        "[" * 100_000,
    ],
)
def test_garbage_in_the_middle_is_reported_and_left_out(garbage: str) -> None:
    files = undisturbed()
    lines = files["learner-0"].splitlines()
    files["learner-0"] = "\n".join([*lines[:3], garbage, *lines[3:]]) + "\n"
    report = report_of(files)
    assert report.problems == ("learner-0.jsonl line 4 cannot be read",)
    assert report.tokens == 200


def test_much_garbage_is_summed_up() -> None:
    problems = report_of({"learner-0": "x\n" * 100}).problems
    assert len(problems) == 6
    assert problems[-1] == "learner-0.jsonl: 95 more such lines"


def test_percentile_is_a_value_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0


def test_report_files_and_picture(tmp_path: Path) -> None:
    """report.json has every key, no NaN; report.md says how figures are computed; loss.png."""
    files = RunFiles(tmp_path)
    files.metrics.mkdir()
    texts = undisturbed()
    texts["learner-0"] += text(step(112.0, 4, loss=None))
    texts["evaluator"] += (
        '{"kind": "evaluation", "time": 112, "global_step": 5, "loss": NaN, "num_tokens": 1}\n'
    )
    texts["fleet"] += text(mark("restart", 105.0, process="learner-0"))
    for name, content in texts.items():
        files.metrics_of(name).write_text(content)
    metrics = read_metrics(files.metrics)
    report = compute_report(
        metrics, run_id="r", num_learners=2, settings={"run": {"quorum": 1}}, sample="The end"
    )
    write_report(files, report)
    plot_losses(metrics, tmp_path / "loss.png", title="r")

    values = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    wanted = [
        "evaluation_loss_before",
        "evaluation_loss_after",
        "tokens",
        "rounds",
        "rounds_lost",
        "goodput",
        "uptime",
        "participation",
        "measured_h",
        "contributors_histogram",
        "bytes_per_parameter_per_sync",
        "restarts",
        "step_overhead",
        "settings",
        "sample",
    ]
    assert set(wanted) <= set(values)
    assert set(values["step_overhead"]) == {"median_s", "p99_s", "share"}
    assert values["evaluation_loss_after"] is None
    page = (tmp_path / "report.md").read_text()
    for word in ("goodput", "uptime", "rounds lost", "The end", "`quorum`"):
        assert word in page
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any("goodput" in line for line in summary_lines(report))


def test_the_newest_record_is_read_from_the_end_of_a_file(tmp_path: Path) -> None:
    assert last_round(tmp_path) is None
    assert last_evaluation(tmp_path / "evaluator.jsonl") is None
    many = text(*(committed(1.0 + i, i, "0", "0") for i in range(100))) + '{"kind": "r'
    (tmp_path / "synchronizer-0.jsonl").write_text(many)
    newest = last_round(tmp_path)
    assert newest is not None
    assert newest.global_step == 99
    (tmp_path / "synchronizer-1.jsonl").write_text(text(committed(0.0, 98, "0", "0", term=2)))
    newest = last_round(tmp_path)
    assert newest is not None
    assert (newest.term, newest.global_step) == (2, 98)
    assert last_evaluation(tmp_path / "synchronizer-0.jsonl") is None
