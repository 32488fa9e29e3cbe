"""``Learner``: the public API, round an existing training loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import torch
from torch import nn

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation
from learner_client.boundary import Boundary
from learner_client.checkpoint import SavedState, saved_state_from
from learner_client.core.connection import Change, State
from learner_client.core.leadership import Move
from learner_client.data import LeasedData
from learner_client.dialling import search_for
from learner_client.exchange import Exchange
from learner_client.grants import Grant
from learner_client.inner_state import InnerState
from learner_client.inner_work import InnerWork
from learner_client.link import Identity
from learner_client.metrics import LearnerCollector
from learner_client.overhead import Overhead, OverheadMeter
from learner_client.parameters import ModuleParameters, Parameters
from learner_client.runtime import Runtime
from learner_client.snapshots import PartExchange, SnapshotDirectory
from learner_client.status import LearnerStatus, not_joined, status_of
from learner_client.training_state import SavedLearner, TrainingState
from learner_client.transport.base import Transport
from learner_client.worker import Worker

_LOG = logging.getLogger(__name__)

_CLOSE_S: Final = 5.0
_ADOPT_S: Final = 10.0


class Learner:
    """Takes part in a run, round an existing training loop.

    ::

        with Learner(model, address="127.0.0.1:50051", learner_id="learner-0") as learner:
            while not (learner.finished or learner.draining):
                ...  # your own step: forward, backward, optimizer
                learner.step(num_tokens=batch.numel(), loss=loss.item())

    Entering joins the run, waits for the published parameters and writes them into the model;
    leaving says goodbye. Exceptions of the loop propagate. ``async with`` does the same within a
    running event loop, for many learners in one.

    Args:
        model: the model, on its device already; or an implementation of ``Parameters``.
        address: ``host:port`` of the synchronizer; of all that may lead the run where there are
            several, as a sequence or separated by commas.
        learner_id: stable id; another process that joins under it fences this one.
        run_id: run to join; empty takes whichever is served.
        embedding_names: see ``ModuleParameters``.
        inner_state: what the inner optimizer remembers; given to peers that recover.
        recover: what a learner without a saved state begins with beside the parameters:
            ``params`` nothing, ``peer`` the inner state of a peer; ``checkpoint`` is ``peer`` where
            no state was loaded.
        labels: for people who look; process id and host are added.
        join_timeout_s: longest wait for the published parameters; None waits without end.
        insecure: True where plaintext to another machine was asked for.
        on_change: called with every change of state, in whichever thread it happens.
        on_move: called with every move to another synchronizer, in the background.
        transport: opens another transport than gRPC; replaces ``address``.
        connect: opens another transport than gRPC to one of the addresses.
        runtime: time, chance and threads, for scripted fleets.
        snapshots: where its parts of the fleet's snapshots go; without it, it is left out of them.
        training_state: copies everything that the loop depends on (`TrainingState.capture`);
            called within ``step`` where a snapshot is due.

    Attributes:
        metrics: what Prometheus may scrape, for a registry or for ``serve_metrics``.

    Raises:
        UsageError: where model or arguments cannot be right.
    """

    def __init__(
        self,
        model: nn.Module | Parameters,
        *,
        learner_id: str,
        address: str | Sequence[str] = "",
        run_id: str = "",
        embedding_names: Collection[str] | None = None,
        inner_state: InnerState | None = None,
        recover: str = "params",
        labels: Mapping[str, str] | None = None,
        join_timeout_s: float | None = 300.0,
        insecure: bool = False,
        on_change: Callable[[Change], None] | None = None,
        on_move: Callable[[Move], None] | None = None,
        transport: Callable[[], Transport] | None = None,
        connect: Callable[[str], Transport] | None = None,
        runtime: Runtime | None = None,
        snapshots: SnapshotDirectory | None = None,
        training_state: Callable[[SavedLearner], TrainingState] | None = None,
    ) -> None:
        if not learner_id:
            raise UsageError(Reason.CONFIG_INVALID, "learner_id is empty; give a stable name")
        self._inner = InnerWork(inner_state, recover)
        if (snapshots is None) != (training_state is None):
            why = "snapshots and training_state go together: give both"
            raise UsageError(Reason.CONFIG_CONFLICT, why)
        self._parameters: Parameters = (
            ModuleParameters(model, embedding_names=embedding_names)
            if isinstance(model, nn.Module)
            else model
        )
        self._identity = Identity(
            learner_id=learner_id,
            run_id=run_id,
            labels={"pid": str(os.getpid()), "host": socket.gethostname(), **(labels or {})},
        )
        self._search = search_for(
            address,
            name=learner_id,
            run_id=run_id,
            insecure=insecure,
            transport=transport,
            connect=connect,
            runtime=runtime,
            on_move=on_move,
        )
        self._join_timeout_s = join_timeout_s
        self._runtime = runtime
        self._exchange = Exchange(learner_id, on_change=on_change)
        self._exchange.snapshots = PartExchange(snapshots)
        self._boundary = Boundary(learner_id, self._parameters, self._exchange)
        self._capture = None if training_state is None else (lambda: training_state(self))
        self._saved: SavedState | None = None
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._meter = OverheadMeter()
        self.metrics = LearnerCollector(learner_id, self._exchange, self._meter)
        self._stepped_at = 0.0

    # -- the loop --------------------------------------------------------------------------

    def step(
        self, *, num_tokens: int, loss: float | None = None, num_samples: int | None = None
    ) -> None:
        """The boundary after one inner step; never waits for the network.

        In this order: counts the step, writes pending updates into the model, copies the fragments
        that are due next (and, where a peer asks for it, the inner state), hands over a report. A
        part of a snapshot that is due is recorded before the first update above its cut.

        Args:
            num_tokens: tokens trained in this step.
            loss: training loss of the step, nats per token.
            num_samples: samples of ``data`` trained in this step; all that were handed out and
                not trained, by default. Needed where a DataLoader fetches ahead.

        Raises:
            DilocoError: ``FENCED`` where another process took over this learner id; or a refusal
                that no waiting heals.
        """
        began = time.perf_counter()
        worker = self._running()
        if num_tokens < 0:
            raise UsageError(Reason.CONFIG_INVALID, f"num_tokens is {num_tokens}; at least 0")
        if self._exchange.failure is not None:
            raise self._exchange.failure
        progress = self._exchange.data.trained(num_samples)
        if self._boundary.cross(num_tokens, progress, self._capture):
            worker.part_captured()
        self._inner.serve(self._exchange.core)
        now = time.perf_counter()
        loop_s, self._stepped_at = now - self._stepped_at, now
        self._exchange.report(
            num_tokens=num_tokens,
            loss=None if loss is None else float(loss),
            step_s=loop_s,
            overhead_s=now - began,
            progress=progress,
        )
        worker.wake()
        self._meter.add(inside_s=time.perf_counter() - began, loop_s=loop_s)

    # -- what a loop wants to know ---------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True once the run is complete."""
        if self._exchange.connection.state is State.FINISHED:
            return True
        total = self.settings.total_global_steps
        return total > 0 and self.global_step >= total

    @property
    def draining(self) -> bool:
        """True once this learner was asked to finish its step and leave."""
        return self._exchange.connection.state is State.DRAINING

    @property
    def global_step(self) -> int:
        """Global step of the newest update applied; learning-rate schedules follow it."""
        self._granted()
        return self._exchange.core.global_step

    @property
    def local_step(self) -> int:
        """Inner steps over all lives of this learner id: where its data goes on."""
        self._granted()
        return self._exchange.core.local_step

    @property
    def shard(self) -> int:
        """Data shard of this learner id; below ``settings.num_learners`` where shards are fixed."""
        return self._granted().shard

    @property
    def data(self) -> LeasedData:
        """Which samples to train on, where the run leases its data."""
        self._granted()
        return self._exchange.data

    @property
    def settings(self) -> RunSettings:
        """Settings of the run, as served."""
        return self._granted().settings

    @property
    def incarnation(self) -> Incarnation:
        """This life of the learner."""
        return self._granted().incarnation

    @property
    def overhead(self) -> Overhead:
        """Time inside ``step``."""
        return self._meter.read()

    @property
    def status(self) -> LearnerStatus:
        """How the learner stands."""
        return status_of(self._exchange, self._search.leadership.current)

    # -- saving ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Counters, versions and published copies, to be saved with model and optimizer.

        Between two steps only. A flat dict of tensors on the CPU, fit for safetensors.
        """
        self._granted()
        return self._boundary.saved_state().to_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on from a saved state; before entering, with the model restored to the same moment.

        Fragments whose published copy is still the newest keep their local progress; the others
        are overwritten, as by any update.

        Raises:
            UsageError: ``CONFIG_INVALID`` where it is no saved state, ``CONFIG_CONFLICT`` where
                the learner has joined already.
        """
        if self._worker is not None:
            raise UsageError(
                Reason.CONFIG_CONFLICT, "load the state before entering: the learner has joined"
            )
        self._saved = saved_state_from(state)
        self._inner.is_restored = True

    def adopt_published(self, timeout_s: float = _ADOPT_S) -> int:
        """Overwrites the model with the published copy: what all learners share, and what to save.

        Between two steps or, usually, after the loop; local progress since the last updates is
        given up. Where the run is complete, its last updates are waited for.

        Args:
            timeout_s: longest wait for updates that are on their way; without it (or within a
                running event loop) the copy is the newest that is here.

        Returns:
            Global step of the newest update in the model.
        """
        self._running()
        total = self.settings.total_global_steps
        give_up = time.monotonic() + (timeout_s if self._task is None else 0.0)
        self._boundary.adopt(
            until=lambda: (
                not self.finished or self.global_step >= total or time.monotonic() >= give_up
            )
        )
        return self.global_step

    # -- entering and leaving --------------------------------------------------------------

    def __enter__(self) -> Self:
        """Joins, waits for the published parameters and writes them into the model."""
        worker = self._make_worker()
        worker.start_thread()
        try:
            self._exchange.synced.result(self._join_timeout_s)
        except TimeoutError:
            error = not_joined(self._exchange, self._join_timeout_s)
            self.close("gave up joining")
            raise error from None
        except BaseException:
            self.close("gave up joining")
            raise
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Says goodbye; exceptions propagate."""
        self.close("done" if kind is None else f"the training loop raised {kind.__name__}")

    def close(self, reason: str = "done", timeout_s: float = _CLOSE_S) -> None:
        """Says goodbye and ends the background thread, within ``timeout_s``; again is harmless."""
        if self._worker is None:
            return
        self._worker.stop(reason)
        if not self._worker.join_thread(timeout_s):
            _LOG.warning("%s: the background thread did not end in time", self._identity.learner_id)

    async def __aenter__(self) -> Self:
        """As ``with``, within the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._make_worker().run())
        try:
            async with asyncio.timeout(self._join_timeout_s):
                await asyncio.wrap_future(self._exchange.synced)
        except TimeoutError:
            error = not_joined(self._exchange, self._join_timeout_s)
            await self.aclose("gave up joining")
            raise error from None
        except BaseException:
            await self.aclose("gave up joining")
            raise
        self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Says goodbye; exceptions propagate."""
        await self.aclose("done" if kind is None else f"the training loop raised {kind.__name__}")

    async def aclose(self, reason: str = "done") -> None:
        """Says goodbye and ends the background work."""
        if self._worker is not None and self._task is not None:
            self._worker.stop(reason)
            await self._task

    def _make_worker(self) -> Worker:
        if self._worker is not None:
            raise UsageError(
                Reason.CONFIG_CONFLICT, "a Learner is entered once; create a new one to join again"
            )
        self._stepped_at = time.perf_counter()
        self._worker = Worker(
            exchange=self._exchange,
            parameters=self._parameters,
            identity=self._identity,
            search=self._search,
            runtime=self._runtime,
            saved=self._saved,
            inner=self._inner,
        )
        return self._worker

    def _begin(self) -> None:
        self._boundary.write(self._exchange.take_updates())
        if self._saved is not None and self._worker is not None:
            self._boundary.go_on(self._saved, self.settings)
            self._worker.wake()
        self._stepped_at = self._meter.joined(entered_at=self._stepped_at)

    def _running(self) -> Worker:
        if self._worker is None or self._exchange.grant is None:
            raise UsageError(Reason.CONFIG_CONFLICT, "step is called inside 'with learner:' only")
        return self._worker

    def _granted(self) -> Grant:
        if self._exchange.grant is None:
            raise UsageError(Reason.CONFIG_CONFLICT, "the learner has not joined; enter it first")
        return self._exchange.grant
