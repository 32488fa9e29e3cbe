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
    EXIT_TOLD_TO_LEAVE,
    DilocoError,
    Reason,
    reason_of,
)
from diloco_fleet.journal import FleetJournal
from diloco_fleet.process import Process, ProcessSpec, RestartPolicy, State, describe_exit
from diloco_fleet.run_files import FleetFile, RunFiles
from diloco_fleet.stages import KILL_WAIT_S, Stage, Step, told

_AS_TOLD: Final = (EXIT_OK, EXIT_TOLD_TO_LEAVE, EXIT_DRAINED, -signal.SIGTERM)
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


class Supervisor:
    """Runs the processes of one fleet.

    Args:
        files: the run directory.
        run_id: id of the run.
        address: where the synchronizers listen, separated by commas.
        synchronizers: their processes; a run cannot go on without any.
        evaluator: its process; it ends by itself after the last global step.
        learners: their processes; they end by themselves after the last global step.
        policy: when to start a process again.
        bounds: of the end.
        journal: takes what happens.
        is_complete: says whether the last global step has been committed.
        redis: what synchronizers with a standby meet on; its death stops nothing.
        leader: name of the synchronizer that leads, where that is known.
        clock: monotonic, seconds.
        pages: where a browser finds the status page of each synchronizer.
    """

    def __init__(
        self,
        *,
        files: RunFiles,
        run_id: str,
        address: str,
        synchronizers: Sequence[ProcessSpec],
        evaluator: ProcessSpec,
        learners: Sequence[ProcessSpec],
        policy: RestartPolicy,
        bounds: Bounds,
        journal: FleetJournal,
        is_complete: Callable[[], bool],
        redis: ProcessSpec | None = None,
        leader: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        pages: Sequence[str] = (),
    ) -> None:
        self.phase = Phase.RUNNING
        self._files = files
        self._run_id = run_id
        self._address = address
        self._pages = tuple(pages)
        self._redis = [Process(redis, policy, files.root)] if redis is not None else []
        self._synchronizers = [Process(spec, policy, files.root) for spec in synchronizers]
        self._evaluator = Process(evaluator, policy, files.root)
        self._learners = [Process(spec, policy, files.root) for spec in learners]
        self._bounds = bounds
        self._journal = journal
        self._is_complete = is_complete
        self._leader = leader
        self._clock = clock
        self._started = time.time()
        self._stages: list[Stage] = []
        self._num_requests = 0
        self._error: DilocoError | None = None
        self._killed = False
        self._asked = False

    @property
    def processes(self) -> list[Process]:
        """Every process, in the order in which they are started."""
        return [*self._redis, *self._synchronizers, self._evaluator, *self._learners]

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
            State.DRAINED: f"{process.name} is drained: it has left and is not started again",
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
        if all(process.ended for process in self._synchronizers):
            self._fail(self._synchronizers[0])
        elif any(learner.state is State.DONE for learner in self._learners):
            self._finish()
        elif all(learner.ended for learner in self._learners):
            failed = [x for x in self._learners if x.state is not State.DRAINED]
            if failed:
                self._fail(failed[0])
            else:
                self._asked = True
                self._drain("an operator has drained every learner: draining the fleet")

    def _fail(self, process: Process) -> None:
        self._error = error_of(process)
        self._drain(f"the run cannot go on without {process.name}: draining")

    def _finish(self) -> None:
        self.phase = Phase.FINISHING
        by_itself: Step = (None, self._bounds.finish_s)
        self._end_with(learners=[by_itself, *self._told()], evaluator=[by_itself, *self._told()])

    def _hurry(self) -> None:
        """Ends a complete run as soon as the model is there."""
        self.phase = Phase.FINISHING
        self._journal.record(
            "drain",
            "the run is complete: learners leave, the evaluator exports the model; once more kills",
        )
        wait: Step = (None, self._bounds.drain_s)
        self._end_with(learners=self._told(), evaluator=[wait, *self._told()])

    def _drain(self, sentence: str) -> None:
        self.phase = Phase.DRAINING
        self._journal.record("drain", sentence)
        self._end_with(learners=self._told(), evaluator=self._told())

    def _end_with(self, *, learners: list[Step], evaluator: list[Step]) -> None:
        """Learners, evaluator, synchronizers and last what these meet on; who leads goes last."""
        self._stages = [
            Stage(lambda: self._learners, learners),
            Stage(lambda: [self._evaluator], evaluator),
            Stage(self._followers, self._told()),
            Stage(lambda: self._synchronizers, self._told()),
            Stage(lambda: self._redis, self._told()),
        ]

    def _followers(self) -> list[Process]:
        """Synchronizers that may go first: all but who leads, where it is known who does."""
        leader = self._leader()
        others = [process for process in self._synchronizers if process.name != leader]
        return others if len(others) < len(self._synchronizers) else []

    def _told(self) -> list[Step]:
        return told(self._bounds.drain_s)

    def _advance(self, now: float) -> None:
        """Goes on with the current stage, and to the next ones as far as they are over."""
        while self._stages:
            if not self._stages[0].advance(now, lambda what: self._journal.record("late", what)):
                return
            self._stages.pop(0)
        self.phase = Phase.ENDED

    def _kill_rest(self) -> None:
        for process in self.processes:
            process.stop(signal.SIGKILL)
        give_up = time.monotonic() + KILL_WAIT_S
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
            pages=self._pages,
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
