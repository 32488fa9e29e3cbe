"""A learner's own checkpoint: copied between two steps, written in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from decoupled_diloco.errors import DilocoError
from learner_client.files import storage_errors
from learner_client.training_state import (
    TrainingState,
    load_training_state,
    save_training_state,
)

logger = logging.getLogger(__name__)


class Checkpoints:
    """The newest checkpoint of one learner; the one before stays until the new one is whole.

    Args:
        path: the file.
        every_s: seconds between two checkpoints.
        clock: monotonic seconds.
    """

    def __init__(
        self, path: Path, *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._every_s = every_s
        self._clock = clock
        self._due_at = clock() + every_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._failure = ""

    def load(self) -> TrainingState | None:
        """The newest checkpoint; None, with the reason in the log, where there is none to use."""
        if not self._path.exists():
            logger.info("there is no checkpoint %s yet", self._path)
            return None
        try:
            return load_training_state(self._path)
        except DilocoError as error:
            logger.warning("the checkpoint is not used: %s", error)
            return None

    def save_if_due(self, capture: Callable[[], TrainingState]) -> None:
        """Copies the state where a checkpoint is due. On the training thread; writes elsewhere.

        Where the disk is slower than that, the next one comes later; where it fails, training goes
        on and the log says so, once per reason.
        """
        if self._clock() < self._due_at or (self._writing and not self._writing.done()):
            return
        self._due_at = self._clock() + self._every_s
        self._look()
        self._writing = self._pool.submit(self._write, capture())

    def close(self, capture: Callable[[], TrainingState] | None = None) -> None:
        """Waits for what is being written; with ``capture`` writes a last checkpoint."""
        if capture is not None:
            self._writing = self._pool.submit(self._write, capture())
        self._pool.shutdown()
        self._look()

    def _write(self, state: TrainingState) -> None:
        with storage_errors(self._path, "writing"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        save_training_state(self._path, state)

    def _look(self) -> None:
        """Says what has become of the checkpoint before, where that has changed."""
        error = self._writing.exception() if self._writing is not None else None
        failure = "" if error is None else str(error)
        if failure and failure != self._failure:
            logger.warning("no checkpoint was written: %s", failure)
        elif self._failure and not failure:
            logger.info("checkpoints are written again")
        self._failure = failure
