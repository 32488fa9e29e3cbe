"""``diloco run``: a whole fleet on this machine, from the settings to the report."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console

from decoupled_diloco.config import click_options
from decoupled_diloco.errors import EXIT_OK, DilocoError, Reason, UsageError
from decoupled_diloco.logs import LOG_FORMATS
from decoupled_diloco.settings import RunSettings
from diloco_fleet.director import Director
from diloco_fleet.fleet_settings import FleetSettings, Resolved, resolve
from diloco_fleet.going_back import forget_resume, resume_from
from diloco_fleet.journal import FleetJournal
from diloco_fleet.local import Bounds, Outcome, Supervisor
from diloco_fleet.metrics import FLEET, last_outcome, last_round
from diloco_fleet.plan import Plan, make_plan
from diloco_fleet.prepare import existing_run, new_run, with_corpus, write_run
from diloco_fleet.process import Restart, RestartPolicy
from diloco_fleet.report_text import summary_lines
from diloco_fleet.reporting import make_report
from diloco_fleet.run_files import RUNS_FOLDER, RunFiles, hold_run, new_run_id, refuse_running
from diloco_fleet.screen import Screen, open_screen
from diloco_fleet.standby import write_standby
from diloco_fleet.status import StatusPoller
from diloco_fleet.view import pages_line
from learner_client.train.presets import PRESETS
from learner_client.train.settings import TrainSettings

_RUN_FLAGS = (
    "quorum",
    "grace",
    "num_fragments",
    "sync_interval",
    "merge",
    "codec_up",
    "codec_down",
    "replication",
    "data_mode",
)
_FLEET_FLAGS = (
    *("data", "pace", "slow_learner", "restart", "max_restarts", "recover"),
    *("redis", "standby", "device", "evaluate_every", "port"),
)

_TRAINER = TrainSettings()


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="TOML file with sections [run], [trainer], [fleet].",
)
@click.option("--learners", "num_learners", type=int, help="planned learners, M [default: 4]")
@click.option(
    "--global-steps",
    "total_global_steps",
    type=int,
    help="length of the run, T; 0 is without end [default: 800]",
)
@click_options(RunSettings, include=_RUN_FLAGS)
@click.option(
    "--preset", help=f"size of the model: {', '.join(PRESETS)} [default: {_TRAINER.preset}]"
)
@click.option(
    "--batch-size", type=int, help=f"sequences per inner step [default: {_TRAINER.batch_size}]"
)
@click.option(
    "--sequence-length",
    type=int,
    help=f"tokens per sequence [default: {_TRAINER.sequence_length}]",
)
@click.option(
    "--learning-rate",
    type=float,
    help=f"peak of the inner learning rate [default: {_TRAINER.learning_rate}]",
)
@click.option("--precision", help=f"fp32 or bf16 [default: {_TRAINER.precision}]")
@click.option("--seed", type=int, help=f"of model and data order [default: {_TRAINER.seed}]")
@click_options(FleetSettings, include=_FLEET_FLAGS)
@click.option("--name", "run_id", help="id of the run [default: date and a word]")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="directory of the run [default: runs/NAME]",
)
@click.option("--resume", is_flag=True, help="go on with the run of --name or --run-dir")
@click.option(
    "--snapshot",
    help="with --resume: go back to this snapshot of the whole fleet: latest, TERM.STEP or STEP",
)
@click.option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    default="text",
    show_default=True,
    help="format of the logs of all processes",
)
def command(
    config: Path | None,
    run_dir: Path | None,
    resume: bool,
    snapshot: str | None,
    log_format: str,
    **flags: object,
) -> int:
    """Train a model with a whole fleet on this machine.

    Starts a synchronizer (with --standby two, and a Redis for them to meet on), an evaluator and
    the learners, restarts what dies, shows what happens, and leaves the model, the figures and a
    picture in the run directory. Ctrl-C drains, a second one kills.

    A setting comes from its flag, else from the variable DILOCO_..., else from the file, else
    it has its default. Settings without a flag go into the file.
    """
    if snapshot is not None and not resume:
        raise UsageError(
            Reason.CONFIG_CONFLICT, "--snapshot goes with --resume: a new run has no snapshot"
        )
    prepare = _resume if resume else _begin
    with prepare(config, run_dir, flags) as (files, given):
        if resume and snapshot is None and has_ended(files, given.run.value.total_global_steps):
            return _nothing_to_resume(files)
        resolved = with_corpus(files, given)
        plan = make_plan(resolved, files, os.environ, log_format=log_format)
        write_run(files, resolved)
        if plan.redis is not None:
            write_standby(files, plan.redis)
        forget_resume(files)
        if snapshot is not None:
            resume_from(files, resolved.run.value.run_id, snapshot, click.echo)
    return _run(files, resolved, plan)


@contextmanager
def _begin(
    config: Path | None, run_dir: Path | None, flags: dict[str, object]
) -> Iterator[tuple[RunFiles, Resolved]]:
    """Resolves the settings and creates the run directory; undone if the body fails."""
    run_id = new_run_id(datetime.now(), random.Random())
    resolved = resolve(flags, os.environ, config, default_run_id=run_id)
    with new_run(run_dir or RUNS_FOLDER / resolved.run.value.run_id) as files:
        yield files, resolved


@contextmanager
def _resume(
    config: Path | None, run_dir: Path | None, flags: dict[str, object]
) -> Iterator[tuple[RunFiles, Resolved]]:
    """Finds the run directory and takes the settings from it, except for those given."""
    name = flags.pop("run_id")
    if run_dir is None and name is None:
        raise UsageError(Reason.CONFIG_INVALID, "--resume needs --name or --run-dir: which run?")
    if flags["data"]:
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            "--data cannot be given with --resume: a run keeps its corpus; begin a new run",
        )
    files = existing_run(run_dir or RUNS_FOLDER / str(name))
    refuse_running(files)
    yield files, resolve(flags, os.environ, config or files.config, default_run_id=files.root.name)


def _run(files: RunFiles, resolved: Resolved, plan: Plan) -> int:
    """Supervises the fleet and writes the report; returns the exit code."""
    console = Console()
    screen = open_screen(console, click.echo)
    journal = FleetJournal(files.metrics_of(FLEET), screen.say)
    fleet = resolved.fleet.value
    poller = StatusPoller(plan.address)
    supervisor = Supervisor(
        files=files,
        run_id=resolved.run.value.run_id,
        address=plan.address,
        pages=plan.pages,
        synchronizers=plan.synchronizers,
        redis=plan.redis.process if plan.redis is not None else None,
        leader=lambda: plan.synchronizer_at(poller.snapshot().leader),
        evaluator=plan.evaluator,
        learners=plan.learners,
        policy=RestartPolicy(
            restart=Restart(fleet.restart),
            max_restarts=fleet.max_restarts,
            max_wait_s=fleet.restart_wait_s,
        ),
        bounds=Bounds(drain_s=fleet.drain_s, finish_s=fleet.finish_s),
        journal=journal,
        is_complete=lambda: is_complete(files, resolved.run.value.total_global_steps),
    )
    with closing(journal), hold_run(files):
        outcome = _supervise(
            files=files,
            resolved=resolved,
            plan=plan,
            supervisor=supervisor,
            poller=poller,
            screen=screen,
            journal=journal,
        )
        if outcome.word != "killed":
            finish(files, screen, outcome.word)
    if outcome.error is not None:
        raise outcome.error
    return outcome.exit_code


def _supervise(
    *,
    files: RunFiles,
    resolved: Resolved,
    plan: Plan,
    supervisor: Supervisor,
    poller: StatusPoller,
    screen: Screen,
    journal: FleetJournal,
) -> Outcome:
    said = (f"run directory {files.root}", pages_line(plan.pages), *resolved.describe())
    for line in said:
        screen.say(line)
    journal.record("start", address=plan.address, pid=os.getpid())
    with ExitStack() as stack:
        stack.enter_context(_stop_signals(supervisor.request_stop))
        stack.enter_context(poller)
        stack.enter_context(screen)
        director = Director(
            files=files,
            run_id=resolved.run.value.run_id,
            address=plan.address,
            supervisor=supervisor,
            poller=poller,
            screen=screen,
            journal=journal,
        )
        outcome = supervisor.run(director.tick)
    journal.record("end", f"run {outcome.word}", outcome=outcome.word)
    return outcome


def is_complete(files: RunFiles, total_global_steps: int) -> bool:
    """Whether a synchronizer has committed the last global step."""
    newest = last_round(files.metrics)
    return newest is not None and 0 < total_global_steps <= newest.global_step


def has_ended(files: RunFiles, total_global_steps: int) -> bool:
    """Whether a run is complete and the model of its last global step is there."""
    return (
        is_complete(files, total_global_steps)
        and last_outcome(files.metrics) == "complete"
        and files.model.is_dir()
    )


def _nothing_to_resume(files: RunFiles) -> int:
    newest = last_round(files.metrics)
    assert newest is not None
    click.echo(
        f"already complete at global step {newest.global_step}: {files.root}; a higher "
        "--global-steps goes on, --snapshot goes back"
    )
    if not files.report.is_file():
        finish(files, open_screen(Console(), click.echo), "complete")
    return EXIT_OK


@contextmanager
def _stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal call ``stop``."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, lambda *_: stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(files: RunFiles, screen: Screen, word: str) -> None:
    """Writes the report and shows its figures; a failure here is said and stops nothing.

    Args:
        files: the run directory.
        screen: takes lines for people.
        word: how the run ended; who does not wait for the report changes nothing in it.
    """
    screen.say("writing the report, picture and sample")
    try:
        with _stop_signals(_interrupt):
            report = make_report(files)
    except DilocoError as error:
        screen.say(f"no report: {error.message}")
        return
    except KeyboardInterrupt:
        screen.say(
            f"no report: interrupted; the run is {word} all the same, and `diloco report "
            f"{files.root}` makes the report"
        )
        return
    for line in summary_lines(report):
        screen.say(line)
    screen.say(f"report, picture and model: {files.root}")


def _interrupt() -> None:
    raise KeyboardInterrupt
