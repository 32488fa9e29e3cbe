"""What the training thread and the background thread share.

One lock guards it, held for a few assignments at a time: never over a copy of tensors, a call of
the network or a wait. So a step of the training thread is never behind the network.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout
from decoupled_diloco.versions import Version
from learner_client.buffers import BufferPool
from learner_client.captures import Capture, PushWork
from learner_client.core.connection import Change, Connection, Event, State
from learner_client.core.learner_core import (
    AnswerDecline,
    LearnerCore,
    PullRequest,
    Stamp,
)
from learner_client.core.pending import PendingUpdates
from learner_client.core.reports import StepReport
from learner_client.data import LeasedData
from learner_client.grants import Grant, Update
from learner_client.leases import Progress
from learner_client.snapshots import PartExchange
from learner_client.tally import Tally

_LOG = logging.getLogger("learner_client")

_BAD = (State.FENCED, State.REFUSED)
_OVER = (*_BAD, State.FINISHED, State.DRAINING, State.LEFT)


class Exchange:
    """See the module; every method may be called from either thread.

    Args:
        learner_id: for log lines.
        on_change: called with every change of state, outside the lock.
    """

    def __init__(
        self, learner_id: str, *, on_change: Callable[[Change], None] | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._learner_id = learner_id
        self._on_change = on_change
        self._connection = Connection()
        self._pending: PendingUpdates[Update] = PendingUpdates()
        self._captures: dict[int, Capture] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._newest: dict[int, Version] = {}
        self._core: LearnerCore | None = None
        self._buffers = BufferPool(most=0)
        self._failure: DilocoError | None = None
        self.grant: Grant | None = None
        self.layout: Layout | None = None
        self.tally = Tally()
        self.snapshots = PartExchange()
        self.synced: Future[None] = Future()
        self._is_void = False
        self.data = LeasedData(
            is_over=self._is_over,
            failure=lambda: self.failure,
            on_wait=self._waits_for_data,
        )
        self.may_train: Callable[[], bool] = lambda: True

    # -- both ------------------------------------------------------------------------------

    @property
    def core(self) -> LearnerCore:
        """The bookkeeping; exists from the first Join on. Read-only outside this class."""
        assert self._core is not None, "not joined yet"
        return self._core

    @property
    def connection(self) -> Connection:
        """State of the connection. Read-only outside this class."""
        return self._connection

    @property
    def failure(self) -> DilocoError | None:
        """What ends the training of this process."""
        return self._failure

    @property
    def bases(self) -> dict[int, torch.Tensor]:
        """Published copy applied last, by fragment."""
        with self._lock:
            return dict(self._bases)

    def say(self, change: Change | None) -> None:
        """Logs a change of state and hands it on."""
        if change is None:
            return
        self.tally.offline.heed(online=change.online)
        is_fault = not change.online and change.state not in (State.JOINING, State.LEFT)
        is_fault = is_fault or change.reason == Reason.QUARANTINED
        level = logging.WARNING if is_fault or change.state in _BAD else logging.INFO
        mode = "online" if change.online else "offline"
        text = f"{self._learner_id}: {change.state}, {mode}"
        if change.reason:
            text += f", {change.reason}: {change.detail}"
        elif change.state is State.TRAINING and not change.online:
            text += ", training on"
        _LOG.log(level, text)
        if self._on_change is not None:
            self._on_change(change)

    def happened(self, event: Event, reason: str = "", detail: str = "") -> None:
        """Moves the state."""
        with self._lock:
            change = self._connection.happened(event, reason, detail)
        self.say(change)

    # -- background thread -----------------------------------------------------------------

    def begin(self, core: LearnerCore, layout: Layout, bases: dict[int, torch.Tensor]) -> None:
        """The first Join was answered: from now on there are fragments."""
        with self._lock:
            self._core = core
            self.layout = layout
            self._bases = dict(bases)
            self._newest = core.versions
            self._buffers = BufferPool(most=2 * len(core.due.now()))

    def granted(self, grant: Grant) -> None:
        """A Join was answered."""
        self.snapshots.joined(grant.term, grant.snapshot)
        self.data.begin(grant.settings)
        with self._lock:
            self.grant = grant
            self.core.joined(
                term=grant.term, local_step=grant.local_step, global_step=grant.global_step
            )
            event = Event.SEED_GRANTED if grant.seed else Event.JOINED
            change = self._connection.happened(event)
            up = self._connection.up()
        self.say(up or change)

    def connected(self) -> None:
        """The synchronizer answers on a stream."""
        if self._connection.online:
            return
        with self._lock:
            change = self._connection.up()
        self.say(change)

    def lost(self, error: DilocoError) -> None:
        """The connection is gone, or an error that heals was the answer."""
        with self._lock:
            self._connection.happened(Event.LOST)
            change = self._connection.down(error.reason, error.message)
        self.say(change)

    def waits(self, reason: str, detail: str) -> None:
        """Says once what is waited for."""
        with self._lock:
            change = self._connection.waits(reason, detail)
        self.say(change)

    def failed(self, error: DilocoError) -> None:
        """No waiting heals this: the next step raises it."""
        event = Event.FENCE if error.reason is Reason.FENCED else Event.REFUSE
        with self._lock:
            self._failure = error
            change = self._connection.happened(event, str(error.reason), error.message)
        self.say(change)
        if not self.synced.done():
            self.synced.set_exception(error)

    def ended(self) -> None:
        """The background work is over; nobody waits for parameters that cannot come any more."""
        if not self.synced.done():
            self.synced.set_exception(
                DilocoError(
                    Reason.UNAVAILABLE,
                    f"the connection ended before the parameters came: {self._connection.detail}",
                )
            )

    def offer(self, update: Update) -> None:
        """Queues an update for the next boundary, unless the fragment has it already."""
        with self._lock:
            self.tally.num_updates += 1
            self.core.heard(update.version)
            if self._newest.get(update.fragment) == update.version:
                return
            self._newest[update.fragment] = update.version
            self._pending.offer(update.fragment, update)

    def all_held(self) -> None:
        """There is a published copy of every fragment: training may start, where nothing else is
        waited for.
        """
        if not self.may_train():
            return
        with self._lock:
            change = self._connection.happened(Event.SYNCED)
        self.say(change)
        if not self.synced.done():
            self.synced.set_result(None)

    def pull(self, pull: PullRequest) -> PushWork | AnswerDecline:
        """Answers a pull; the copy of a ``PushWork`` must be released."""
        with self._lock:
            answer = self.core.pull(pull)
            if isinstance(answer, AnswerDecline):
                self.tally.declined[str(answer.reason)] += 1
                return answer
            capture = self._captures[pull.fragment]
            assert capture.stamp is answer.stamp, "the newest copy is the one that is stamped"
            capture.num_readers += 1
            return PushWork(answer=answer, capture=capture, base=self._bases[pull.fragment])

    def release(self, capture: Capture) -> None:
        """A copy is no longer read."""
        with self._lock:
            capture.num_readers -= 1
            self._recycle(capture)

    def settled(self, stamp: Stamp, *, accepted: bool, word: str) -> None:
        """A push was answered."""
        with self._lock:
            self.tally.pushes[word] += 1
            if accepted:
                self.core.accepted(stamp)

    def take_report(self) -> StepReport | None:
        """Takes what is to be reported."""
        with self._lock:
            return self.core.take_report()

    def give_back(self, report: StepReport) -> None:
        """What was taken could not be sent."""
        with self._lock:
            self.core.give_back(report)

    def scheduled(self, global_step: int, fragments: tuple[int, ...]) -> None:
        """A schedule was heard."""
        with self._lock:
            self.core.due.scheduled(global_step, fragments)

    # -- training thread, in this order ----------------------------------------------------

    def count(self, num_tokens: int) -> list[Update]:
        """Counts a step and takes the pending updates, in order."""
        with self._lock:
            self.core.count(num_tokens)
            return self._pending.take()

    def take_updates(self) -> list[Update]:
        """Takes the pending updates without a step."""
        with self._lock:
            return self._pending.take()

    def applied(self, update: Update) -> None:
        """An update is in the model."""
        self.snapshots.applied(update.version)
        with self._lock:
            self.tally.num_applied += 1
            self._drop_capture(update.fragment)
            self._bases[update.fragment] = update.vector
            self.core.applied(update.fragment, update.version)

    def to_copy(self) -> list[Capture]:
        """Copies to make now, each with a buffer; the copy of a fragment no longer due goes."""
        with self._lock:
            due = self.core.to_copy()
            for fragment in self._captures.keys() - set(self.core.due.now()):
                self._drop_capture(fragment)
            return [self._blank(fragment) for fragment in due]

    def copied(self, captures: list[Capture]) -> None:
        """Copies are complete."""
        with self._lock:
            if self._is_void:
                for capture in captures:
                    self._buffers.give(capture.buffer)
                return
            for capture in captures:
                self._drop_capture(capture.stamp.fragment)
                self._captures[capture.stamp.fragment] = capture
                self.core.copied(capture.stamp)

    def report(
        self,
        *,
        num_tokens: int,
        loss: float | None,
        step_s: float,
        overhead_s: float,
        progress: Progress,
    ) -> None:
        """Hands over the report of this step."""
        with self._lock:
            self.tally.trained(num_tokens, loss)
            self.core.report(
                num_tokens=num_tokens,
                loss=loss,
                step_s=step_s,
                overhead_s=overhead_s,
                data_lease_id=progress.lease_id,
                data_position=progress.position,
            )

    # -- leased data -----------------------------------------------------------------------

    def leases_lost(self) -> None:
        """Others train on our data: what is not merged must never be.

        No copy is pushed any more; at the next boundary the model goes back to what is published.
        """
        self.data.lost()
        with self._lock:
            self._is_void = True
            for fragment in list(self._captures):
                self._drop_capture(fragment)

    def is_void(self, progress: Progress) -> bool:
        """Whether what was trained since the last updates is to be given up, at this boundary."""
        return self._is_void or progress.is_lost

    def discarded(self) -> None:
        """The model is what is published: nothing is trained since."""
        with self._lock:
            self._is_void = False
            for fragment in self._bases:
                self._drop_capture(fragment)
                self.core.counters.applied(fragment)

    def _is_over(self) -> bool:
        total = self.grant.settings.total_global_steps if self.grant is not None else 0
        return self._connection.state in _OVER or 0 < total <= self.core.global_step

    def _waits_for_data(self, detail: str) -> None:
        if self._connection.online:
            self.waits("data" if detail else "", detail)
        elif detail:
            _LOG.warning("%s: training waits for data: %s", self._learner_id, detail)

    # -- under the lock --------------------------------------------------------------------

    def _blank(self, fragment: int) -> Capture:
        assert self.layout is not None, "not joined yet"
        num_elements = self.layout.fragments[fragment].num_elements
        buffer = self._buffers.take(num_elements)
        return Capture(
            stamp=self.core.stamp(fragment), buffer=buffer, vector=buffer.narrow(0, 0, num_elements)
        )

    def _drop_capture(self, fragment: int) -> None:
        capture = self._captures.pop(fragment, None)
        if capture is not None:
            self.core.forget(fragment)
            capture.is_current = False
            self._recycle(capture)

    def _recycle(self, capture: Capture) -> None:
        if not capture.is_current and capture.num_readers == 0:
            self._buffers.give(capture.buffer)
