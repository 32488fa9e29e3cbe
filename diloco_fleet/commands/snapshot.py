"""``diloco snapshot``: takes a consistent snapshot of a running fleet, or lists those of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import click

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.snapshots import SnapshotName
from decoupled_diloco.v1 import admin_pb2
from diloco_fleet.going_back import list_snapshots
from diloco_fleet.operator_client import OperatorClient, Patience, fleet_address, fleet_options
from diloco_fleet.run_files import RUNS_FOLDER, RunFiles, find_run

_POLL_S: Final = 0.2


@click.command()
@click.argument("what", nargs=-1, metavar="[list]")
@click.option("--wait/--no-wait", default=True, show_default=True, help="until it is complete")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.0), default=600.0, show_default=True,
    help="longest wait for the cut, and again for the learners' parts, seconds",
)  # fmt: skip
@fleet_options
def command(  # noqa: PLR0917 - click gives them by name
    what: tuple[str, ...], wait: bool, timeout_s: float, run_dir: Path | None, address: str | None,
    insecure: bool,
) -> None:  # fmt: skip
    """Take a consistent snapshot of a running fleet, or list those of a run.

    The next round that is committed becomes its cut; every learner records its part without
    stopping. `diloco run --resume --snapshot NAME` goes on from it. `diloco snapshot list` shows
    the complete ones of a run directory.
    """
    if what == ("list",):
        if address is not None:
            raise UsageError(Reason.CONFIG_CONFLICT, "list reads a run directory: give --run-dir")
        files = RunFiles(run_dir) if run_dir else find_run(RUNS_FOLDER, running=False)
        click.echo("\n".join(list_snapshots(files)))
        return
    if what:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"{' '.join(what)!r} is not understood; `diloco snapshot` takes one, `diloco snapshot "
            "list` shows them",
        )
    with OperatorClient(fleet_address(run_dir, address), insecure=insecure) as client:
        name = client.take_snapshot(timeout_s=timeout_s, say=_say)
        if not wait:
            click.echo(f"snapshot {name} has begun")
            return
        click.echo(_outcome(name, _wait(client, name, timeout_s)))


def _say(line: str) -> None:
    click.echo(line, err=True)


def _wait(client: OperatorClient, name: str, timeout_s: float) -> admin_pb2.SnapshotStatus:
    """Waits until a snapshot is over; returns what is known of the last one."""
    first = f"snapshot {name} has begun; waiting until it is complete"
    waiting = Patience(client, timeout_s, _say, first, subject="snapshot ")
    while True:
        status = client.status()
        snapshot = status.snapshot
        if snapshot.last and SnapshotName.parse(snapshot.last) >= SnapshotName.parse(name):
            return snapshot
        if snapshot.pending != name:
            raise DilocoError(
                Reason.SNAPSHOT_FAILED,
                f"snapshot {name} was abandoned: the synchronizer has changed; take another one",
            )
        waiting.go_on(
            f"snapshot {name} is not complete within {timeout_s:g} s; it goes on all the same: see "
            "`diloco status`",
            status,
        )
        time.sleep(_POLL_S)


def _outcome(name: str, snapshot: admin_pb2.SnapshotStatus) -> str:
    """What became of it, in words.

    Raises:
        DilocoError: SNAPSHOT_FAILED.
    """
    if snapshot.last != name:
        return f"snapshot {name} is over; the newest complete one is {snapshot.complete}"
    if snapshot.failure:
        raise DilocoError(Reason.SNAPSHOT_FAILED, f"snapshot {name} failed: {snapshot.failure}")
    lines = [f"snapshot {name} is complete, of {', '.join(snapshot.participants)}"]
    lines += [f"left out: {k}: {v}" for k, v in sorted(snapshot.left_out.items())]
    return "\n".join(lines)
