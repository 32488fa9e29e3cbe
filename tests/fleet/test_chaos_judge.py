"""Verdicts and results of scenarios, from records written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from diloco_fleet.chaos.conductor import Conductor, Phase
from diloco_fleet.chaos.judge import (
    Check,
    Figures,
    Verdict,
    check_all,
    check_hypothesis,
    check_strike,
    compute_figures,
    decide,
)
from diloco_fleet.chaos.point_faults import Skew
from diloco_fleet.chaos.record import Record
from diloco_fleet.chaos.result import Result, markdown, summary_lines, write_result
from diloco_fleet.chaos.scenario import Fault, FaultKind, Hypothesis, Scenario
from diloco_fleet.chaos.schedule import Strike, draw_schedule
from diloco_fleet.chaos.skew import with_true_times
from diloco_fleet.chaos.timeline import draw_timeline, write_timeline
from diloco_fleet.metrics import RunMetrics, parse_metrics
from tests.fleet.chaos_world import NAMES, World

KILL = Fault(fault=FaultKind.KILL, who="learner-1", at_s=(2.0,), recovery_s=10.0)
BEGIN = 1000.0


def record(**more: object) -> Record:
    strike = Strike(number=0, fault_index=0, at_s=2.0, on="", pick=0.0)
    return Record(strike=strike, fault=KILL, **more)  # type: ignore[arg-type]


def struck(recovered_s: float | None) -> Record:
    return record(
        targets=(("learner-1",),),
        began_s=2.0, healed_s=2.0, merging_s=3.0, recovered_s=recovered_s,
    )  # fmt: skip


def fleet_metrics(*, until: int = 60) -> RunMetrics:
    """Two learners that step every second; a round each second, the second term from 30 on."""

    def lines(*records: dict[str, object]) -> str:
        return "".join(json.dumps(entry) + "\n" for entry in records)

    def steps() -> list[dict[str, object]]:
        costs = {"num_tokens": 10, "step_s": 1.0, "overhead_s": 0.01, "loss": 2.0}
        return [
            {"kind": "step", "time": BEGIN + i, "global_step": i, "applied": [], **costs}
            for i in range(until)
        ]

    def rounds(term: int, first: int, last: int) -> list[dict[str, object]]:
        start = {
            "kind": "start", "time": BEGIN + first, "term": term, "global_step": max(first - 1, 0)
        }  # fmt: skip
        both = ["learner-0", "learner-1"]
        return [start] + [
            {
                "kind": "round", "time": BEGIN + i, "global_step": i, "fragment": i % 4,
                "contributors": both[: 1 + (i < 30)], "live": both, "tokens": 10,
                "measured_h": 8.8, "bytes_up": 1, "bytes_down": 1, "term": term,
                "digest": f"{term}-{i}",
            }
            for i in range(first, last)
        ]  # fmt: skip

    return parse_metrics(
        {
            "learner-0": lines(*steps()),
            "learner-1": lines(*steps()),
            "synchronizer-0": lines(*rounds(1, 1, 30)),
            "synchronizer-1": lines(*rounds(2, 30, until)),
        }
    )


def figures(**more: object) -> Figures:
    values = {
        "window_s": 60.0, "goodput": 0.9, "uptime": 1.0, "participation": 0.8, "measured_h": 8.8,
        "rounds": 50, "rounds_lost": 0, "leader_changes": 1, "tokens": 100, "learners": 3,
        "restarts": 1, **more,
    }  # fmt: skip
    return Figures(**values)  # type: ignore[arg-type]


def test_the_figures_are_those_of_the_time_that_was_watched() -> None:
    metrics = fleet_metrics()
    whole = compute_figures(metrics, num_learners=2, begin=BEGIN, end=BEGIN + 59, restarts=3)
    assert whole.rounds == 59
    assert whole.uptime == pytest.approx(1.0)
    assert whole.goodput == pytest.approx(1.0)
    assert (whole.leader_changes, whole.restarts) == (1, 3)
    assert whole.rounds_lost == 0
    assert whole.learners == 2
    assert whole.participation == pytest.approx((29 * 2 + 30) / (59 * 2))
    early = compute_figures(
        metrics, num_learners=2, begin=BEGIN + 0.3, end=BEGIN + 20.7, restarts=3
    )
    assert (early.participation, early.leader_changes) == (1.0, 0)
    assert early.uptime == pytest.approx(1.0), "a step that ends later is under way"


def test_a_fleet_that_wrote_nothing_has_no_figures() -> None:
    nothing = compute_figures(RunMetrics(), num_learners=2, begin=0.0, end=5.0, restarts=0)
    assert (nothing.window_s, nothing.goodput, nothing.rounds_lost) == (5.0, None, None)


@pytest.mark.parametrize(
    ("query", "bound", "value", "holds"),
    [
        ("uptime", 1.0, 1.0, True),
        ("uptime", 1.0, 0.99, False),
        ("participation", 0.7, 0.69, False),
        ("participation", 0.7, 0.7, True),
        ("measured_h", 0.2, 0.1, True),
        ("measured_h", 0.2, 0.3, False),
        ("rounds_lost", 0, 0, True),
        ("rounds_lost", 0, 1, False),
        ("rounds_lost", 0, None, False),
        ("without_merging_s", 5.0, 5.1, False),
        ("leader_changes", 1, 1, True),
        ("expired", 0, 1, False),
        ("silent_s", 3.0, 2.0, True),
    ],
)
def test_a_query_holds_or_does_not(
    query: str, bound: float, value: float | None, holds: bool
) -> None:
    """What cannot be told does not hold."""
    [check] = check_hypothesis(Hypothesis(**{query: bound}), {query: value})  # type: ignore[arg-type]
    assert check.holds is holds


def test_a_strike_has_to_happen_and_to_be_over_within_its_bound() -> None:
    assert check_strike(struck(recovered_s=11.0), 60.0).holds
    assert not check_strike(struck(recovered_s=13.0), 60.0).holds
    assert not check_strike(struck(recovered_s=None), 60.0).holds
    assert not check_strike(record(held="nobody to strike"), 60.0).holds
    assert "nobody to strike" in check_strike(record(held="nobody to strike"), 60.0).found
    assert not check_strike(record(problem="no permission"), 60.0).holds


def test_a_fault_of_which_little_was_left_is_none() -> None:
    """It was held up until just before everything is healed; one that was planned so is fine."""

    def cut(at_s: float, began_s: float, healed_s: float) -> Record:
        found = record(
            targets=(("learner-1",),), held="no standby is in sync",
            began_s=began_s, healed_s=healed_s, merging_s=healed_s, recovered_s=healed_s + 2.0,
        )  # fmt: skip
        found.fault = Fault(fault=FaultKind.FREEZE, who="learner-1", at_s=(at_s,), duration_s=20.0)
        found.strike = Strike(number=0, fault_index=0, at_s=at_s, on="", pick=0.0)
        return found

    late = check_strike(cut(5.0, 58.0, 60.0), 60.0)
    assert not late.holds
    assert late.found == "2.0 s of 20.0 s: no standby is in sync"
    assert check_strike(cut(5.0, 45.0, 60.0), 60.0).holds
    assert check_strike(cut(57.0, 57.1, 60.0), 60.0).holds


def test_nothing_that_was_struck_or_written_is_no_experiment() -> None:
    """Whatever the hypothesis asks, it holds of nothing then."""
    world = World()
    chosen = Scenario(
        name="test", about="", duration_s=60.0, faults=(KILL,), steady=Hypothesis(expired=0)
    )
    conductor = Conductor(scenario=chosen, schedule=draw_schedule(chosen, 0), names=NAMES)
    while conductor.phase is Phase.STEADYING or conductor.merges < 50:
        conductor.handle(world.sample())
        world.sleep(0.5)
    conductor.stop("")
    fine = {"rounds": 40, "tokens": 100}

    def broken(**found: object) -> set[str]:
        checks = check_all(conductor, figures(**{**fine, **found}), 8)
        return {check.name for check in checks if not check.holds}

    assert broken() == {"kill 0"}, "this world does not come back"
    assert broken(rounds=None, tokens=None) == {"kill 0", "rounds", "tokens"}
    assert broken(rounds=10) == {"kill 0", "rounds"}, "most of them are missing"
    assert broken(learners=2) == {"kill 0", "learners"}, "a round lost with one is not seen"
    assert broken(learners=None) == {"kill 0", "learners"}
    conductor.records[0].problem = "nobody is there"
    assert broken() == {"kill 0", "strikes"}


def test_what_chance_could_not_strike_breaks_nothing() -> None:
    by_chance = record(held="nobody to strike")
    by_chance.fault = Fault(fault=FaultKind.KILL, who="learner-1", mtbf_s=3.0)
    assert check_strike(by_chance, 60.0).holds


def test_the_verdict() -> None:
    good, bad = (Check(name="x", wanted="", found="", holds=holds) for holds in (True, False))
    assert decide([good], stopped="", interrupted=False) is Verdict.PASSED
    assert decide([good, bad], stopped="", interrupted=False) is Verdict.FAILED
    assert decide([], stopped="", interrupted=False) is Verdict.FAILED, "nothing was checked"
    assert decide([good], stopped="aborted", interrupted=False) is Verdict.ABORTED
    assert decide([good], stopped="interrupted", interrupted=True) is Verdict.INTERRUPTED


def result(**more: object) -> Result:
    scenario = Scenario(
        name="test", about="One dies.", duration_s=60.0, faults=(KILL,),
        steady=Hypothesis(rounds_lost=0),
    )  # fmt: skip
    values = {
        "scenario": scenario, "injector": "process", "seed": 3, "verdict": Verdict.PASSED,
        "stopped": "", "figures": figures(), "records": (struck(8.0),), "unhealed": (),
        "unreadable": (),
        "checks": (Check(name="rounds_lost", wanted="at most 0", found="0", holds=True),),
        "begin": BEGIN, "end": BEGIN + 60.0, **more,
    }  # fmt: skip
    return Result(**values)  # type: ignore[arg-type]


def test_the_result_as_json_has_verdict_figures_and_recoveries(tmp_path: Path) -> None:
    write_result(tmp_path, result())
    content = json.loads((tmp_path / "chaos.json").read_text())
    assert content["verdict"] == "passed"
    for key in ("goodput", "uptime", "participation", "measured_h", "rounds_lost"):
        assert content[key] == getattr(figures(), key)
    assert content["recovery_s"] == {"kill 0": 6.0}
    assert content["strikes"][0]["targets"] == [["learner-1"]]
    assert (tmp_path / "chaos.md").read_text() == markdown(result())


def test_the_result_names_what_did_not_hold_and_what_is_not_healed() -> None:
    broken = Check(name="uptime", wanted="at least 1", found="0.9", holds=False)
    bad = result(checks=(broken,), verdict=Verdict.FAILED, unhealed=("strike 0: gone",))
    assert "| uptime | at least 1 | 0.9 | **no** |" in markdown(bad)
    assert "strike 0: gone" in markdown(bad)
    lines = summary_lines(bad)
    assert "BROKEN  uptime: 0.9 (at least 1)" in lines
    assert lines[-1] == "test: failed"


def test_json_and_tables_hold_whatever_is_found(tmp_path: Path) -> None:
    """A figure that is no number, and texts that would end a cell or a line."""
    odd = result(
        figures=figures(goodput=math.nan, measured_h=math.inf),
        checks=(Check(name="x", wanted="a|b", found="c\nd", holds=False),),
        records=(record(problem="e | f"),), unreadable=("learner-0.jsonl line 3",),
    )  # fmt: skip
    write_result(tmp_path, odd)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    content = json.loads((tmp_path / "chaos.json").read_text(), parse_constant=refuse)
    assert (content["goodput"], content["measured_h"]) == (None, None)
    assert content["unreadable"] == ["learner-0.jsonl line 3"]
    text = (tmp_path / "chaos.md").read_text()
    assert "| x | a/b | c d | **no** |" in text
    assert "| kill | learner-1 | 2.0 |  |  |  |  | e / f |" in text
    assert "learner-0.jsonl line 3" in text


def test_hundreds_of_strikes_fit_a_picture(tmp_path: Path) -> None:
    many = result(records=(struck(8.0),) * 300)
    assert draw_timeline(many, fleet_metrics()).get_figheight() < 70.0


def test_the_picture_shows_learners_faults_and_who_led(tmp_path: Path) -> None:
    steps, stepping, faults, leader = draw_timeline(result(), fleet_metrics()).axes
    assert {line.get_label() for line in steps.lines} >= {"learner-0", "learner-1", "merges"}
    assert [x.get_text() for x in stepping.get_yticklabels()] == ["learner-0", "learner-1"]
    assert [x.get_text() for x in faults.get_yticklabels()] == ["kill learner-1"]
    assert [x.get_text() for x in leader.get_yticklabels()] == ["synchronizer-0", "synchronizer-1"]
    write_timeline(tmp_path, result(), fleet_metrics())
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_a_scenario_in_which_nothing_happened_has_a_picture_too(tmp_path: Path) -> None:
    write_timeline(tmp_path, result(records=(record(),), end=BEGIN), RunMetrics())
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_times_of_a_clock_that_was_wrong_are_put_right() -> None:
    """Of its process and its span alone; the figures are the same then."""
    metrics = fleet_metrics()
    text = [
        {"kind": "step", "time": step.time + (3600.0 if 10 <= i < 20 else 0.0), "loss": 2.0,
         "global_step": step.global_step, "num_tokens": 10, "step_s": 1.0, "overhead_s": 0.01}
        for i, step in enumerate(metrics.steps["learner-0"])
    ]  # fmt: skip
    wrong = parse_metrics({"learner-0": "".join(json.dumps(line) + "\n" for line in text)})
    skew = Skew("learner-0", 3600.0, BEGIN + 10, BEGIN + 19)
    right = with_true_times(wrong, [skew])
    assert [x.time for x in right.steps["learner-0"]] == [
        x.time for x in metrics.steps["learner-0"]
    ]
    assert with_true_times(metrics, [skew]) == metrics
    assert with_true_times(wrong, [Skew("learner-1", 3600.0, BEGIN, BEGIN + 60)]) == wrong
