"""``diloco status``: what a running fleet does now."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from decoupled_diloco.errors import CATALOGUE, EXIT_OK, DilocoError, Reason, UsageError
from decoupled_diloco.plain import to_plain
from diloco_fleet.metrics import EVALUATOR, last_evaluation
from diloco_fleet.run_files import (
    RUNS_FOLDER,
    FleetFile,
    RunFiles,
    find_run,
    is_running,
    read_fleet,
)
from diloco_fleet.screen import open_screen
from diloco_fleet.status import Seen, Snapshot, StatusClient, StatusPoller, newest
from diloco_fleet.view import Eta, Scene, process_table, render

_SILENCE = {
    "running": "the fleet runs and its synchronizer does not answer right now: it is starting or "
    "being restarted, and the learners train on",
    "finishing": "the run is complete; its synchronizer does not answer any more",
    "draining": "the fleet drains; its synchronizer does not answer right now",
    "ended": "the processes of the fleet have ended; its report is being written",
}
"""What it means that the synchronizer of a fleet is silent, by the state in ``fleet.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A fleet to look at; without a run directory only its synchronizer is known."""

    address: str
    files: RunFiles | None

    def fleet(self) -> FleetFile | None:
        return read_fleet(self.files.fleet) if self.files else None

    def is_running(self) -> bool:
        """Whether a fleet is known to be at work, whatever its synchronizer does."""
        return self.files is not None and is_running(self.files)


@click.command()
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="run directory [default: the newest running fleet below runs/]",
)
@click.option(
    "--address",
    help="host:port of a synchronizer (several: separated by commas), not a run directory",
)
@click.option("--json", "as_json", is_flag=True, help="everything, as one JSON object")
@click.option("--watch", is_flag=True, help="until the run is complete, or Ctrl-C")
@click.option("--insecure", is_flag=True, help="allow plaintext to another machine")
def command(
    run_dir: Path | None, address: str | None, as_json: bool, watch: bool, insecure: bool
) -> int:
    """Show what a running fleet does now."""
    if run_dir is not None and address is not None:
        raise UsageError(Reason.CONFIG_CONFLICT, "give --run-dir or --address, not both")
    if watch and as_json:
        raise UsageError(Reason.CONFIG_CONFLICT, "give --watch or --json, not both")
    target = _target(run_dir, address)
    seen = _ask(target, insecure=insecure)
    status = newest(seen)
    if watch:
        _watch(target, insecure=insecure)
        return EXIT_OK
    if as_json:
        fleet = target.fleet()
        values = {
            "address": target.address,
            "status": to_plain(status) if status else None,
            "synchronizers": [{"address": x.address, "role": x.role, "term": x.term} for x in seen],
            "fleet": dataclasses.asdict(fleet) if fleet else None,
        }
        click.echo(json.dumps(values, indent=2))
    elif status is not None:
        snapshot = Snapshot(status=status, away_s=0.0, layout=None, synchronizers=seen)
        Console().print(render(_scene(target, snapshot, Eta())))
    else:
        _show_silence(target)
    return EXIT_OK if status is not None else CATALOGUE[Reason.UNAVAILABLE].exit_code


def _ask(target: _Target, *, insecure: bool) -> tuple[Seen, ...]:
    """Asks the synchronizers; nobody may answer where their fleet is at work all the same.

    Raises:
        DilocoError: UNAVAILABLE where no fleet is known to be at work.
    """
    client = StatusClient(target.address, insecure=insecure)
    try:
        return client.look()
    except DilocoError as error:
        if error.reason is Reason.UNAVAILABLE and target.is_running():
            return ()
        raise
    finally:
        client.close()


def _show_silence(target: _Target) -> None:
    """Shows what the supervisor knows of a fleet whose synchronizer does not answer."""
    fleet = target.fleet()
    assert fleet is not None, "found by its file"
    click.echo(f"{fleet.run_id}  {fleet.address}  {fleet.state}")
    click.echo(_SILENCE.get(fleet.state, _SILENCE["running"]))
    Console().print(process_table(_processes(fleet)))


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
    phase = fleet.state if fleet else ""
    return Scene(
        run_id=status.run_id if status else "",
        address=target.address,
        phase=phase,
        status=status,
        away_s=snapshot.away_s,
        eta_s=eta.of(time.monotonic(), status, phase=phase, away_s=snapshot.away_s),
        evaluation=evaluation,
        processes=_processes(fleet) if fleet else {},
        synchronizers=snapshot.synchronizers,
        pages=fleet.pages if fleet else (),
    )


def _processes(fleet: FleetFile) -> dict[str, tuple[str, int]]:
    return {entry.name: (entry.state, entry.restarts) for entry in fleet.processes}
