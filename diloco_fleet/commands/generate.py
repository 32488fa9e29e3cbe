"""``diloco generate``: text from a run's model."""

from __future__ import annotations

from pathlib import Path

import click

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.run_files import RUNS_FOLDER, RunFiles, find_run
from diloco_fleet.sample import sample_text


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), help="run [default: the newest]")
@click.option("--model", type=click.Path(path_type=Path), help="folder of an exported model")
@click.option("--prompt", default="The ", show_default=True, help="beginning of the text")
@click.option("--tokens", type=int, default=200, show_default=True, help="tokens to add")
@click.option(
    "--temperature",
    type=float,
    default=0.8,
    show_default=True,
    help="0 takes the likeliest token, 1 the model's own distribution",
)
@click.option(
    "--top-k", type=int, default=0, show_default=True, help="among the k likeliest; 0 for all"
)
@click.option("--seed", type=int, default=0, show_default=True, help="of the sampling")
def command(
    *,
    run_dir: Path | None,
    model: Path | None,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> None:
    """Sample text from the model of a run."""
    if run_dir is not None and model is not None:
        raise UsageError(Reason.CONFIG_CONFLICT, "give --run-dir or --model, not both")
    if model is None:
        files = RunFiles(run_dir) if run_dir else find_run(RUNS_FOLDER, running=False)
        model = files.model
    click.echo(
        sample_text(
            model, prompt, num_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )
    )
