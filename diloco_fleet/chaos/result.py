"""The result of a scenario: JSON for machines, Markdown for people."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from diloco_fleet.chaos.judge import Check, Figures, Verdict
from diloco_fleet.chaos.record import Record
from diloco_fleet.chaos.scenario import Scenario
from learner_client.files import write_atomically

RESULT_NAME: Final = "chaos"
"""Name of the files of a result, without their endings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a scenario came to.

    Attributes:
        scenario: what was done.
        injector: how.
        seed: what decided its choices.
        verdict: the verdict.
        stopped: why it ended before its end; empty where it did not.
        figures: of the time from the steady state to the end.
        checks: everything that was to hold.
        records: what became of each strike.
        unhealed: what could not be healed, for people.
        unreadable: what could not be read of the fleet's metrics, for people.
        begin: unix time of the steady state; of the start where there was none.
        end: unix time of the end.
    """

    scenario: Scenario
    injector: str
    seed: int
    verdict: Verdict
    stopped: str
    figures: Figures
    checks: tuple[Check, ...]
    records: tuple[Record, ...]
    unhealed: tuple[str, ...]
    unreadable: tuple[str, ...]
    begin: float
    end: float

    @property
    def recovery_s(self) -> dict[str, float | None]:
        """Seconds from healing until the fleet was as before, by strike."""
        return {
            f"{record.fault.fault} {record.strike.number}": _rounded(record.recovery_s)
            for record in self.records
            if record.began_s is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``chaos.json``."""
        figures = asdict(self.figures)
        return {
            "scenario": self.scenario.name,
            "about": self.scenario.about,
            "injector": self.injector,
            "seed": self.seed,
            "duration_s": self.scenario.duration_s,
            "verdict": str(self.verdict),
            "stopped": self.stopped,
            **{name: _rounded(value, 6) for name, value in figures.items()},
            "recovery_s": self.recovery_s,
            "checks": [asdict(check) for check in self.checks],
            "strikes": [_strike(record) for record in self.records],
            "unhealed": list(self.unhealed),
            "unreadable": list(self.unreadable),
            "begin": self.begin,
            "end": self.end,
        }


def _strike(record: Record) -> dict[str, Any]:
    return {
        "number": record.strike.number,
        "fault": str(record.fault.fault),
        "who": record.whom,
        "planned_s": _rounded(record.strike.at_s),
        "on": record.strike.on,
        "targets": [list(group) for group in record.targets],
        "began_s": _rounded(record.began_s),
        "healed_s": _rounded(record.healed_s),
        "merging_s": _rounded(record.merging_s),
        "recovered_s": _rounded(record.recovered_s),
        "held": record.held,
        "problem": record.problem,
    }


def _rounded(value: float | None, digits: int = 3) -> float | None:
    # JSON has no other numbers.
    return None if value is None or not math.isfinite(value) else round(value, digits)


def write_result(folder: Path, result: Result) -> None:
    """Writes ``chaos.json`` and ``chaos.md``.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    text = json.dumps(result.to_dict(), indent=2, allow_nan=False)
    _write(folder / f"{RESULT_NAME}.json", f"{text}\n")
    _write(folder / f"{RESULT_NAME}.md", markdown(result))


def _write(path: Path, text: str) -> None:
    content = text.encode("utf-8", errors="replace")

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def markdown(result: Result) -> str:
    """Returns the content of ``chaos.md``."""
    lines = [f"# {result.scenario.name}: {result.verdict}", "", result.scenario.about, ""]
    lines += [f"By injector {result.injector}, seed {result.seed}."]
    lines += [f"It ended early: {result.stopped}."] if result.stopped else []
    lines += [f"**Not healed**: {what}." for what in result.unhealed]
    lines += [f"Not read: {what}." for what in result.unreadable]
    lines += ["", f"![Timeline]({RESULT_NAME}.png)", "", "| figure | |", "| --- | --- |"]
    lines += [_cells(name, value) for name, value in figure_rows(result.figures)]
    lines += ["", "| what was to hold | bound | found | |", "| --- | --- | --- | --- |"]
    lines += [
        _cells(check.name, check.wanted, check.found, "yes" if check.holds else "**no**")
        for check in result.checks
    ]
    lines += ["", "| strike | whom | planned | struck | healed | merging | as before | |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    lines += [_row(record) for record in result.records]
    lines += [
        "",
        "Times in seconds since the fleet was steady. Merging: the global step rose again, in a "
        "later term where who led was killed. As before: who was struck contributes again, and a "
        "standby is in sync again; this may be seen 2 s late.",
    ]
    return "\n".join(lines) + "\n"


def _row(record: Record) -> str:
    whom = " from ".join(", ".join(group) for group in record.targets) or record.whom
    times = (
        record.strike.at_s,
        record.began_s,
        record.healed_s,
        record.merging_s,
        record.recovered_s,
    )
    shown = ["" if moment is None else f"{moment:.1f}" for moment in times]
    return _cells(str(record.fault.fault), whom, *shown, record.problem or record.held)


def _cells(*texts: str) -> str:
    """A line of a table; no text ends its cell or its line."""
    return f"| {' | '.join(' '.join(text.split()).replace('|', '/') for text in texts)} |"


def figure_rows(figures: Figures) -> list[tuple[str, str]]:
    """Returns the figures as names and texts."""
    rows = []
    for name, value in asdict(figures).items():
        shown = "cannot be told" if value is None else f"{value:.4g}"
        rows.append((name, str(value) if isinstance(value, int) else shown))
    return rows


def summary_lines(result: Result) -> list[str]:
    """Returns what a terminal shows at the end."""
    lines = [f"{name:<16}{value}" for name, value in figure_rows(result.figures)]
    lines += [
        f"{'holds ' if check.holds else 'BROKEN'}  {check.name}: {check.found} ({check.wanted})"
        for check in result.checks
    ]
    lines += [f"not healed: {what}" for what in result.unhealed]
    lines += [f"not read: {what}" for what in result.unreadable]
    why = f", {result.stopped}" if result.stopped else ""
    return [*lines, f"{result.scenario.name}: {result.verdict}{why}"]
