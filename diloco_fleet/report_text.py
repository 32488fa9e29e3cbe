"""The report of a run as Markdown, and what is written into the run directory at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from diloco_fleet.data_ledger import DataLedger
from diloco_fleet.goodput import GAP_FACTOR
from diloco_fleet.report import Report
from diloco_fleet.run_files import RunFiles
from learner_client.files import write_atomically

_DEFINITIONS: Final = f"""\
- **loss**: mean over held-out text in nats per token, of the published copy (what all learners
  share), before the first round and after the last one.
- **window**: from the beginning of the fleet's first inner step to the last committed round; for
  a run that was resumed, the sum over its sessions.
- **goodput**: time that the learners spent in inner steps, over planned learners times window. An
  inner step occupies the time since the learner's step before it ended; after a gap of more than
  {GAP_FACTOR:g} of its median steps, and at the first step of a life, only its own duration, and
  at most one median step. The pause of `--pace` is part of a step.
- **uptime**: share of the window in which at least one learner was in an inner step.
- **participation**: contributors over live learners, both summed over all rounds.
- **measured H**: inner steps between two merges of one fragment, mean over all contributions.
- **rounds lost**: rounds that a learner applied and that are not on the final lineage: a version
  named in a learner's metrics is lost when a later term of leadership began at an earlier global
  step, or when what was committed there has another digest.
- **leader changes**: terms of leadership after the first, without those that begin with a start of
  the fleet; each leaves the fleet without merging from the last round before it to its own first.
- **merging waited**: for how long a round, or the seed, waited for each reason, from when log and
  status told of it until it went on; shorter waits are part of any round and not told.
- **starts of the fleet** (where it was resumed): how often `diloco run` began or went on.
- **bytes per parameter per sync**: bytes up and down, over parameters per fragment times live
  learners summed over all rounds: what one learner moves per parameter in a full cycle of
  fragments. Bytes down count every watcher, the evaluator too.
- **step overhead**: time inside `learner.step` beyond the user's own step, over all inner steps;
  its share is of the whole loop.
- **tokens merged**: tokens of the contributions, over the number of fragments.
- **data** (where it is leased): a sample is merged once it is in every fragment; open samples were
  on lease, or waited for a new holder, when the run ended. Samples that a learner gave back, since
  it died or left, are trained by another one; at most these were trained by two.
- **restarts**: processes that the supervisor started again.
"""


def write_report(files: RunFiles, report: Report) -> None:
    """Writes ``report.json`` and ``report.md``.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    values = json.dumps(_plain(report.to_dict()), indent=2, ensure_ascii=False)
    _write(files.root / "report.json", values + "\n")
    _write(files.report, markdown(report))


def _write(path: Path, text: str) -> None:
    content = text.encode("utf-8", errors="replace")

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def _plain(value: object) -> object:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def markdown(report: Report) -> str:
    """Returns the content of ``report.md``."""
    parts = [
        f"# Run {report.run_id}\n\nOutcome: {report.outcome}.\n",
        _table(("figure", "value"), _figures(report)),
        "![Losses](loss.png)\n",
        _contributions(report),
        _waits(report),
        _leadership(report),
        _problems(report),
        _sample(report),
        f"## How the figures are computed\n\n{_DEFINITIONS}",
        _settings(report),
    ]
    return "\n".join(part for part in parts if part)


def summary_lines(report: Report) -> list[str]:
    """Returns the figures that a terminal shows at the end of a run."""
    figures = _figures(report)
    width = max(len(name) for name, _ in figures)
    return [f"{name:<{width}}  {value}" for name, value in figures]


