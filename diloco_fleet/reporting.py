"""Makes the report of a run directory from what lies in it."""

from __future__ import annotations

import dataclasses
from typing import Final

from decoupled_diloco.errors import UsageError
from diloco_fleet.fleet_settings import Resolved, resolve
from diloco_fleet.metrics import FLEET, RunMetrics, read_metrics
from diloco_fleet.plots import plot_losses
from diloco_fleet.report import Report, compute_report
from diloco_fleet.report_text import write_report
from diloco_fleet.run_files import RunFiles
from diloco_fleet.sample import sample_text

_PROMPT: Final = "The "
_SAMPLE_TOKENS: Final = 300


def make_report(files: RunFiles) -> Report:
    """Computes the report of a run and writes ``report.json``, ``report.md`` and ``loss.png``.

    Raises:
        UsageError: CONFIG_INVALID for a damaged ``config.toml``.
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    resolved = resolve({}, {}, files.config, default_run_id=files.root.name)
    metrics = read_metrics(files.metrics)
    run = resolved.run.value
    report = compute_report(
        metrics,
        run_id=run.run_id,
        num_learners=run.num_learners,
        settings=settings_of_run(resolved),
        outcome=_outcome(metrics),
        sample=_sample(files, resolved.trainer.value.seed),
    )
    write_report(files, report)
    plot_losses(metrics, files.root / "loss.png", title=f"run {run.run_id}")
    return report


def settings_of_run(resolved: Resolved) -> dict[str, dict[str, object]]:
    """Returns all settings by section, without what is secret or repeats another section."""
    fleet = dataclasses.asdict(resolved.fleet.value)
    run = dataclasses.asdict(resolved.run.value)
    del fleet["redis"], run["trainer_json"]
    return {"run": run, "trainer": dataclasses.asdict(resolved.trainer.value), "fleet": fleet}


def _outcome(metrics: RunMetrics) -> str:
    ends = metrics.marks_of(FLEET, "end")
    return str(ends[-1].values.get("outcome", "unknown")) if ends else "unknown"


def _sample(files: RunFiles, seed: int) -> str:
    """Text from the model; empty for a run that has none."""
    if not files.model.is_dir():
        return ""
    try:
        return sample_text(files.model, _PROMPT, num_tokens=_SAMPLE_TOKENS, seed=seed)
    except UsageError as error:
        return f"(no sample: {error.message})"
