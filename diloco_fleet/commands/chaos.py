"""``diloco chaos``: experiments on a fleet: faults, what must hold meanwhile, and a verdict."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from decoupled_diloco.errors import EXIT_DRAINED, EXIT_OK, DilocoError, Reason, UsageError
from diloco_fleet.chaos.alone import alone_at
from diloco_fleet.chaos.scenario import Scenario
from diloco_fleet.chaos.scenario_file import SHIPPED, load_scenario
from diloco_fleet.chaos.schedule import Strike, draw_schedule
from diloco_fleet.run_files import RUNS_FOLDER, RunFiles

if TYPE_CHECKING:
    from diloco_fleet.chaos.injector import Injector
    from diloco_fleet.chaos.result import Result
    from diloco_fleet.chaos.runner import Interruption, World

EXIT_NOT_PASSED: Final = 1
"""Exit code of a scenario whose verdict is failed or aborted."""

_ALL: Final = "all"


@click.group()
def command() -> None:
    """Do things to a fleet on purpose, and see what holds."""


@command.command("list")
def list_command() -> None:
    """List the shipped scenarios with what they show."""
    width = max(map(len, SHIPPED))
    for name in SHIPPED:
        click.echo(f"{name:<{width}}  {load_scenario(name).about}")


@command.command("run")
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@click.option("--short", is_flag=True, help="the short form: less than a minute of faults")
@click.option(
    "--injector",
    type=click.Choice(["process", "docker"]),
    default="process",
    show_default=True,
    help="who does the faults: to processes of this machine, or to containers",
)
@click.option("--seed", type=int, default=0, show_default=True, help="decides every choice")
@click.option(
    "--attach",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="run directory, or id below runs/, of a running fleet; else one is started",
)
@click.option(
    "--project",
    default="decoupled-diloco",
    show_default=True,
    help="docker: project of the composed fleet",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="folder of the result [default: runs/chaos-SCENARIO-DATE]",
)
def run_command(
    *,
    scenarios: tuple[str, ...],
    short: bool,
    injector: str,
    seed: int,
    attach: Path | None,
    project: str,
    out: Path | None,
) -> int:
    """Run scenarios, one after the other: names of shipped ones, paths of TOML files, or all.

    A scenario starts a fleet of its own (process), or works on the composed one (docker). It waits
    for a steady state, does its faults, heals everything, whatever happens, and judges: chaos.json,
    chaos.md and chaos.png in its folder. Exit code 0 where every verdict is passed, 1 where one is
    not, 64 where one is refused, before any begins, 143 where it was interrupted.
    """
    if _ALL in scenarios and len(scenarios) > 1:
        raise UsageError(Reason.CONFIG_CONFLICT, "all is every shipped scenario; give it alone")
    names = list(SHIPPED) if scenarios == (_ALL,) else list(scenarios)
    if attach is not None and injector != "process":
        raise UsageError(Reason.CONFIG_CONFLICT, "--attach goes with --injector process")
    if out is not None and len(names) > 1:
        raise UsageError(Reason.CONFIG_CONFLICT, "--out takes the result of one scenario")
    loaded = [load_scenario(name, short=short) for name in names]
    if attach is not None and not _exists(attach):
        attach = RUNS_FOLDER / attach
    with _alone(injector, attach, project), _interruptible() as interruption:
        world = _make_world(interruption)

        def begin(scenario: Scenario, number: int) -> _Experiment:
            name = scenario.name if number == 0 else f"{scenario.name}-{number}"
            folder = out or RUNS_FOLDER / f"chaos-{name}-{datetime.now():%Y%m%d-%H%M%S}"
            schedule = draw_schedule(scenario, seed)
            hands = _make_injector(injector, scenario, schedule, folder, attach, project, world)
            return _Experiment(scenario, seed, schedule, hands, folder)

        # Whatever can be refused is, before the first one begins.
        for scenario in loaded:
            _refuse(begin(scenario, 0))
        verdicts = [
            _run_one(begin(scenario, loaded[:place].count(scenario)), world, of=len(loaded))
            for place, scenario in enumerate(loaded)
            if not interruption.why
        ]
    for scenario, verdict in zip(loaded, verdicts, strict=False) if len(loaded) > 1 else ():
        world.say(f"{scenario.name}: {verdict}")
    if interruption.why:
        return EXIT_DRAINED
    return EXIT_OK if all(x == "passed" for x in verdicts) else EXIT_NOT_PASSED


def _alone(injector: str, attach: Path | None, project: str) -> AbstractContextManager[None]:
    """Keeps others away from a fleet that is there already; nobody knows of one yet to start."""
    if injector == "docker":
        return alone_at(f"project {project}")
    return alone_at(f"{attach.resolve()}") if attach is not None else nullcontext()


@dataclass(frozen=True, slots=True)
class _Experiment:
    """A scenario with everything that it needs."""

    scenario: Scenario
    seed: int
    schedule: tuple[Strike, ...]
    hands: Injector
    folder: Path


def _refuse(experiment: _Experiment) -> None:
    """Refuses what cannot be done, and lets go of the injector: nothing was started."""
    from diloco_fleet.chaos.injector import refuse_impossible

    scenario, seed = experiment.scenario, experiment.seed
    try:
        refuse_impossible(experiment.hands, scenario)
    finally:
        experiment.hands.__exit__()
    if not experiment.schedule:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"scenario {scenario.name}: seed {seed} draws no strike within "
            f"{scenario.duration_s:g} s; choose another --seed, or a shorter mtbf_s",
        )


def _run_one(experiment: _Experiment, world: World, *, of: int) -> str:
    """Runs one scenario and writes its result; returns its verdict.

    One of several that cannot be done after all does not stop the others.
    """
    try:
        return str(_run(experiment, world).verdict)
    except DilocoError as error:
        if of == 1:
            raise
        world.say(f"error: {error}")
        return f"{error.reason}"


def _run(experiment: _Experiment, world: World) -> Result:
    # Not at the top: it imports torch, for which `diloco chaos list` does not wait.
    from diloco_fleet.chaos.result import summary_lines, write_result
    from diloco_fleet.chaos.runner import run_scenario
    from diloco_fleet.chaos.timeline import write_timeline
    from learner_client.files import storage_errors

    scenario, folder = experiment.scenario, experiment.folder
    with experiment.hands as hands:
        with storage_errors(folder, "creating"):
            folder.mkdir(parents=True, exist_ok=True)
        result, metrics = run_scenario(
            scenario, experiment.schedule, hands, world, seed=experiment.seed
        )
        # Before leaving: what fails then takes no result with it.
        for line in summary_lines(result):
            world.say(line)
        write_result(folder, result)
        write_timeline(folder, result, metrics)
        world.say(f"result: {folder}")
    return result


def _make_injector(  # noqa: PLR0917 - each is one option
    name: str,
    scenario: Scenario,
    schedule: tuple[Strike, ...],
    folder: Path,
    attach: Path | None,
    project: str,
    world: World,
) -> Injector:
    _check_folder(folder, is_new=name != "docker" and attach is None)
    if name == "docker":
        from diloco_fleet.chaos.docker_injector import connect

        return connect(project)
    from diloco_fleet.chaos.process_injector import AttachedInjector, ProcessInjector

    if attach is not None:
        return AttachedInjector(RunFiles(attach.resolve()))
    return ProcessInjector(
        scenario,
        schedule,
        folder,
        os.environ,
        world.say,
        times_asked=lambda: world.interruption.times,
    )


def _check_folder(folder: Path, *, is_new: bool) -> None:
    """Refuses a folder that a result cannot go to, or would take from another one."""
    from diloco_fleet.chaos.result import RESULT_NAME

    if not _exists(folder):
        return
    if not folder.is_dir():
        why = "is no folder"
    elif is_new:
        why = "already exists"
    elif _exists(folder / f"{RESULT_NAME}.json"):
        why = "has a result already"
    else:
        return
    raise UsageError(Reason.CONFIG_CONFLICT, f"{folder} {why}; choose another --out", path=folder)


def _exists(path: Path) -> bool:
    """Whether something is there.

    Raises:
        UsageError: CONFIG_INVALID where nobody can tell: the name is too long, its folder closed.
    """
    try:
        return path.exists()
    except OSError as error:
        raise UsageError(
            Reason.CONFIG_INVALID, f"{path} cannot be looked at: {error.strerror}", path=path
        ) from error


def _make_world(interruption: Interruption) -> World:
    from diloco_fleet.chaos.runner import World

    return World(say=_say, interruption=interruption)


def _say(line: str) -> None:
    # A terminal that is closed, or a pipe, ends no scenario half-way.
    with suppress(OSError):
        click.echo(line)


@contextmanager
def _interruptible() -> Iterator[Interruption]:
    """Ctrl-C, SIGTERM and a closed terminal ask for the end; nothing is left half healed."""
    from diloco_fleet.chaos.runner import Interruption

    interruption = Interruption()

    def stop(number: int, _: object) -> None:
        interruption.why = signal.Signals(number).name
        interruption.times += 1

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What is ignored stays so: that is what nohup is for.
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
