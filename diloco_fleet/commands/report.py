"""``diloco report``: computes the report of a run again from its metrics."""

from __future__ import annotations

from pathlib import Path

import click

from diloco_fleet.prepare import existing_run
from diloco_fleet.report_text import summary_lines
from diloco_fleet.reporting import make_report
from diloco_fleet.run_files import RUNS_FOLDER


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    """Compute the report of the run directory RUN again from its metrics.

    The id of a run in the folder runs is enough. Writes report.json, report.md and loss.png into
    the run directory; works while the fleet is running, too.
    """
    files = existing_run(run, RUNS_FOLDER / run)
    for line in summary_lines(make_report(files)):
        click.echo(line)
    click.echo(f"written: {files.report}")
