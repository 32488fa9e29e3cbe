"""The inner-step boundary on the training thread: updates in, part of a snapshot, copies out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from decoupled_diloco.layout import Layout
from decoupled_diloco.settings import RunSettings
from learner_client.checkpoint import Cut, SavedState
from learner_client.exchange import Exchange
from learner_client.grants import Update
from learner_client.leases import Progress, SavedLeases
from learner_client.parameters import Parameters
from learner_client.training_state import TrainingState

_LOG = logging.getLogger("learner_client")

_POLL_S: Final = 0.02


class Boundary:
    """What happens between two inner steps; none of it waits for the network or a disk.

    Args:
        learner_id: for log lines.
        parameters: the model.
        exchange: shared with the background thread.
    """

    def __init__(self, learner_id: str, parameters: Parameters, exchange: Exchange) -> None:
        self._learner_id = learner_id
        self._parameters = parameters
        self._exchange = exchange
        self._cut: Cut | None = None

    def cross(
        self,
        num_tokens: int,
        progress: Progress,
        capture: Callable[[], TrainingState] | None,
    ) -> bool:
        """Counts the step, writes pending updates into the model, copies the fragments due next.

        In between, where a marker was heard: records this learner's part of the snapshot, after
        the updates up to its cut and before any above it.

        Args:
            num_tokens: tokens of the step.
            progress: what became of the samples of the step.
            capture: copies the whole state of the training; without it no part is recorded.

        Returns:
            Whether there is a part of a snapshot to write.
        """
        updates = self._exchange.count(num_tokens)
        # Read after the updates were taken: who brings one above a cut shows the cut first.
        name = self._exchange.snapshots.due
        is_captured = False
        if name is not None and capture is not None:
            is_beyond = self._exchange.snapshots.is_beyond
            beyond = [update for update in updates if is_beyond(update.version)]
            self._write_or_void([u for u in updates if not is_beyond(u.version)], progress)
            is_captured = self._record(Cut(name=name, num_tokens=num_tokens), capture)
            self.write(beyond)
        else:
            self._write_or_void(updates, progress)
        self.copy_due()
        return is_captured

    def _write_or_void(self, updates: list[Update], progress: Progress) -> None:
        """Writes updates; then gives up what was trained since, where it may not count."""
        self.write(updates)
        if self._exchange.is_void(progress):
            self.write_published()
            self._exchange.discarded()

    def write_published(self) -> None:
        """Overwrites the model with the published copy."""
        for fragment, base in self._exchange.bases.items():
            self._parameters.write_fragment(self._layout().fragments[fragment], base)

    def write(self, updates: list[Update]) -> None:
        """Writes updates into the model, in order."""
        for update in updates:
            fragment = self._layout().fragments[update.fragment]
            self._parameters.write_fragment(fragment, update.vector)
            self._exchange.applied(update)

    def copy_due(self) -> None:
        """Copies the fragments that are asked for next."""
        captures = self._exchange.to_copy()
        for capture in captures:
            fragment = self._layout().fragments[capture.stamp.fragment]
            self._parameters.read_fragment(fragment, capture.vector)
        self._exchange.copied(captures)

    def saved_state(self) -> SavedState:
        """The learner's own state; within a snapshot as it is at the cut.

        What was accepted since the last update of a fragment went to a round above the cut, or
        the cut has a newer update of that fragment, which starts the counters anew: in either case
        it counts as not accepted.
        """
        core, bases, cut = self._exchange.core, self._exchange.bases, self._cut
        versions = core.versions
        return SavedState(
            fingerprint=self._layout().fingerprint,
            local_step=core.local_step,
            counters=core.counters if cut is None else core.counters.without_acceptances(),
            published={p: (versions[p], bases[p]) for p in versions},
            cut=cut,
            leases=self._saved_leases() if cut is not None else None,
        )

    def _saved_leases(self) -> SavedLeases | None:
        grant = self._exchange.grant
        if grant is None or grant.settings.data_mode != "leases":
            return None
        return self._exchange.data.saved(grant.incarnation)

    def adopt(self, *, until: Callable[[], bool]) -> None:
        """Makes the model the published copy, with what is on its way until then."""
        self.write(self._exchange.take_updates())
        while not until():
            time.sleep(_POLL_S)
            self.write(self._exchange.take_updates())
        self.write_published()

    def go_on(self, saved: SavedState, settings: RunSettings) -> None:
        """Goes on within the boundary at which a state was saved."""
        is_void = saved.leases is None or self._exchange.is_void(Progress())
        if settings.data_mode == "leases" and is_void:
            # The samples behind its local progress go, or went, to others.
            self.write_published()
            self._exchange.discarded()
        if saved.cut is not None:
            self._finish(saved.cut)

    def _finish(self, cut: Cut) -> None:
        """The rest of the boundary within which a part was recorded: copies and report."""
        self.copy_due()
        self._exchange.report(
            num_tokens=cut.num_tokens,
            loss=None,
            step_s=0.0,
            overhead_s=0.0,
            progress=self._exchange.data.progress,
        )

    def _record(self, cut: Cut, capture: Callable[[], TrainingState]) -> bool:
        self._cut = cut
        state: TrainingState | None = None
        try:
            state = capture()
        except Exception:
            # Whatever keeps a learner out of a snapshot, its training goes on.
            _LOG.exception("%s: no part of snapshot %s", self._learner_id, cut.name)
        finally:
            self._cut = None
        self._exchange.snapshots.captured(cut.name, state)
        return state is not None

    def _layout(self) -> Layout:
        assert self._exchange.layout is not None, "joined"
        return self._exchange.layout
