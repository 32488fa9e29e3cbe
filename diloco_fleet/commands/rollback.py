"""``diloco rollback``: puts one fragment of a running fleet back to its version before."""

from __future__ import annotations

from pathlib import Path

import click

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.operator_client import OperatorClient, fleet_address, fleet_options


@click.command()
@click.argument("fragment", type=click.IntRange(min=0, max=2**32 - 1))
@click.option("--reason", required=True, help="why; the round record keeps it")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.0), default=600.0, show_default=True,
    help="longest wait for the round that does it, seconds",
)  # fmt: skip
@fleet_options
def command(  # noqa: PLR0917 - click gives them by name
    fragment: int, reason: str, timeout_s: float, run_dir: Path | None, address: str | None,
    insecure: bool,
) -> None:  # fmt: skip
    """Put one fragment back to what it was before its last update.

    The next round of FRAGMENT merges nothing: it publishes the older content as a new version,
    without momentum, to every learner. What learners have trained on that fragment since is lost.
    """
    if not reason.strip():
        raise UsageError(Reason.CONFIG_INVALID, "--reason is empty; say why, the record keeps it")
    with OperatorClient(fleet_address(run_dir, address), insecure=insecure) as client:
        answer = client.roll_back(fragment, reason, timeout_s=timeout_s, say=click.echo)
    version = answer.version
    click.echo(
        f"fragment {fragment} is put back: version {version.term}.{version.global_step}, "
        f"digest {version.digest.hex()[:12]}"
    )
