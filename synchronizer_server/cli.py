"""``diloco-synchronizer``: the entry point of a synchronizer process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from decoupled_diloco import fault_points
from decoupled_diloco.config import cli_errors, click_options, load_settings
from decoupled_diloco.errors import EXIT_OK, Reason, UsageError
from decoupled_diloco.logs import configure_logging
from decoupled_diloco.settings import RunSettings
from synchronizer_server.going_back import LATEST, go_back
from synchronizer_server.server import Server
from synchronizer_server.settings import ServerSettings
from synchronizer_server.store.disk import DiskStore

T = TypeVar("T")

SECTIONS: dict[str, type[Any]] = {"run": RunSettings, "synchronizer": ServerSettings}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The synchronizer of Decoupled DiLoCo."""


@cli.command()
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="TOML file with settings."
)
@click.option(
    "--trainer-json-file",
    type=click.Path(path_type=Path),
    help="File with the settings of the shipped trainer, served to all learners.",
)
@click_options(ServerSettings)
@click_options(RunSettings, exclude=("trainer_json",))
def serve(config_file: Path | None, trainer_json_file: Path | None, **flags: object) -> int:
    """Serves one run until SIGTERM."""
    if trainer_json_file is not None:
        try:
            flags["trainer_json"] = trainer_json_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                Reason.CONFIG_INVALID, f"--trainer-json-file cannot be read: {error}"
            ) from error
    run = _load(RunSettings, "run", flags, config_file)
    settings = _load(ServerSettings, "synchronizer", flags, config_file)
    configure_logging(
        log_format="json" if settings.log_format == "json" else "text", process="synchronizer"
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(run, settings))


@cli.command()
@click.option("--store", type=click.Path(path_type=Path), required=True, help="The store.")
@click.option("--run-id", required=True, help="The run that it holds.")
@click.option(
    "--snapshots", type=click.Path(path_type=Path), help="The snapshots [default: in the store]."
)
@click.option("--snapshot", default=LATEST, show_default=True, help="TERM.STEP, STEP or latest.")
def restore(store: Path, run_id: str, snapshots: Path | None, snapshot: str) -> int:
    """Goes back to a snapshot: the next start of a synchronizer goes on from it."""
    with contextlib.closing(DiskStore(store, run_id, snapshots=snapshots)) as disk:
        click.echo(go_back(disk, snapshot).describe())
    return EXIT_OK


def _load(cls: type[T], section: str, flags: dict[str, object], file: Path | None) -> T:
    others = {name: other for name, other in SECTIONS.items() if name != section}
    return load_settings(
        cls, flags=flags, environ=os.environ, file=file, section=section, others=others
    ).value


async def _serve(run: RunSettings, settings: ServerSettings) -> int:
    return await Server(run, settings).serve()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Uvloop where it is installed; asyncio's own loop otherwise."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@cli_errors
def main() -> object:
    """Runs the command line."""
    fault_points.arm(os.environ)
    return cli.main(standalone_mode=False)


if __name__ == "__main__":
    main()
