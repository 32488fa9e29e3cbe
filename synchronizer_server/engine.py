"""The shell round the core: carries out its effects and feeds it what happens.

One event loop owns everything here. Tensor work and storage run in order on runners of their own,
so that reports and heartbeats are never behind a merge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import Incarnation
from synchronizer_server.convert import OUTCOMES
from synchronizer_server.core import effects as fx
from synchronizer_server.core import events as ev
from synchronizer_server.ledger import Ledger
from synchronizer_server.limits import StreamLimits
from synchronizer_server.parts import Parts
from synchronizer_server.recovery import RelayDesk
from synchronizer_server.roll_backs import RollBacks
from synchronizer_server.round_work import RoundWork
from synchronizer_server.snapshotting import SnapshotDesk
from synchronizer_server.streams import ReportStream
from synchronizer_server.tensors import TensorBook
from synchronizer_server.tickets import TicketDesk
from synchronizer_server.updates import UpdateBook
from synchronizer_server.vitals import Before, Vitals

logger = logging.getLogger(__name__)

_CLOSE_TRIES: Final = 5
_CLOSE_TRY_S: Final = 1.0


class Engine:
    """One synchronizer at work.

    Args:
        parts: what it is made of.
        layout: layout of the run, where it is known already.
    """

    def __init__(self, parts: Parts, layout: Layout | None) -> None:
        self.parts = parts
        self.core = parts.core
        self.layout = layout
        self.tickets = TicketDesk(parts.max_staged_bytes)
        self.streams: dict[str, ReportStream] = {}
        self.limits = StreamLimits()
        self.roll_backs = RollBacks()
        self.ledger = Ledger()
        self.vitals = Vitals(Before.of(parts.core.state))
        self.rounds = RoundWork(parts, self.ledger, self.vitals, self.handle)
        self.relays = RelayDesk(self.tell, parts.journal)
        self.snapshots = SnapshotDesk(
            parts, handle=self.handle, send_all=self._send_all, spawn=self.spawn
        )
        self.quorum_owed = False
        """Whether the membership may hold an older quorum, since it could not be told."""
        self.complete = asyncio.Event()
        self.started_at = parts.clock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Event = asyncio.Event()
        self._failure: BaseException | None = None
        self.fatal = asyncio.Event()
        self.store_lost = asyncio.Event()
        self.closed = False
        self.farewell = DilocoError(Reason.DRAINING, "the synchronizer stops; train on")

    # -- queries ---------------------------------------------------------------------------------

    @property
    def tensors(self) -> TensorBook:
        """The tensors of the run; there once the layout is known."""
        return self.parts.committer.tensors

    @property
    def updates(self) -> UpdateBook:
        """What watchers get."""
        return self.parts.committer.updates

    def claim(self) -> types_pb2.LeadershipClaim:
        """This process's claim of leadership."""
        return self.parts.claim.to_proto()

    def clock_message(self) -> types_pb2.Clock:
        """The synchronizer's clock: t, and the version vector."""
        return types_pb2.Clock(
            sender=self.parts.claim.leader_id,
            term=self.core.state.term,
            own_step=self.core.state.committed,
            known_global_steps=[v.global_step for v in self.updates.versions()],
            snapshot=self.core.snapshots.cut,
        )

    @property
    def failure(self) -> BaseException | None:
        """What ended this engine, if anything did."""
        return self._failure

    # -- events in, effects out ------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        """Feeds an event to the core and carries out what follows; returns the effects.

        A failure of ours leaves the core half-way: it ends the engine loudly, whoever called.
        """
        try:
            effects = self.core.handle(event, self.parts.clock())
            for effect in effects:
                self._carry_out(effect)
        except Exception as error:
            self._fail(error)
            raise
        self._timer.set()
        return effects

    async def run_timer(self) -> None:
        """Ticks the core whenever it asks for it; runs until cancelled."""
        while True:
            wake_at = self.core.wake_at(self.parts.clock())
            self._timer.clear()
            delay = None if wake_at is None else max(wake_at - self.parts.clock(), 0.0)
            try:
                # Not wait_for, which in Python 3.11 may swallow a cancellation.
                async with asyncio.timeout(delay):
                    await self._timer.wait()
            except TimeoutError:
                self.handle(ev.Tick())

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs something beside; a failure of ours ends the engine loudly."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    async def close(self, farewell: DilocoError | None = None) -> None:
        """Cancels what runs beside and ends all streams, with ``farewell`` where one is given.

        A library may swallow a cancellation, so it is said again; whatever does not heed it keeps
        nobody from the lease of this process for longer than a few seconds.
        """
        self.closed = True
        self.farewell = farewell or self.farewell
        self.snapshots.close()
        self.roll_backs.ended()
        self.parts.committer.wake_watchers()
        for stream in list(self.streams.values()):
            stream.close(self.farewell)
        self.relays.close_all(self.farewell)
        left = set(self._tasks)
        for _ in range(_CLOSE_TRIES):
            for task in left:
                task.cancel()
            if left:
                _, left = await asyncio.wait(left, timeout=_CLOSE_TRY_S)
        for task in left:
            logger.error("this is not waited for, though it does not end: %r", task)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            ours = None if isinstance(error, DilocoError) else error
            logger.critical("the synchronizer cannot go on: %s", error, exc_info=ours)
            self._failure = error
            self.fatal.set()

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPull():
                self._send_pull(effect)
            case fx.SendSchedule():
                schedule = pb.Schedule(
                    global_step=effect.global_step, due_fragments=effect.due_fragments
                )
                self._send_all(pb.ReportResponse(schedule=schedule))
            case fx.SendDrain():
                drain = pb.ReportResponse(drain=pb.Drain(reason=effect.reason))
                self.tell(effect.learner_id, effect.incarnation, drain)
            case fx.SendStop():
                stop = pb.Stop(global_step=effect.global_step, reason="the run is complete")
                self._send_all(pb.ReportResponse(stop=stop))
            case fx.AcceptPush():
                self._accept(effect)
            case fx.AnswerPush():
                self._answer(effect)
            case fx.MergeRound():
                self.spawn(self.rounds.merge(effect))
            case fx.PersistRound():
                self.spawn(self.rounds.persist(effect))
            case fx.PublishRound():
                self.rounds.publish(effect)
                if effect.summary.rolled_back:
                    fragment = effect.summary.fragment
                    self.roll_backs.published(fragment, self.updates.version(fragment))
            case fx.RollBackFailed():
                error = DilocoError(Reason.STALE_BASE, effect.message)
                self.roll_backs.failed(effect.fragment, error)
            case fx.PersistSeed():
                self.spawn(self.rounds.persist_seed())
            case fx.PublishSeed():
                self.rounds.publish_seed()
            case fx.Fence() | fx.CloseStream():
                self._end_stream(effect)
            case fx.BeginSnapshot() | fx.KeepSnapshot() | fx.EndSnapshot():
                self.snapshots.carry_out(effect)
            case fx.Completed():
                self._completed(effect)
            case fx.QuarantineChanged():
                self._quarantine(effect)
            case fx.WaitChanged() | fx.LearnerChanged():
                self._tell(effect)
            case fx.CountersCut():
                logger.warning("%s: %s", effect.learner_id, effect.detail)
            case fx.GrantSeed() | fx.GrantData() | fx.StagePush():
                pass  # the services read these from what `handle` returns
            case fx.AskDonor() | fx.DropDonor() | fx.EndRecovery():
                self.relays.carry_out(effect)

    # -- streams ---------------------------------------------------------------------------------

    def _send_all(self, message: pb.ReportResponse) -> None:
        for stream in list(self.streams.values()):
            self.send(stream, message)

    def send(self, stream: ReportStream, message: pb.ReportResponse) -> None:
        """Says something to one learner."""
        if not stream.send(message):
            # After the effects under way: what follows from this is no part of them.
            asyncio.get_running_loop().call_soon(self.stream_ended, stream)

    def stream_ended(self, stream: ReportStream) -> None:
        """A report stream is over; does nothing where it was replaced or ended before."""
        if self.streams.get(stream.learner_id) is stream:
            del self.streams[stream.learner_id]
            if self.closed:
                return
            self.handle(
                ev.StreamClosed(learner_id=stream.learner_id, incarnation=stream.incarnation)
            )

    def tell(self, learner_id: str, incarnation: Incarnation, message: pb.ReportResponse) -> None:
        """Says something to a learner in this life; nothing where it is not there."""
        stream = self.streams.get(learner_id)
        if stream is not None and stream.incarnation == incarnation:
            self.send(stream, message)

    def _send_pull(self, effect: fx.SendPull) -> None:
        pull = pb.Pull(
            term=self.core.state.term, global_step=effect.global_step, fragment=effect.fragment
        )
        self.tell(effect.learner_id, effect.incarnation, pb.ReportResponse(pull=pull))

    def _quarantine(self, effect: fx.QuarantineChanged) -> None:
        if effect.reason:
            logger.warning(
                "%s is left out for %.0f s: %s", effect.learner_id, effect.seconds, effect.reason
            )
        else:
            logger.info("%s is asked again", effect.learner_id)
        self.parts.journal.write(
            "quarantine",
            learner_id=effect.learner_id,
            incarnation=str(effect.incarnation),
            reason=effect.reason,
            seconds=effect.seconds,
        )
        stream = self.streams.get(effect.learner_id)
        if stream is not None:
            told = pb.Quarantine(reason=effect.reason, seconds=effect.seconds)
            self.send(stream, pb.ReportResponse(quarantine=told))

    def _end_stream(self, effect: fx.Fence | fx.CloseStream) -> None:
        reason = effect.reason if isinstance(effect, fx.CloseStream) else Reason.FENCED
        stream = self.streams.get(effect.learner_id)
        if stream is None or stream.incarnation != effect.incarnation:
            return
        del self.streams[effect.learner_id]
        text = {
            Reason.FENCED: "a later incarnation of this learner has joined; this one must stop",
            Reason.LEARNER_GONE: "nothing was heard in time; open the stream again",
        }.get(reason, "join again")
        stream.close(DilocoError(reason, text, learner=effect.learner_id))

    # -- pushes ----------------------------------------------------------------------------------

    def _answer(self, effect: fx.AnswerPush) -> None:
        if effect.outcome is not fx.Outcome.ACCEPTED:
            self.ledger.turned_down(effect.outcome, str(effect.reason))
        ticket = self.tickets.drop(effect.key)
        if ticket is not None:
            ticket.settle(
                pb.PushResponse(
                    outcome=OUTCOMES[effect.outcome],
                    reason=str(effect.reason),
                    message=effect.message,
                    clock=self.clock_message(),
                )
            )

    def _accept(self, effect: fx.AcceptPush) -> None:
        key = effect.key
        ticket = self.tickets.drop(key)
        assert ticket is not None, "accepted what was staged"
        vector = ticket.vector
        assert vector is not None, "staged means decoded"
        older_base = None
        if effect.rebase:
            header = self.core.state.round(key.global_step)
            assert header is not None, "accepted into a round in flight"
            base = header.accepted[key.learner_id].base
            older_base = self.updates.copy_at(key.fragment, base)
            assert older_base is not None, "retained by core and shell alike"
        encoding = ticket.encoding
        self.ledger.accepted(key.learner_id, encoding.payload_bytes, encoding.codec)
        done = self.parts.tensors_runner.submit(
            lambda: self.tensors.accumulate(
                key.global_step, key.fragment, vector, effect.weight, older_base
            )
        )
        answer = pb.PushResponse(outcome=pb.PUSH_OUTCOME_ACCEPTED, clock=self.clock_message())

        async def finish() -> None:
            await done
            ticket.settle(answer)

        self.spawn(finish())

    # -- news and the end ----------------------------------------------------------------------

    def _completed(self, effect: fx.Completed) -> None:
        word = "complete" if self.core.state.finished else "drained"
        logger.info("%s at global step %d", word, effect.global_step)
        self.parts.journal.write(word, global_step=effect.global_step)
        self.snapshots.close()
        self.roll_backs.ended()
        self.complete.set()

    def _tell(self, effect: fx.WaitChanged | fx.LearnerChanged) -> None:
        if isinstance(effect, fx.WaitChanged):
            text = f"{effect.reason}: {effect.detail}" if effect.reason else effect.detail
            logger.info("%s: %s", effect.subject, text)
            self.parts.journal.write(
                "wait", subject=effect.subject, reason=effect.reason, detail=effect.detail
            )
            return
        logger.info("%s is %s: %s", effect.learner_id, effect.state, effect.reason)
        self.parts.journal.write(
            "learner",
            learner_id=effect.learner_id,
            incarnation=str(effect.incarnation),
            state=effect.state,
            reason=effect.reason,
        )

    def live_incarnations(self) -> dict[str, Incarnation]:
        """Live learners and their incarnations, for a heartbeat batch."""
        return {x.learner_id: x.incarnation for x in self.core.state.roster.live()}
