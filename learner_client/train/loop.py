"""The shipped trainer: an ordinary PyTorch loop with a `Learner` round it."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping

import torch

from decoupled_diloco.errors import EXIT_DRAINED, EXIT_OK, DilocoError, UsageError
from decoupled_diloco.journal import Journal
from learner_client.core.connection import Change
from learner_client.core.leadership import Move
from learner_client.inner_state import OptimizerState
from learner_client.learner import Learner
from learner_client.metrics import serve_metrics
from learner_client.settings import LearnerSettings
from learner_client.snapshots import SnapshotDirectory
from learner_client.train.applied import AppliedVersions
from learner_client.train.checkpoints import Checkpoints
from learner_client.train.data import LeasedBatches, ShardedBatches
from learner_client.train.device import compute_precision, resolve_device
from learner_client.train.model import Transformer, token_loss
from learner_client.train.optimizer import build_optimizer, set_learning_rate
from learner_client.train.schedule import learning_rate_at
from learner_client.train.setup import Setup, load_setup
from learner_client.train.stopping import StopRequest
from learner_client.training_state import SavedLearner, TrainingState, load_training_state
from learner_client.transport.calls import num_calls

logger = logging.getLogger(__name__)


Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, int64 ``[B, T]``."""


class ScheduleClock:
    """The global step as last heard, interpolated by local steps (paper section 12, item 7).

    Args:
        per_step: global steps per inner step, P / H.
        limit: most steps to interpolate; a learner that is cut off does not race ahead.
    """

    def __init__(self, per_step: float, limit: float) -> None:
        self._per_step = per_step
        self._limit = limit
        self._heard = -1
        self._steps = 0

    def state(self) -> dict[str, int]:
        """Where the clock stands, as whole numbers."""
        return {"clock_heard": self._heard + 1, "clock_steps": self._steps}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on where ``state`` was taken; where it is of another kind, it starts anew."""
        self._heard = state.get("clock_heard", 0) - 1
        self._steps = max(state.get("clock_steps", 0), 0)

    def read(self, global_step: int) -> float:
        """Returns the estimate for the inner step that begins; call once per inner step."""
        if global_step != self._heard:
            self._heard, self._steps = global_step, 0
        estimate = global_step + min(self._steps * self._per_step, self._limit)
        self._steps += 1
        return estimate


class Trainer:
    """Trains one learner until the run is complete or the process is asked to stop.

    Args:
        setup: the run.
        settings: settings of this process.
        metrics: takes a line per inner step.
        stop: set where the process is asked to stop.
    """

    def __init__(
        self, setup: Setup, settings: LearnerSettings, metrics: Journal, stop: StopRequest
    ) -> None:
        self._setup = setup
        self._settings = settings
        self._metrics = metrics
        self._stop = stop
        self._device = resolve_device(settings.device)
        self._model: Transformer = setup.build_model().to(self._device)
        self._optimizer = build_optimizer(self._model, setup.trainer)
        self._inner_state = OptimizerState(self._model, self._optimizer)
        self._checkpoints = (
            Checkpoints(
                settings.run_dir / "checkpoints" / f"{settings.learner_id}.safetensors",
                every_s=settings.checkpoint_every_s,
            )
            if settings.recover == "checkpoint"
            else None
        )
        self._position: Callable[[], int] = lambda: 0
        run = setup.run
        self._clock = ScheduleClock(run.num_fragments / run.sync_interval, float(run.num_fragments))
        self._applied = AppliedVersions()
        self._num_skipped = 0

    def run(self) -> int:
        """Joins, trains, leaves; returns the exit code.

        Raises:
            DilocoError: why it cannot take part (any more).
        """
        folder = self._settings.snapshots
        learner = Learner(
            self._model,
            address=self._settings.address,
            learner_id=self._settings.learner_id,
            run_id=self._setup.run.run_id,
            inner_state=self._inner_state,
            recover=self._settings.recover,
            join_timeout_s=self._settings.join_timeout_s,
            insecure=self._settings.insecure,
            on_change=self._changed,
            on_move=self._moved,
            snapshots=SnapshotDirectory(folder) if folder is not None else None,
            training_state=self._capture if folder is not None else None,
        )
        saved = self._resume(learner)
        is_resumed = saved is not None
        saved = saved or self._go_back(learner)
        settings = self._settings
        metrics = serve_metrics(
            settings.metrics_address, learner.metrics, insecure=settings.insecure
        )
        with metrics, learner:
            before = num_calls(), num_calls(threading.get_ident())
            if is_resumed and self._settings.resume_from is not None:
                # It has served: a restart of this process goes on with the fleet as it is then.
                self._settings.resume_from.unlink(missing_ok=True)
            self._metrics.write(
                "joined",
                incarnation=str(learner.incarnation),
                local_step=learner.local_step,
                shard=learner.shard,
            )
            self._train(learner, 0 if saved is None else saved.data.get("position", 0))
            told_to_leave = learner.draining
        self._metrics.write(
            "stop",
            local_step=learner.local_step,
            finished=learner.finished,
            network_calls=num_calls() - before[0],
            network_calls_in_training=num_calls(threading.get_ident()) - before[1],
        )
        overhead = learner.overhead
        logger.info(
            "%d steps; inside learner.step: median %.2f ms, p99 %.2f ms, %.2f %% of the loop",
            overhead.num_steps,
            overhead.median_s * 1e3,
            overhead.p99_s * 1e3,
            overhead.share * 100,
        )
        if learner.finished:
            return EXIT_OK
        return self._settings.drained_exit_code if told_to_leave else EXIT_DRAINED

    def _capture(self, learner: SavedLearner) -> TrainingState:
        data = {"position": self._position(), **self._clock.state()}
        return TrainingState.capture(self._model, self._inner_state, learner, data)

    def _go_back(self, learner: Learner) -> TrainingState | None:
        """Goes on from the own checkpoint, where that is asked for and there is one."""
        state = self._checkpoints.load() if self._checkpoints is not None else None
        if state is None:
            return None
        try:
            state.restore(self._model, self._inner_state, learner)
        except UsageError as error:
            logger.warning("the checkpoint is not used: %s", error)
            return None
        logger.info("goes on from its checkpoint, %d batches in", state.data.get("position", 0))
        return state

    def _resume(self, learner: Learner) -> TrainingState | None:
        """Goes on from a part of a snapshot; what cannot be used is told, and left alone."""
        path = self._settings.resume_from
        if path is None or not path.exists():
            return None
        try:
            state = load_training_state(path)
            state.restore(self._model, self._inner_state, learner)
        except DilocoError as error:
            logger.warning("starts like a new learner, without its part of a snapshot: %s", error)
            self._metrics.write("not_resumed", reason=str(error.reason), detail=error.message)
            return None
        self._clock.restore(state.data)
        logger.info("goes on from its part of a snapshot, %s", path)
        self._metrics.write("resumed", part=str(path))
        return state

    def _train(self, learner: Learner, saved_position: int) -> None:
        # What was heard of an earlier life beyond its checkpoint is not trained again.
        start = max(learner.local_step, saved_position)
        next_batch, self._position = self._batches(learner, start)
        shard = learner.shard

        def capture() -> TrainingState:
            return self._capture(learner)

        self._stop.heed()
        while not (learner.finished or learner.draining or self._stop.is_set()):
            began = time.perf_counter()
            if learner.shard != shard:  # a new leader has given the old one to somebody else
                shard = learner.shard
                next_batch, self._position = self._batches(learner, learner.local_step)
            batch = next_batch()
            if batch is None:
                break
            inputs, targets = batch
            loss = self._inner_step(learner, inputs, targets)
            self._keep_pace(began)
            computed = time.perf_counter()
            learner.step(num_tokens=inputs.numel(), loss=loss)
            self._record(learner, loss, inputs.numel(), began, computed)
            if self._checkpoints is not None:
                self._checkpoints.save_if_due(capture)
        if self._checkpoints is not None:
            self._checkpoints.close(None if learner.finished else capture)

    def _batches(
        self, learner: Learner, start: int
    ) -> tuple[Callable[[], Batch | None], Callable[[], int]]:
        """What gives the next batch (None where no more comes), and what its position is.

        Args:
            learner: gives shard or leases.
            start: position in the shard; leased data has its own.
        """
        trainer, run = self._setup.trainer, self._setup.run
        if run.data_mode == "leases":
            leased = LeasedBatches(
                self._setup.corpus,
                learner.data,
                data_length=run.data_length,
                batch_size=trainer.batch_size,
                sequence_length=trainer.sequence_length,
                seed=trainer.seed,
            )
            return lambda: leased.next_batch(self._stop.is_set), lambda: 0
        batches = ShardedBatches(
            self._setup.corpus,
            shard=learner.shard,
            num_shards=run.num_learners,
            batch_size=trainer.batch_size,
            sequence_length=trainer.sequence_length,
            seed=trainer.seed,
        )
        batches.position = start
        return batches.next_batch, lambda: batches.position

    def _inner_step(self, learner: Learner, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One step of the inner optimizer; returns the loss in nats per token."""
        trainer = self._setup.trainer
        rate = learning_rate_at(self._clock.read(learner.global_step), trainer)
        set_learning_rate(self._optimizer, rate)
        inputs, targets = inputs.to(self._device), targets.to(self._device)
        with compute_precision(trainer.precision, self._device):
            loss = token_loss(self._model, inputs, targets)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        limit = trainer.gradient_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit)
        if bool(torch.isfinite(norm)):
            self._optimizer.step()
        else:
            self._skipped()
        return float(loss.detach())

    def _skipped(self) -> None:
        """A gradient that is not finite would ruin the optimizer's state for good."""
        self._num_skipped += 1
        if self._num_skipped & (self._num_skipped - 1) == 0:
            logger.warning(
                "%d inner steps skipped: the gradient is not finite; lower the learning rate",
                self._num_skipped,
            )

    def _keep_pace(self, began: float) -> None:
        """Waits until the step has lasted as long as pace and slowness say."""
        took = time.perf_counter() - began
        wanted = max(self._settings.pace, took) / self._settings.slow
        if wanted > took:
            self._stop.wait(wanted - took)

    def _record(
        self, learner: Learner, loss: float, num_tokens: int, began: float, computed: float
    ) -> None:
        now = time.perf_counter()
        status = learner.status
        self._metrics.write(
            "step",
            local_step=learner.local_step,
            global_step=learner.global_step,
            loss=loss if math.isfinite(loss) else None,
            num_tokens=num_tokens,
            step_s=now - began,
            compute_s=computed - began,
            overhead_s=now - computed,
            state="online" if status.online else "offline",
            incarnation=str(learner.incarnation),
            applied=self._applied.news(status.versions),
        )

    def _moved(self, move: Move) -> None:
        self._metrics.write("moved", **dataclasses.asdict(move))

    def _changed(self, change: Change) -> None:
        self._metrics.write(
            "online" if change.online else "offline",
            state=str(change.state),
            reason=change.reason,
            detail=change.detail,
        )


def train(settings: LearnerSettings, stop: StopRequest) -> int:
    """Runs one learner of the shipped trainer; returns the exit code.

    Args:
        settings: settings of this process, with an id (``identity.identified``).
        stop: set where the process is asked to stop; the inner step under way is finished.

    Raises:
        DilocoError: why it cannot take part.
    """
    assert settings.learner_id, "identified"
    if settings.threads:
        torch.set_num_threads(settings.threads)
    metrics = Journal(settings.run_dir / "metrics" / f"{settings.learner_id}.jsonl")
    try:
        metrics.write("start", pid=os.getpid())
        setup = load_setup(
            settings.address,
            settings.run_dir,
            timeout_s=settings.join_timeout_s,
            insecure=settings.insecure,
        )
        return Trainer(setup, settings, metrics, stop).run()
    finally:
        metrics.close()
