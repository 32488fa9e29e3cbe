"""``diloco status``: what a running fleet does now."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.director import last_evaluation
from diloco_fleet.metrics import EVALUATOR
from diloco_fleet.plain import to_plain
from diloco_fleet.run_files import RUNS_FOLDER, FleetFile, RunFiles, find_run, read_fleet
from diloco_fleet.screen import open_screen
from diloco_fleet.status import Snapshot, StatusClient, StatusPoller
from diloco_fleet.view import Eta, Scene, render


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A fleet to look at; without a run directory only its synchronizer is known."""

    address: str
    files: RunFiles | None

    def fleet(self) -> FleetFile | None:
        return read_fleet(self.files.fleet) if self.files else None


@click.command()
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="run directory [default: the newest running fleet below runs/]",
)
@click.option("--address", help="host:port of a synchronizer, instead of a run directory")
@click.option("--json", "as_json", is_flag=True, help="everything, as one JSON object")
@click.option("--watch", is_flag=True, help="until the run is complete, or Ctrl-C")
@click.option("--insecure", is_flag=True, help="allow plaintext to another machine")
def command(
    run_dir: Path | None, address: str | None, as_json: bool, watch: bool, insecure: bool
) -> None:
    """Show what a running fleet does now."""
    if run_dir is not None and address is not None:
        raise UsageError(Reason.CONFIG_CONFLICT, "give --run-dir or --address, not both")
    if watch and as_json:
        raise UsageError(Reason.CONFIG_CONFLICT, "give --watch or --json, not both")
    target = _target(run_dir, address)
    client = StatusClient(target.address, insecure=insecure)
    try:
        status = client.status()
    finally:
        client.close()
    if watch:
        _watch(target, insecure=insecure)
    elif as_json:
        fleet = target.fleet()
        values = {
            "address": target.address,
            "status": to_plain(status),
            "fleet": dataclasses.asdict(fleet) if fleet else None,
        }
        click.echo(json.dumps(values, indent=2))
    else:
        snapshot = Snapshot(status=status, away_s=0.0, layout=None)
        Console().print(render(_scene(target, snapshot, Eta())))


def _target(run_dir: Path | None, address: str | None) -> _Target:
    if address is not None:
        return _Target(address=address, files=None)
    files = RunFiles(run_dir) if run_dir else find_run(RUNS_FOLDER, running=True)
    return _Target(address=read_fleet(files.fleet).address, files=files)


def _watch(target: _Target, *, insecure: bool) -> None:
    screen = open_screen(Console(), click.echo)
    eta = Eta()
    with StatusPoller(target.address, insecure=insecure) as poller, screen:
        while True:
            snapshot = poller.snapshot()
            screen.tick(lambda seen=snapshot: _scene(target, seen, eta))  # type: ignore[misc]
            if snapshot.status is not None and snapshot.status.state == "complete":
                return
            time.sleep(0.2)


def _scene(target: _Target, snapshot: Snapshot, eta: Eta) -> Scene:
    status, fleet = snapshot.status, target.fleet()
    evaluation = last_evaluation(target.files.metrics_of(EVALUATOR)) if target.files else None
    processes = (
        {entry.name: (entry.state, entry.restarts) for entry in fleet.processes} if fleet else {}
    )
    eta_s = None
    if status is not None:
        eta_s = eta.estimate(time.monotonic(), status.global_step, status.total_global_steps)
    return Scene(
        run_id=status.run_id if status else "",
        address=target.address,
        phase=fleet.state if fleet else "",
        status=status,
        away_s=snapshot.away_s,
        eta_s=eta_s,
        evaluation=evaluation,
        processes=processes,
    )
