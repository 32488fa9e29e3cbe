"""``diloco drain``: asks one learner of a running fleet to leave."""

from __future__ import annotations

from pathlib import Path

import click

from diloco_fleet.operator_client import OperatorClient, fleet_address, fleet_options


@click.command()
@click.argument("learner")
@click.option("--reason", default="", help="why, for the learner's log")
@fleet_options
def command(
    learner: str, reason: str, run_dir: Path | None, address: str | None, insecure: bool
) -> None:
    """Ask a learner to finish its step and leave.

    LEARNER is its id, as in `diloco status`. The others go on without it; nobody waits for it. It
    ends with exit code 80, and `diloco run` does not start it again: it stays out until its process
    is started anew, as by `diloco run --resume`.
    """
    with OperatorClient(fleet_address(run_dir, address), insecure=insecure) as client:
        is_asked = client.drain(learner, reason)
    told = "was asked to finish its step and leave" if is_asked else "is drained already"
    click.echo(f"{learner} {told}")
