"""``diloco-learner``: the entry points of a learner and of the evaluator."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from decoupled_diloco import fault_points
from decoupled_diloco.channel import tune_allocator
from decoupled_diloco.config import cli_errors, click_options, load_settings
from decoupled_diloco.logs import configure_logging
from learner_client.settings import EvaluatorSettings, LearnerSettings

T = TypeVar("T")

SECTIONS: dict[str, type[Any]] = {"learner": LearnerSettings, "evaluator": EvaluatorSettings}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The shipped trainer of Decoupled DiLoCo."""


def _config_option(command: Callable[..., int]) -> Callable[..., int]:
    kind = click.Path(path_type=Path)
    return click.option("--config", "config_file", type=kind, help="TOML file with settings.")(
        command
    )


@cli.command("train")
@_config_option
@click_options(LearnerSettings)
def train_command(config_file: Path | None, **flags: object) -> int:
    """Trains one learner until the run is complete."""
    from learner_client.train.identity import identified

    settings = identified(_load(LearnerSettings, "learner", flags, config_file))
    _begin(settings.log_format, settings.learner_id)
    from learner_client.train.loop import train
    from learner_client.train.stopping import stop_on_signals

    return train(settings, stop_on_signals())


@cli.command("evaluate")
@_config_option
@click_options(EvaluatorSettings)
def evaluate_command(config_file: Path | None, **flags: object) -> int:
    """Watches a run, measures the published copy, exports the model at the end."""
    settings = _load(EvaluatorSettings, "evaluator", flags, config_file)
    _begin(settings.log_format, "evaluator")
    from learner_client.train.evaluator import run_evaluator
    from learner_client.train.stopping import stop_on_signals

    return run_evaluator(settings, stop_on_signals())


def _load(cls: type[T], section: str, flags: dict[str, object], file: Path | None) -> T:
    others = {name: other for name, other in SECTIONS.items() if name != section}
    return load_settings(
        cls, flags=flags, environ=os.environ, file=file, section=section, others=others
    ).value


def _begin(log_format: str, process: str) -> None:
    tune_allocator()
    configure_logging(log_format="json" if log_format == "json" else "text", process=process)


@cli_errors
def main() -> object:
    """Runs the command line."""
    fault_points.arm(os.environ)
    return cli.main(standalone_mode=False)


if __name__ == "__main__":
    main()
