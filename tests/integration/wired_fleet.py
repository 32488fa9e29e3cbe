"""A real fleet with a link between any two of its processes, each of which a test can cut.

The processes are those that ``diloco run`` would start, with the addresses of links in place of one
another's; the supervisor runs in a thread of the test.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from fault_script import FaultScript
from fleet_view import PATIENCE_S, FleetView

from diloco_fleet.chaos.proxy import Cut, Link, Proxies, Way
from diloco_fleet.chaos.wiring import Wiring
from diloco_fleet.fleet_settings import resolve
from diloco_fleet.journal import FleetJournal
from diloco_fleet.local import Bounds, Outcome, Supervisor
from diloco_fleet.metrics import FLEET
from diloco_fleet.plan import Plan, make_plan
from diloco_fleet.prepare import with_corpus, write_run
from diloco_fleet.process import RestartPolicy
from diloco_fleet.run_files import RunFiles
from diloco_fleet.standby import write_standby


class WiredFleet(FleetView):
    """A fleet in whose links a test may stand. Use `close` at the end.

    Args:
        folder: takes the run directory.
        settings: settings by name, as flags of ``diloco run``.
        config: TOML file of settings, as text.
        faults: script of faults for its processes.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        config: str,
        faults: FaultScript | None = None,
    ) -> None:
        files = RunFiles((folder / "run").resolve())
        files.root.mkdir()
        (folder / "fleet.toml").write_text(config)
        resolved = resolve(settings, {}, folder / "fleet.toml", default_run_id=folder.name)
        super().__init__(files, standby=resolved.fleet.value.standby)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environ = {**os.environ, "PATH": path, **(faults.environment() if faults else {})}
        resolved = with_corpus(files, resolved)
        plan = make_plan(resolved, files, environ)
        write_run(files, resolved)
        if plan.redis is not None:
            write_standby(files, plan.redis)
        self._proxies = Proxies()
        self._proxies.__enter__()
        self.wiring = Wiring(self._proxies, plan)
        self.said: list[str] = []
        self._journal = FleetJournal(files.metrics_of(FLEET), self.said.append)
        self._outcome: Outcome | None = None
        self._supervisor = self._make_supervisor(plan, resolved.run.value.run_id)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()
        self.wait_until(files.fleet.exists, "the processes to be started")

    def _make_supervisor(self, plan: Plan, run_id: str) -> Supervisor:
        wired = self.wiring.wired
        return Supervisor(
            files=self.files,
            run_id=run_id,
            address=plan.address,
            synchronizers=[wired(spec) for spec in plan.synchronizers],
            evaluator=wired(plan.evaluator),
            learners=[wired(spec) for spec in plan.learners],
            policy=RestartPolicy(max_restarts=1_000_000, max_wait_s=0.5),
            bounds=Bounds(),
            journal=self._journal,
            is_complete=lambda: False,
            redis=plan.redis.process if plan.redis is not None else None,
            leader=self.leader,
        )

    def _run(self) -> None:
        self._outcome = self._supervisor.run(lambda: None)

    def ended(self) -> str:
        """That the supervisor has ended, with what it said."""
        return "" if self._thread.is_alive() else f"{self._outcome}: {self.said}"

    # -- disturbing -------------------------------------------------------------------------------

    def _between(self, one: str, other: str) -> list[tuple[Link, bool]]:
        found = self.wiring.between(one, other)
        assert found, f"{one} and {other} never connect"
        return found

    def cut(self, one: str, other: str, how: Cut = Cut.BLACKHOLE) -> None:
        """Cuts two processes off from one another."""
        for link, _ in self._between(one, other):
            link.cut(how)

    def mute(self, one: str, other: str) -> None:
        """Lets nothing that the first process says get to the other one; it still hears it."""
        for link, connects in self._between(one, other):
            link.cut(Cut.BLACKHOLE, Way.UP if connects else Way.DOWN)

    def isolate(self, process: str, *, but: set[str] | None = None) -> None:
        """Cuts a process off from everybody, or from all but some."""
        for other in self.wiring.peers_of(process) - (but or set()):
            self.cut(process, other)

    def delay(self, one: str, other: str, seconds: float) -> None:
        """Delays everything between two processes."""
        for link, _ in self._between(one, other):
            link.delay(seconds)

    def heal(self, one: str, other: str) -> None:
        """Ends every disturbance between two processes."""
        for link, _ in self._between(one, other):
            link.heal()

    def reunite(self, process: str) -> None:
        """Ends every disturbance between a process and all others."""
        for other in self.wiring.peers_of(process):
            self.heal(process, other)

    def drain(self) -> Outcome:
        """Ends the fleet in order; returns how that went."""
        self._supervisor.request_stop()
        self._thread.join(PATIENCE_S)
        assert self._outcome is not None, f"it did not drain: {self.said}"
        return self._outcome

    def close(self) -> None:
        """Ends whatever is still there."""
        while self._thread.is_alive():
            self._supervisor.request_stop()
            self._thread.join(0.2)
        self._journal.close()
        self._proxies.__exit__(None, None, None)
