"""Brings together what supervisor, synchronizer and evaluator know, for the live view."""

from __future__ import annotations

import time

from diloco_fleet.journal import FleetJournal
from diloco_fleet.local import Supervisor
from diloco_fleet.metrics import EVALUATOR, last_evaluation
from diloco_fleet.run_files import RunFiles
from diloco_fleet.screen import Screen
from diloco_fleet.status import StatusPoller
from diloco_fleet.view import Eta, Scene


class Director:
    """Feeds the screen while the supervisor works.

    Args:
        files: the run directory.
        run_id: id of the run.
        address: of the synchronizer; of several, separated by commas.
        supervisor: tells the state of the processes.
        poller: tells what the synchronizer sees.
        screen: is fed.
        journal: takes the layout when it becomes known.
    """

    def __init__(
        self,
        *,
        files: RunFiles,
        run_id: str,
        address: str,
        supervisor: Supervisor,
        poller: StatusPoller,
        screen: Screen,
        journal: FleetJournal,
    ) -> None:
        self._files = files
        self._run_id = run_id
        self._address = address
        self._supervisor = supervisor
        self._poller = poller
        self._screen = screen
        self._journal = journal
        self._eta = Eta()
        self._layout_known = False

    def tick(self) -> None:
        """Shows what there is to show; never waits."""
        if not self._layout_known:
            self._note_layout()
        self._screen.tick(self.scene)

    def scene(self) -> Scene:
        """Returns what can be seen now."""
        snapshot = self._poller.snapshot()
        status = snapshot.status
        phase = self._supervisor.phase.value
        return Scene(
            run_id=self._run_id,
            address=self._address,
            phase=phase,
            status=status,
            away_s=snapshot.away_s,
            eta_s=self._eta.of(time.monotonic(), status, phase=phase, away_s=snapshot.away_s),
            evaluation=last_evaluation(self._files.metrics_of(EVALUATOR)),
            processes={
                process.name: (process.state.value, process.num_restarts)
                for process in self._supervisor.processes
            },
            synchronizers=snapshot.synchronizers,
        )

    def _note_layout(self) -> None:
        layout = self._poller.snapshot().layout
        if layout is not None:
            self._layout_known = True
            self._journal.record(
                "layout",
                f"the model has {layout.num_parameters:,} parameters in {layout.num_fragments} "
                "fragments",
                num_parameters=layout.num_parameters,
                num_fragments=layout.num_fragments,
            )
