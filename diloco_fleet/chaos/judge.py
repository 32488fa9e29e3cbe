"""Judges a scenario: its figures, each query of the hypothesis, each bound, the verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from diloco_fleet.chaos.conductor import Conductor, Phase
from diloco_fleet.chaos.record import Record
from diloco_fleet.chaos.scenario import Hypothesis
from diloco_fleet.chaos.targets import is_learner
from diloco_fleet.goodput import clip, length, stepping_intervals, union
from diloco_fleet.metrics import RunMetrics
from diloco_fleet.report import Report, compute_report


class Verdict(StrEnum):
    """How a scenario ended."""

    PASSED = "passed"
    FAILED = "failed"
    """Something that was to hold did not, or a fault did not happen as planned."""
    ABORTED = "aborted"
    """Given up before its end: its abort condition, no steady state, or the fleet has ended."""
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the fleet came to while it was watched; None where that cannot be told.

    Attributes:
        window_s: how long that was.
        goodput: share of this time, over all learners, that was spent in inner steps.
        uptime: share of this time in which some learner was in an inner step.
        participation: contributors over live learners.
        measured_h: inner steps between two merges of one fragment.
        rounds: committed rounds on the final lineage.
        rounds_lost: of the whole run, see ``lineage.lost_rounds``.
        leader_changes: terms that began meanwhile.
        tokens: tokens that the learners trained on.
        learners: those of whose inner steps there is something written, whenever that was.
        restarts: processes that were started again meanwhile.
    """

    window_s: float
    goodput: float | None
    uptime: float | None
    participation: float | None
    measured_h: float | None
    rounds: int | None
    rounds_lost: int | None
    leader_changes: int | None
    tokens: int | None
    learners: int | None
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was to hold.

    Attributes:
        name: what.
        wanted: the bound, in words.
        found: what was found, in words.
        holds: whether it does.
    """

    name: str
    wanted: str
    found: str
    holds: bool


def compute_figures(
    metrics: RunMetrics, *, num_learners: int, begin: float, end: float, restarts: int
) -> Figures:
    """Computes the figures of a span of unix time; what must not be lost is counted of all time."""
    if not metrics.rounds and not metrics.steps:
        return Figures(
            window_s=end - begin,
            restarts=restarts,
            **dict.fromkeys(
                (
                    *("goodput", "uptime", "participation", "measured_h", "rounds"),
                    *("rounds_lost", "leader_changes", "tokens", "learners"),
                )
            ),
        )
    whole = _report(metrics, num_learners)
    # Steps that only ended after this time were under way in it.
    window = (begin, end)
    stepping = [clip(stepping_intervals(x), window) for x in metrics.steps.values()]
    window_s = max(end - begin, 1e-9)
    covered_s = length(union([span for spans in stepping for span in spans]))
    inside = _report(_within(metrics, begin, end), num_learners)
    return Figures(
        window_s=end - begin,
        goodput=sum(map(length, stepping)) / (num_learners * window_s) if stepping else None,
        uptime=covered_s / window_s if stepping else None,
        participation=inside.participation,
        measured_h=inside.measured_h,
        rounds=inside.rounds,
        rounds_lost=whole.rounds_lost if metrics.steps else None,
        leader_changes=sum(begin <= change.time <= end for change in whole.leader_changes),
        tokens=inside.tokens,
        learners=sum(map(is_learner, metrics.steps)),
        restarts=restarts,
    )


def _report(metrics: RunMetrics, num_learners: int) -> Report:
    return compute_report(metrics, run_id="", num_learners=num_learners, settings={})


def _within(metrics: RunMetrics, begin: float, end: float) -> RunMetrics:
    return replace(
        metrics,
        steps={
            name: tuple(step for step in steps if begin <= step.time <= end)
            for name, steps in metrics.steps.items()
        },
        rounds=tuple(entry for entry in metrics.rounds if begin <= entry.time <= end),
    )


def check_all(conductor: Conductor, figures: Figures, sync_interval: int | None) -> list[Check]:
    """Checks that there was an experiment at all, the hypothesis, then every strike.

    Args:
        conductor: has conducted the scenario to its end.
        figures: of the time it was watched.
        sync_interval: the setting of H; None where nobody tells.
    """
    if conductor.phase is not Phase.OVER or conductor.progress is None:
        return []
    found: dict[str, float | None] = {
        "uptime": figures.uptime,
        "goodput": figures.goodput,
        "participation": figures.participation,
        "measured_h": None
        if figures.measured_h is None or sync_interval is None
        else abs(figures.measured_h / sync_interval - 1.0),
        "rounds_lost": figures.rounds_lost,
        "without_merging_s": conductor.longest_without_merging_s,
        "leader_changes": figures.leader_changes,
        "expired": len(conductor.expired),
        "silent_s": conductor.longest_silence_s,
        "crashes": sum(conductor.crashes.values()),
    }
    scenario = conductor.scenario
    return [
        *check_evidence(conductor, figures),
        *check_hypothesis(scenario.steady, found),
        *(check_strike(record, scenario.duration_s) for record in conductor.records),
    ]


def check_evidence(conductor: Conductor, figures: Figures) -> list[Check]:
    """Says whether something was struck, and whether the fleet's metrics tell of that time.

    Without that, a hypothesis holds of nothing. Metrics may miss a few rounds that were seen: a
    line is lost with the process that was about to write it. But every learner has contributed, and
    what only one that wrote nothing has applied would be missed among the rounds lost.
    """
    num_learners = sum(map(is_learner, conductor.names))
    num_records, num_rounds = len(conductor.records), figures.rounds or 0
    struck = sum(record.happened for record in conductor.records)
    checks = [
        Check(
            name="rounds",
            wanted=f"metrics tell of at least half of the {conductor.merges} that were seen",
            found=str(num_rounds),
            holds=num_rounds > 0 and 2 * num_rounds >= conductor.merges,
        ),
        Check(
            name="tokens",
            wanted="metrics tell of some",
            found=str(figures.tokens or 0),
            holds=bool(figures.tokens),
        ),
        Check(
            name="learners",
            wanted=f"metrics tell of steps of all {num_learners}",
            found=str(figures.learners or 0),
            holds=(figures.learners or 0) >= num_learners,
        ),
    ]
    if conductor.scenario.faults:
        found = f"{struck} of {num_records}"
        checks.append(Check(name="strikes", wanted="at least 1", found=found, holds=struck > 0))
    return checks


_AT_LEAST: Final = frozenset({"uptime", "goodput", "participation"})
_UNITS: Final[Mapping[str, str]] = MappingProxyType({"without_merging_s": " s", "silent_s": " s"})
_ROUNDING: Final = 1e-9
_LEAST_SHARE: Final = 0.5
"""Of a fault that lasts: less than that was no such fault."""


def check_hypothesis(steady: Hypothesis, found: Mapping[str, float | None]) -> list[Check]:
    """Compares what was asked with what was found, by the name of the query."""
    checks = []
    for name, bound in steady.asked.items():
        value, unit = found[name], _UNITS.get(name, "")
        if name in _AT_LEAST:
            wanted, holds = f"at least {bound:g}", value is not None and value >= bound - _ROUNDING
        elif name == "measured_h":
            wanted, holds = f"within {bound:g} of its setting", value is not None and value <= bound
        else:
            wanted, holds = f"at most {bound:g}{unit}", value is not None and value <= bound
        shown = "cannot be told" if value is None else f"{value:.4g}{unit}"
        checks.append(Check(name=name, wanted=wanted, found=shown, holds=holds))
    return checks


def check_strike(record: Record, end_s: float) -> Check:
    """Says whether a strike happened, and the fleet was as before within its bound.

    One that chance drew and that found nobody to strike breaks nothing.

    Args:
        record: what became of it.
        end_s: when whatever lasts was to be healed, seconds since the fleet was steady.
    """
    name = f"{record.fault.fault} {record.strike.number}"
    bound_s = record.fault.recovery_s
    wanted = f"as before within {bound_s:g} s"
    if record.problem:
        return Check(name=name, wanted="happens and is healed", found=record.problem, holds=False)
    if record.began_s is None:
        why = record.held or (f"no {record.strike.on}" if record.strike.on else "it ended before")
        by_chance = record.fault.mtbf_s is not None
        return Check(name=name, wanted="happens", found=f"did not: {why}", holds=by_chance)
    short = _cut_short(record, end_s)
    if short:
        return Check(name=name, wanted="lasts", found=short, holds=False)
    recovery_s = record.recovery_s
    if recovery_s is None:
        return Check(name=name, wanted=wanted, found="is not as before", holds=False)
    return Check(name=name, wanted=wanted, found=f"{recovery_s:.1f} s", holds=recovery_s <= bound_s)


def _cut_short(record: Record, end_s: float) -> str:
    """Says how a strike was held up until little of it was left before the end, if it was."""
    fault = record.fault
    if not fault.at_s or fault.duration_s is None or None in (record.began_s, record.healed_s):
        return ""
    assert record.began_s is not None, "see above"
    assert record.healed_s is not None, "see above"
    lasted_s = record.healed_s - record.began_s
    planned_s = min(fault.duration_s, end_s - record.strike.at_s)
    if lasted_s >= _LEAST_SHARE * planned_s:
        return ""
    return f"{lasted_s:.1f} s of {planned_s:.1f} s: {record.held or 'it was healed early'}"


def decide(checks: Sequence[Check], *, stopped: str, interrupted: bool) -> Verdict:
    """Returns the verdict."""
    if interrupted:
        return Verdict.INTERRUPTED
    if stopped:
        return Verdict.ABORTED
    fine = bool(checks) and all(check.holds for check in checks)
    return Verdict.PASSED if fine else Verdict.FAILED
