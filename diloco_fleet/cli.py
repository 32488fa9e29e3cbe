"""The ``diloco`` command; each of its commands lives in a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

import click

from decoupled_diloco.config import cli_errors

COMMANDS: Final = ("run", "status", "generate", "report", "version")
"""Names of the commands; ``commands/NAME.py`` holds one as ``command``."""


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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def diloco() -> None:
    """Pre-training that never stops: independent learners, one synchronizer, no waiting."""


@cli_errors
def main(arguments: Sequence[str] | None = None) -> object:
    """Runs the ``diloco`` command and exits."""
    return diloco.main(arguments, prog_name="diloco", standalone_mode=False)


if __name__ == "__main__":
    main()
