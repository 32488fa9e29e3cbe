"""The supervisor of a fleet on one machine: starts it, restarts what dies, ends it in order.

A run goes through ``running`` and then either ``finishing`` (every learner has seen the last
global step) or ``draining`` (somebody asked for it, or the run cannot go on). Both are a list of
stages; a stage is over when all its processes have ended, and every step of its escalation has a
bound: nothing waits for ever.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from decoupled_diloco.errors import (
    CATALOGUE,
    EXIT_DRAINED,
    EXIT_OK,
    DilocoError,
    Reason,
    reason_of,
)
from diloco_fleet.journal import FleetJournal
from diloco_fleet.process import Process, ProcessSpec, RestartPolicy, State, describe_exit
from diloco_fleet.run_files import FleetFile, RunFiles

_KILL_WAIT_S: Final = 10.0
_AS_TOLD: Final = (EXIT_OK, EXIT_DRAINED, -signal.SIGTERM)
"""Exit codes of a process that did what SIGTERM asks for."""


class Phase(StrEnum):
    """Phase of the fleet; the state in ``fleet.json``."""

    RUNNING = "running"
    FINISHING = "finishing"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long the end of a fleet may take.

    Attributes:
        drain_s: from SIGTERM to SIGKILL, per stage.
        finish_s: for the last learners after the first has finished, and for the evaluator.
        interval_s: between two looks at the processes.
    """

    drain_s: float = 30.0
    finish_s: float = 300.0
    interval_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        word: ``complete``, ``drained``, ``killed`` or ``failed``.
        exit_code: for the supervisor to return.
        error: why, where the run failed.
    """

    word: str
    exit_code: int
    error: DilocoError | None = None


@dataclass(slots=True)
class _Stage:
    """Processes to see the end of, and what to do about those that take too long."""

    processes: list[Process]
    escalation: list[tuple[signal.Signals | None, float]]
    deadline: float | None = None


class Supervisor:
    """Runs the processes of one fleet.

    Args:
        files: the run directory.
        run_id: id of the run.
        address: where the synchronizer listens.
        synchronizer: its process; a run cannot go on without.
        evaluator: its process; it ends by itself after the last global step.
        learners: their processes; they end by themselves after the last global step.
        policy: when to start a process again.
        bounds: of the end.
        journal: takes what happens.
        is_complete: says whether the last global step has been committed.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        *,
        files: RunFiles,
        run_id: str,
        address: str,
        synchronizer: ProcessSpec,
        evaluator: ProcessSpec,
        learners: Sequence[ProcessSpec],
        policy: RestartPolicy,
        bounds: Bounds,
        journal: FleetJournal,
        is_complete: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = Phase.RUNNING
        self._files = files
        self._run_id = run_id
        self._address = address
        self._synchronizer = Process(synchronizer, policy, files.root)
        self._evaluator = Process(evaluator, policy, files.root)
        self._learners = [Process(spec, policy, files.root) for spec in learners]
        self._bounds = bounds
        self._journal = journal
        self._is_complete = is_complete
        self._clock = clock
        self._started = time.time()
        self._stages: list[_Stage] = []
        self._num_requests = 0
        self._error: DilocoError | None = None
        self._killed = False
        self._asked = False

    @property
    def processes(self) -> list[Process]:
        """Every process, in the order in which they are started."""
        return [self._synchronizer, self._evaluator, *self._learners]

    def request_stop(self) -> None:
        """Asks for a drain; asked again, kills. Safe in a signal handler."""
        self._num_requests += 1

    def run(self, tick: Callable[[], None]) -> Outcome:
        """Runs the fleet to its end.

        Args:
            tick: called between two looks at the processes, about ten times a second.

        Raises:
            DilocoError: when a process cannot be started at all.
        """
        try:
            for process in self.processes:
                process.start(self._clock())
                self._journal.record("spawn", process=process.name, pid=process.pid)
            self._publish()
            while self.phase is not Phase.ENDED:
                self._look()
                tick()
                time.sleep(self._bounds.interval_s)
        finally:
            self._kill_rest()
        self._publish()
        return self._outcome()

    def _look(self) -> None:
        """One look at everything: ends, restarts, requests, stages."""
        now = self._clock()
        changed = False
        for process in self.processes:
            if process.poll(now):
                changed = True
                self._note_end(process)
            if self.phase is not Phase.DRAINING and process.restart_if_due(now):
                changed = True
                self._journal.record(
                    "restart",
                    f"{process.name} started again as pid {process.pid} "
                    f"(restart {process.num_restarts})",
                    process=process.name,
                    pid=process.pid,
                )
        phase = self.phase
        self._obey_requests()
        if self.phase is Phase.RUNNING:
            self._check_progress()
        if self.phase in (Phase.FINISHING, Phase.DRAINING):
            self._advance(now)
        if changed or phase is not self.phase:
            self._publish()

    def _note_end(self, process: Process) -> None:
        assert process.exit_code is not None
        how = describe_exit(process.exit_code)
        words = process.last_words() if process.state is State.FAILED else ""
        sentence = {
            State.DONE: f"{process.name} has finished",
            State.STOPPED: f"{process.name} has stopped"
            + ("" if process.exit_code in _AS_TOLD else f" ({how})"),
            State.WAITING: f"{process.name} died ({how}); it starts again",
            State.FAILED: f"{process.name} ended ({how}) and is not started again"
            + (f": {words}" if words else "")
            + f"; see {process.spec.log}",
        }[process.state]
        self._journal.record(
            "exit",
            sentence,
            process=process.name,
            exit_code=process.exit_code,
            state=process.state.value,
        )

    def _obey_requests(self) -> None:
        if self._num_requests > 1 and not self._killed:
            self._killed = True
            self._journal.record("kill", "asked again: killing every process")
            self._kill_rest()
            self.phase = Phase.ENDED
        elif self._num_requests == 1 and not self._asked and self.phase is not Phase.DRAINING:
            self._asked = True
            if self.phase is Phase.FINISHING or self._is_complete():
                self._hurry()
            else:
                self._drain("draining: learners finish their step and leave; once more kills")

    def _check_progress(self) -> None:
        """Notices that the run is complete or cannot go on."""
        if self._synchronizer.ended:
            self._fail(self._synchronizer)
        elif any(learner.state is State.DONE for learner in self._learners):
            self._finish()
        elif all(learner.ended for learner in self._learners):
            failed = [learner for learner in self._learners if learner.state is State.FAILED]
            self._fail((failed or self._learners)[0])

    def _fail(self, process: Process) -> None:
        self._error = error_of(process)
        self._drain(f"the run cannot go on without {process.name}: draining")

    def _finish(self) -> None:
        self.phase = Phase.FINISHING
        by_itself = (None, self._bounds.finish_s)
        self._stages = [
            _Stage(self._learners, [by_itself, *self._told()]),
            _Stage([self._evaluator], [by_itself, *self._told()]),
            _Stage([self._synchronizer], self._told()),
        ]

    def _hurry(self) -> None:
        """Ends a complete run as soon as the model is there."""
        self.phase = Phase.FINISHING
        self._journal.record(
            "drain",
            "the run is complete: learners leave, the evaluator exports the model; once more kills",
        )
        self._stages = [
            _Stage(self._learners, self._told()),
            _Stage([self._evaluator], [(None, self._bounds.drain_s), *self._told()]),
            _Stage([self._synchronizer], self._told()),
        ]

    def _drain(self, sentence: str) -> None:
        self.phase = Phase.DRAINING
        self._journal.record("drain", sentence)
        groups = [self._learners, [self._evaluator], [self._synchronizer]]
        self._stages = [_Stage(group, self._told()) for group in groups]

    def _told(self) -> list[tuple[signal.Signals | None, float]]:
        """The escalation of a stage whose processes are told to stop."""
        return [(signal.SIGTERM, self._bounds.drain_s), (signal.SIGKILL, _KILL_WAIT_S)]

    def _advance(self, now: float) -> None:
        """Goes on with the current stage, and to the next ones as far as they are over."""
        while self._stages:
            stage = self._stages[0]
            # What waits for its restart ends here once it has been told to stop.
            if stage.deadline is None or now >= stage.deadline:
                self._escalate(stage, now)
            if not all(process.ended for process in stage.processes):
                return
            self._stages.pop(0)
        self.phase = Phase.ENDED

    def _escalate(self, stage: _Stage, now: float) -> None:
        number, bound_s = stage.escalation.pop(0) if stage.escalation else (signal.SIGKILL, 1.0)
        late = [process for process in stage.processes if not process.ended]
        if stage.deadline is not None and late:
            names = ", ".join(process.name for process in late)
            self._journal.record("late", f"{names} took too long: {number or 'waiting'}")
        stage.deadline = now + bound_s
        if number is not None:
            for process in late:
                process.stop(number)

    def _kill_rest(self) -> None:
        for process in self.processes:
            process.stop(signal.SIGKILL)
        give_up = time.monotonic() + _KILL_WAIT_S
        while time.monotonic() < give_up:
            for process in self.processes:
                process.poll(self._clock())
            if all(process.pid is None for process in self.processes):
                return
            time.sleep(0.01)

    def _outcome(self) -> Outcome:
        if self._killed:
            return Outcome(word="killed", exit_code=EXIT_DRAINED)
        # The evaluator is done once it has exported the model of the last global step.
        exported = self._evaluator.state is State.DONE
        if self._error is None and not self._asked and not exported:
            self._error = error_of(self._evaluator)
        if self._error is not None:
            code = CATALOGUE[self._error.reason].exit_code
            return Outcome(word="failed", exit_code=code, error=self._error)
        if not exported:
            return Outcome(word="drained", exit_code=EXIT_DRAINED)
        return Outcome(word="complete", exit_code=EXIT_OK)

    def _publish(self) -> None:
        content = FleetFile(
            run_id=self._run_id,
            address=self._address,
            pid=os.getpid(),
            state=self.phase.value,
            started=self._started,
            processes=tuple(process.entry() for process in self.processes),
        )
        try:
            content.write(self._files.fleet)
        except DilocoError as error:
            self._journal.warn(f"{error.message}; the fleet goes on")


def error_of(process: Process) -> DilocoError:
    """Returns why a process ended for good, as it said itself where it did."""
    how = describe_exit(process.exit_code) if process.exit_code is not None else "never ran"
    prefix, _, rest = process.last_words().partition(": ")
    code, _, message = rest.partition(": ")
    if prefix == "error" and code in Reason.__members__:
        return DilocoError(reason_of(code), f"{process.name}: {message}")
    return DilocoError(Reason.INTERNAL, f"{process.name} ended ({how}); see {process.spec.log}")
