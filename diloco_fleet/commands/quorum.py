"""``diloco quorum``: shows or sets the minimum quorum of a running fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.v1 import admin_pb2
from diloco_fleet.operator_client import OperatorClient, fleet_address, fleet_options

_SET_WORDS: Final = 2
_MAX_DIGITS: Final = 18
_TOO_MANY: Final = 2**32


@click.command()
@click.argument("what", nargs=-1, metavar="[set K]")
@fleet_options
def command(
    what: tuple[str, ...], run_dir: Path | None, address: str | None, insecure: bool
) -> None:
    """Show the minimum quorum of a running fleet, or set it.

    `diloco quorum` shows K, the learners that a round needs, and how many are live;
    `diloco quorum set 3` sets it. With more than are live merging waits for more, and the learners
    train on. It holds until it is set again, whatever is restarted.
    """
    quorum = _wanted(what)
    with OperatorClient(fleet_address(run_dir, address), insecure=insecure) as client:
        if quorum is not None:
            client.set_quorum(quorum)
        click.echo(describe(client.status()))


def describe(status: admin_pb2.GetStatusResponse) -> str:
    """The quorum in words, with what it means for the learners that are there."""
    num_live = sum(x.state == "live" and not x.quarantine for x in status.learners)
    text = f"quorum {status.quorum}, {num_live} learners live"
    if num_live < status.quorum:
        text += ": merging waits for more, the learners train on"
    return text


def _wanted(what: tuple[str, ...]) -> int | None:
    if not what:
        return None
    if what[0] != "set" or len(what) != _SET_WORDS or not what[1].isdecimal():
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"{' '.join(what)!r} is not understood; `diloco quorum` shows the quorum, `diloco "
            "quorum set 3` sets it",
        )
    quorum = int(what[1]) if len(what[1]) <= _MAX_DIGITS else _TOO_MANY
    if not 1 <= quorum < _TOO_MANY:
        raise UsageError(
            Reason.CONFIG_INVALID, f"quorum is {what[1][:20]}; at least 1, below {_TOO_MANY}"
        )
    return quorum