def _figures(report: Report) -> list[tuple[str, str]]:
    overhead = report.step_overhead
    return [
        ("evaluation loss before", _number(report.evaluation_loss_before, "nats per token")),
        ("evaluation loss after", _number(report.evaluation_loss_after, "nats per token")),
        ("tokens", f"{report.tokens:,}"),
        ("tokens merged", f"{report.tokens_merged:,}"),
        ("tokens per second", _number(report.tokens_per_second)),
        ("rounds", f"{report.rounds:,}"),
        ("rounds lost", f"{report.rounds_lost:,}"),
        ("goodput", _share(report.goodput)),
        ("uptime", _share(report.uptime)),
        ("window", _number(report.window_s, "s")),
        ("participation", _share(report.participation)),
        ("measured H", _number(report.measured_h, "inner steps")),
        ("bytes per parameter per sync", _number(report.bytes_per_parameter_per_sync)),
        ("merging waited", _waited(report)),
        ("leader changes", _changes(report)),
        *([("starts of the fleet", str(report.fleet_starts))] if report.fleet_starts > 1 else []),
        ("restarts", f"{report.restarts}{_by_process(report.restarts_by_process)}"),
        (
            "step overhead",
            "-"
            if overhead is None
            else f"median {overhead.median_s * 1e3:.2f} ms, p99 {overhead.p99_s * 1e3:.2f} ms, "
            f"{overhead.share:.2%} of the loop",
        ),
        *([] if report.data is None else [("data", _ledger(report.data))]),
    ]


def _ledger(data: DataLedger) -> str:
    passes = "" if data.passes is None else f" ({data.passes:.2f} passes)"
    lost = f", {data.unlisted:,} of them in rounds without a line" if data.unlisted else ""
    return (
        f"{data.leased:,} samples leased{passes}: {data.merged:,} merged{lost}, {data.open:,} "
        f"open; {data.twice:,} merged twice, {data.skipped:,} skipped; {data.returned:,} given back"
    )


def _number(value: float | None, unit: str = "") -> str:
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _by_process(restarts: Mapping[str, int]) -> str:
    names = ", ".join(f"{name} {count}" for name, count in restarts.items())
    return f" ({names})" if names else ""


def _table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; nothing in a cell ends the cell or the row."""
    cells = [names, ["---"] * len(names), *rows]
    lines = [
        " | ".join(" ".join(str(cell).split()).replace("|", r"\|") for cell in row) for row in cells
    ]
    return "".join(f"| {line} |\n" for line in lines)


def _contributions(report: Report) -> str:
    if not report.contributions:
        return ""
    by_count = ", ".join(
        f"{count} x {number}" for number, count in report.contributors_histogram.items()
    )
    rows = [
        (learner, count, f"{count / max(report.rounds, 1):.1%}")
        for learner, count in report.contributions.items()
    ]
    return (
        f"## Contributions\n\nRounds by number of contributors (rounds x contributors): "
        f"{by_count}.\n\n" + _table(("learner", "rounds contributed to", "share"), rows)
    )


def _waited(report: Report) -> str:
    return ", ".join(f"{_number(x.total_s, 's')} for {x.reason}" for x in report.waits) or "-"


def _waits(report: Report) -> str:
    if not report.waits:
        return ""
    names = ("waited for", "times", "in all", "longest", "the longest waited")
    rows = [
        (f"`{x.reason}`", x.times, _number(x.total_s, "s"), _number(x.longest_s, "s"),
         x.longest_detail)
        for x in report.waits
    ]  # fmt: skip
    return "## Merging waited\n\n" + _table(names, rows)


def _changes(report: Report) -> str:
    times = [x.without_merging_s for x in report.leader_changes if x.without_merging_s is not None]
    longest = f" (at most {max(times):.1f} s without merging)" if times else ""
    return f"{len(report.leader_changes)}{longest}"


def _leadership(report: Report) -> str:
    if not report.leader_changes:
        return ""
    names = ("term", "synchronizer", "began (UTC)", "goes on at", "without merging")
    rows = [
        (x.term, x.synchronizer, _clock(x.time), f"global step {x.global_step}",
         _number(x.without_merging_s, "s"))
        for x in report.leader_changes
    ]  # fmt: skip
    title = "## Leadership\n\nTerms that followed another one in a running fleet.\n\n"
    return title + _table(names, rows)


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%H:%M:%S")


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    lines = "\n".join(f"- {problem}" for problem in report.problems)
    return f"## Problems in the metrics\n\n{lines}\n"


def _sample(report: Report) -> str:
    if not report.sample:
        return ""
    quoted = "\n".join(f"    {line}" for line in report.sample.splitlines())
    return f"## A sample of the model's text\n\n{quoted}\n"


def _settings(report: Report) -> str:
    parts = ["## Settings\n"]
    for section, values in report.settings.items():
        rows = [(f"`{name}`", f"`{value}`") for name, value in values.items()]
        parts.append(f"### {section}\n\n" + _table(("setting", "value"), rows))
    return "\n".join(parts)
