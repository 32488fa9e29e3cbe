"""The ``diloco`` command; each of its commands lives in a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import click

from decoupled_diloco.config import cli_errors
from diloco_fleet.early_look import refuse_resume_of_running

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "run": "Train a model with a whole fleet on this machine.",
        "prepare": "Prepare a run whose processes are started by other means than `diloco run`.",
        "status": "Show what a running fleet does now.",
        "snapshot": "Take a consistent snapshot of a running fleet, or list those of a run.",
        "quorum": "Show the minimum quorum of a running fleet, or set it.",
        "drain": "Ask a learner to finish its step and leave.",
        "rollback": "Put one fragment back to what it was before its last update.",
        "chaos": "Do things to a fleet on purpose, and see what holds.",
        "generate": "Sample text from the model of a run.",
        "report": "Compute the report of the run directory RUN again from its metrics.",
        "version": "Print the versions of diloco and of what it builds on.",
    }
)
"""What each command does, by name; ``commands/NAME.py`` holds it as ``command``."""


class _Commands(click.Group):
    """Imports a command when it is asked for: some of them take seconds to import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"diloco_fleet.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[:1] == ["run"]:
            refuse_resume_of_running(args[1:])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Click's own asks every command, and so imports them all.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def diloco() -> None:
    """Pre-training that never stops: independent learners, one synchronizer, no waiting."""


@cli_errors
def main(arguments: Sequence[str] | None = None) -> object:
    """Runs the ``diloco`` command and exits."""
    return diloco.main(arguments, prog_name="diloco", standalone_mode=False)


if __name__ == "__main__":
    main()
