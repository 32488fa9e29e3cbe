"""What a command line can be refused for before its command is imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from diloco_fleet.run_files import RUNS_FOLDER, RunFiles, refuse_running

_WHERE: Final = click.Command(
    "run",
    params=[
        click.Option(["--resume"], is_flag=True),
        click.Option(["--name"]),
        click.Option(["--run-dir"], type=click.Path(path_type=Path)),
    ],
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
"""The part of ``diloco run`` that says which run it is about."""


def refuse_resume_of_running(arguments: Sequence[str]) -> None:
    """Refuses ``diloco run --resume`` of a run that is running; what else is wrong is not said.

    Args:
        arguments: those of ``diloco run``.

    Raises:
        UsageError: CONFIG_CONFLICT.
    """
    given = _WHERE.make_context("run", list(arguments), resilient_parsing=True).params
    name, run_dir = given["name"], given["run_dir"]
    if given["resume"] and (run_dir or name):
        refuse_running(RunFiles((run_dir or RUNS_FOLDER / name).resolve()))
