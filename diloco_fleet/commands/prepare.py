"""``diloco prepare``: settings, corpus and key of a run that `diloco run` does not start."""

from __future__ import annotations

import os
from pathlib import Path

import click

from diloco_fleet.fleet_settings import resolve
from diloco_fleet.prepare import with_corpus, write_run
from diloco_fleet.run_files import RunFiles, hold_run
from diloco_fleet.standby import write_key
from learner_client.files import storage_errors
from learner_client.train.stopping import stop_on_signals


@click.command()
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="directory of the run; one that is prepared already keeps its corpus",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    help="file for the secret of synchronizers with peers; one that is there is kept",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="TOML file with sections [run], [trainer], [fleet] [default: that of the run, if any]",
)
def command(run_dir: Path, key_file: Path | None, config: Path | None) -> None:
    """Prepare a run whose processes are started by other means than `diloco run`.

    Writes corpus and settings into the directory of the run: config.toml (all of them),
    synchronizer.toml and trainer.json (for `diloco-synchronizer serve --config ...
    --trainer-json-file ...`). Learners and evaluator get the directory as --run-dir.

    A setting comes from the variable DILOCO_..., else from the file, else it has its default.
    """
    # What is half written is removed when the process is told to stop.
    stop_on_signals()
    files = RunFiles(run_dir.resolve())
    kept = files.config if files.config.is_file() else None
    resolved = resolve({}, os.environ, config or kept, default_run_id=files.root.name)
    with storage_errors(files.root, "creating"):
        files.root.mkdir(parents=True, exist_ok=True)
    with hold_run(files):
        resolved = with_corpus(files, resolved)
        write_run(files, resolved)
        with storage_errors(files.synchronizer_config, "writing"):
            files.synchronizer_config.write_text(resolved.run.to_toml(), encoding="utf-8")
        if key_file is not None:
            write_key(key_file)
    for line in resolved.describe():
        click.echo(line)
    click.echo(f"run {resolved.run.value.run_id} is prepared in {files.root}")
