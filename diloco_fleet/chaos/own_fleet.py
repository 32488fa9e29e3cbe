"""A fleet that is started for a scenario: that of ``diloco run``, with a link between any two."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.setting_fields import toml_value
from diloco_fleet.chaos.disks import Disks
from diloco_fleet.chaos.proxy import Proxies
from diloco_fleet.chaos.scenario import FleetShape
from diloco_fleet.chaos.wiring import Wiring
from diloco_fleet.fleet_settings import SECTIONS, Resolved, resolve
from diloco_fleet.journal import FleetJournal
from diloco_fleet.local import Bounds, Outcome, Supervisor
from diloco_fleet.metrics import FLEET
from diloco_fleet.plan import Plan, make_plan
from diloco_fleet.prepare import new_run, with_corpus, write_run
from diloco_fleet.process import RestartPolicy
from diloco_fleet.run_files import RunFiles, hold_run
from diloco_fleet.standby import write_standby

_OWN: Final = {
    "run": frozenset({"num_learners", "total_global_steps", "run_id"}),
    "fleet": frozenset({"standby"}),
}
"""Settings that are not a scenario's to choose, by section."""

_RESTARTS: Final = 1_000_000
_RESTART_WAIT_S: Final = 1.0
_LOOK_S: Final = 0.2


def resolve_shape(shape: FleetShape, run_id: str, environ: Mapping[str, str]) -> Resolved:
    """Resolves the settings of a fleet for a scenario; its run has no end of its own.

    Raises:
        UsageError: as ``diloco run`` does.
    """
    flags: dict[str, object] = {
        "num_learners": shape.learners,
        "standby": shape.standby,
        "total_global_steps": 0,
        "run_id": run_id,
    }
    for section, own in _OWN.items():
        for name in own.intersection(shape.settings.get(section, ())):
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"[fleet.{section}]: {name} is the scenario's own; see learners and standby",
            )
    text = "\n".join(
        f"[{section}]\n" + "".join(f"{toml_value(k)} = {_toml(v)}\n" for k, v in values.items())
        for section, values in shape.settings.items()
        if section in SECTIONS
    )
    with tempfile.TemporaryDirectory(prefix="diloco-chaos-") as folder:
        file = Path(folder) / "scenario.toml"
        file.write_text(text, encoding="utf-8")
        try:
            return resolve(flags, environ, file, default_run_id=run_id)
        except UsageError as error:
            # Nobody knows that file, which is gone when this is read.
            message = error.message.replace(str(file), "[fleet] of the scenario")
            raise UsageError(error.reason, message) from error


def _toml(value: object) -> str:
    return toml_value(tuple(value) if isinstance(value, list) else value)


class OwnFleet:
    """The processes of a fleet, their supervisor in a thread, and the links between them.

    Args:
        root: the run directory; it must not exist.
        resolved: settings.
        faults: gives what goes into the environment of the processes, for a run directory.
        disks: True for stores on small disks of their own.
        say: takes lines for people.

    Raises:
        UsageError: as ``diloco run`` does.
    """

    def __init__(
        self,
        root: Path,
        resolved: Resolved,
        *,
        faults: Callable[[RunFiles], Mapping[str, str]],
        disks: bool,
        say: Callable[[str], None],
    ) -> None:
        self._stack = ExitStack()
        self._disks = Disks()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        with new_run(root) as files:
            self.files = files
            self.resolved = with_corpus(files, resolved)
            self.plan = make_plan(self.resolved, files, {**os.environ, **faults(files)})
            write_run(files, self.resolved)
            if self.plan.redis is not None:
                write_standby(files, self.plan.redis)
            if disks:
                for index in range(len(self.plan.synchronizers)):
                    self._disks.mount(files.store_of(index))
        self._leader: str | None = None
        try:
            self._stack.enter_context(hold_run(files))
            self.wiring = Wiring(self._stack.enter_context(Proxies()), self.plan)
            self._journal = FleetJournal(files.metrics_of(FLEET), say)
            self._stack.callback(self._journal.close)
            self._supervisor = self._make_supervisor(self.plan)
            self._journal.record("start", address=self.plan.address, pid=os.getpid())
            self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
            self._thread.start()
        except BaseException:
            self._stack.close()
            raise

    def _make_supervisor(self, plan: Plan) -> Supervisor:
        wired = self.wiring.wired
        fleet = self.resolved.fleet.value
        return Supervisor(
            files=self.files,
            run_id=self.resolved.run.value.run_id,
            address=plan.address,
            synchronizers=[wired(spec) for spec in plan.synchronizers],
            evaluator=wired(plan.evaluator),
            learners=[wired(spec) for spec in plan.learners],
            # Who is killed again and again must come back again and again.
            policy=RestartPolicy(max_restarts=_RESTARTS, max_wait_s=_RESTART_WAIT_S),
            bounds=Bounds(drain_s=fleet.drain_s, finish_s=fleet.finish_s),
            journal=self._journal,
            is_complete=lambda: False,
            redis=plan.redis.process if plan.redis is not None else None,
            leader=lambda: self._leader,
        )

    def _run(self) -> None:
        try:
            self._outcome = self._supervisor.run(lambda: None)
        except BaseException as error:
            self._error = error

    def note_leader(self, name: str | None) -> None:
        """Says who leads, for the order of the end."""
        self._leader = name

    def pids(self) -> dict[str, int | None]:
        """Every process by name, with its pid while it runs."""
        return {process.name: process.pid for process in self._supervisor.processes}

    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return {process.name: process.num_restarts for process in self._supervisor.processes}

    @property
    def parent_pid(self) -> int:
        """Who started the processes."""
        return os.getpid()

    @property
    def ended(self) -> str:
        """Why the fleet has ended; empty while it is at work."""
        if self._thread.is_alive():
            return ""
        if self._error is not None:
            return str(self._error)
        outcome = self._outcome
        assert outcome is not None, "the thread has ended"
        return outcome.error.message if outcome.error is not None else f"run {outcome.word}"

    def drain(self, times_asked: Callable[[], int]) -> None:
        """Ends the fleet in order, once, and waits for that; every stage of it has a bound.

        Args:
            times_asked: how often somebody has asked for the end; once more kills.
        """
        if self._thread.is_alive():
            self._supervisor.request_stop()
            before = times_asked()
            while self._thread.is_alive():
                self._thread.join(_LOOK_S)
                if times_asked() > before:
                    self._supervisor.request_stop()
                    before = times_asked()
            word = self._outcome.word if self._outcome is not None else "failed"
            self._journal.record("end", outcome=word)
            self._disks.keep()

    def close(self) -> None:
        """Ends whatever is still there, at once."""
        while self._thread.is_alive():
            self._supervisor.request_stop()
            self._thread.join(_LOOK_S)
        try:
            self._disks.keep()
        finally:
            self._stack.close()
