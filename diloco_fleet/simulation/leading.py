"""One term of a leader: `synchronizer_server.engine`, `round_work`, `commits` in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout
from decoupled_diloco.versions import Incarnation, Version
from diloco_fleet.simulation.kernel import Either, Promise, Task, Work
from diloco_fleet.simulation.messages import Schedule
from diloco_fleet.simulation.network import End
from diloco_fleet.simulation.replicas import Replicas
from synchronizer_server.core import effects as fx
from synchronizer_server.core import events as ev
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.synchronizer import SynchronizerCore
from synchronizer_server.ledger import Ledger, make_record
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.tensors import Merged, TensorBook
from synchronizer_server.updates import UpdateBook

if TYPE_CHECKING:
    from diloco_fleet.simulation.node import Node

_PERSIST_RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One push, over all the streams that carry it."""

    vector: torch.Tensor | None = None
    work: tuple[int, int, int] | None = None
    streams: int = 0
    answer: Promise = field(default_factory=Promise)


@dataclass(slots=True, eq=False)
class Reporting:
    """A report stream that is open."""

    learner_id: str
    incarnation: Incarnation
    end: End
    closed: bool = False

    def close(self, error: DilocoError) -> None:
        """Ends it after what was said."""
        if not self.closed:
            self.closed = True
            self.end.close(error)


class Engine:
    """A leader at work.

    Args:
        node: the process.
        core: the state machine.
        claim: our claim, for this term.
        layout: layout of the run, where it is known already.
        replicas: our standbys.
    """

    def __init__(
        self, node: Node, core: SynchronizerCore, claim: Claim, layout: Layout | None,
        replicas: Replicas,
    ) -> None:  # fmt: skip
        settings = node.world.settings
        self.node, self.core, self.claim, self.replicas = node, core, claim, replicas
        self.layout = layout
        self.tickets: dict[ev.PushKey, Ticket] = {}
        self.streams: dict[str, Reporting] = {}
        self.ledger = Ledger()
        self.updates = UpdateBook(settings.retained_updates)
        self.tensors: TensorBook | None = None
        self.published = Promise()
        self.closed = False
        self.store_lost = Promise()
        self.farewell = DilocoError(Reason.DRAINING, "the synchronizer stops; train on")
        self.granted: dict[tuple[str, str], Incarnation] = {}
        self.joining: Promise | None = None
        self._life = node.life
        self._merged: dict[int, Merged] = {}
        self._seed: dict[int, torch.Tensor] = {}
        self._tasks: list[Task] = []
        self._timer = Promise()

    # -- events in, effects out ------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        """Feeds the core and carries out what follows."""
        oracle = self.node.world.oracle
        oracle.event(self, event)
        effects = self.core.handle(event, self.node.kernel.now)
        for effect in effects:
            self._carry_out(effect)
        oracle.state(self)
        timer, self._timer = self._timer, Promise()
        timer.set()
        return effects

    def run_timer(self) -> Work:
        """Ticks the core whenever it asks for it."""
        while True:
            now = self.node.kernel.now
            wake_at = self.core.wake_at(now)
            timer = self._timer
            delay = None if wake_at is None else max(wake_at - now, 0.0)
            yield Either((timer,), delay)
            if not timer.done:
                self.handle(ev.Tick())

    def spawn(self, work: Work) -> Task:
        """Runs something beside, until the term is over."""
        self._tasks = [task for task in self._tasks if not task.done]
        self._tasks.append(self.node.spawn(work))
        return self._tasks[-1]

    def close(self, farewell: DilocoError) -> None:
        """Cancels what runs beside and ends all streams."""
        self.closed, self.farewell = True, farewell
        self.wake_watchers()
        for stream in list(self.streams.values()):
            stream.close(farewell)
        for task in self._tasks:
            task.cancel()

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPull():
                self.node.world.oracle.pulls(self, effect)
                stream = self.streams.get(effect.learner_id)
                if stream is not None and stream.incarnation == effect.incarnation:
                    stream.end.send((self.core.state.term, effect.global_step, effect.fragment))
                    self.node.point("pull")
            case fx.SendSchedule():
                for stream in self.streams.values():
                    stream.end.send(Schedule(effect.global_step, effect.due_fragments))
            case fx.AcceptPush():
                self._accept(effect)
            case fx.AnswerPush():
                self._answer(effect)
            case fx.MergeRound():
                self.spawn(self._merge(effect))
            case fx.PersistRound():
                self.spawn(self._persist(effect))
            case fx.PublishRound():
                self._publish(effect)
            case fx.PersistSeed():
                self.spawn(self._persist_seed())
            case fx.PublishSeed():
                self.node.point("publish_seed")
                self.node.world.oracle.published(self, 0)
                self._seed.clear()
                self.wake_watchers()
            case fx.Fence() | fx.CloseStream():
                self._end_stream(effect)
            case _:
                pass  # news, and what the services read from what `handle` returns

    # -- streams and pushes ----------------------------------------------------------------------

    def stream_ended(self, stream: Reporting) -> None:
        """A report stream is over; does nothing where it was replaced or ended before."""
        if self.streams.get(stream.learner_id) is stream and self._life == self.node.life:
            del self.streams[stream.learner_id]
            if not self.closed:
                self.handle(
                    ev.StreamClosed(learner_id=stream.learner_id, incarnation=stream.incarnation)
                )

    def _end_stream(self, effect: fx.Fence | fx.CloseStream) -> None:
        reason = effect.reason if isinstance(effect, fx.CloseStream) else Reason.FENCED
        stream = self.streams.get(effect.learner_id)
        if stream is not None and stream.incarnation == effect.incarnation:
            del self.streams[effect.learner_id]
            stream.close(DilocoError(reason, "this stream is over"))

    def _answer(self, effect: fx.AnswerPush) -> None:
        self.node.world.tally[f"push_{effect.reason}"] += 1
        ticket = self.tickets.pop(effect.key, None)
        if ticket is not None:
            ticket.answer.set((False, effect.reason, effect.message))

    def _accept(self, effect: fx.AcceptPush) -> None:
        key = effect.key
        ticket = self.tickets.pop(key)
        vector = ticket.vector
        assert vector is not None, "staged means decoded"
        older_base = None
        if effect.rebase:
            round_ = self.core.state.round(key.global_step)
            assert round_ is not None, "accepted into a round in flight"
            base = round_.accepted[key.learner_id].base
            older_base = self.updates.copy_at(key.fragment, base)
            assert older_base is not None, "retained by core and shell alike"
        self.node.world.oracle.accepts(self, effect, ticket, older_base)

        def accumulate() -> None:
            assert self.tensors is not None, "seeded"
            self.tensors.accumulate(
                key.global_step, key.fragment, vector, effect.weight, older_base
            )

        done = self.node.tensors_runner.submit("accumulate", accumulate)

        def finish() -> Work:
            yield done
            ticket.answer.set((True, Reason.DUPLICATE, ""))

        self.spawn(finish())

    # -- merge, persist, publish -----------------------------------------------------------------

    def _merge(self, effect: fx.MergeRound) -> Work:
        base = self.updates.version(effect.fragment)

        def merge() -> Merged:
            assert self.tensors is not None, "seeded"
            before = self.tensors.state(effect.fragment)
            merged = self.tensors.merge(effect.global_step, effect.fragment, base)
            self.node.world.oracle.merged(self, effect, before, merged)
            return merged

        merged = yield self.node.tensors_runner.submit("merge", merge)
        self._merged[effect.global_step] = merged
        self.handle(ev.RoundMerged(global_step=effect.global_step, version=merged.update.result))

    def _persist(self, effect: fx.PersistRound) -> Work:
        summary = effect.summary
        merged = self._merged[summary.global_step]
        versions = list(self.updates.versions())
        versions[summary.fragment] = merged.update.result
        record = self.make_record(summary.global_step, tuple(versions), summary)
        states = {summary.fragment: merged.state}
        try:
            yield self.node.store_runner.submit("persist", lambda: self._commit(record, states))
        except DilocoError as error:
            self.handle(_persist_failed(summary.global_step, error))
            return
        yield from self.replicas.publishable(record, states)
        self.handle(ev.RoundPersisted(global_step=summary.global_step))

    def make_record(
        self, global_step: int, versions: tuple[Version, ...], summary: fx.RoundSummary | None
    ) -> RoundRecord:
        """The record of what the core knows now."""
        assert self.layout is not None, "a record needs the layout"
        return make_record(
            self.core.state,
            global_step=global_step,
            versions=versions,
            fingerprint=self.layout.fingerprint,
            summary=summary,
        )

    def _commit(self, record: RoundRecord, states: dict[int, FragmentState]) -> None:
        world = self.node.world
        if world.faults.disk_is_full(self.node):
            raise DilocoError(Reason.DISK_FULL, "no room")
        self.node.store.commit(record, states)
        world.oracle.persisted(self, record, states)

    def _publish(self, effect: fx.PublishRound) -> None:
        self.node.point("publish")
        summary = effect.summary
        self.node.world.oracle.published(self, summary.global_step)
        merged = self._merged.pop(summary.global_step)
        assert self.tensors is not None, "seeded"
        self.tensors.publish(merged)
        self.updates.publish(merged.update, merged.state.published)
        self.ledger.published(summary)
        self.wake_watchers()
        self.node.point("published")

    # -- the seed --------------------------------------------------------------------------------

    def stage_seed(self, fragment: int, vector: torch.Tensor) -> None:
        """Keeps the first parameters of a fragment until all are there."""
        self._seed[fragment] = vector

    def _persist_seed(self) -> Work:
        states = {i: FragmentState.seeded(v) for i, v in sorted(self._seed.items())}
        versions = tuple(Version(self.claim.term, 0, s.digest()) for s in states.values())
        record = self.make_record(0, versions, None)
        try:
            yield self.node.store_runner.submit(
                "persist_seed", lambda: self._commit(record, states)
            )
        except DilocoError as error:
            self.handle(_persist_failed(0, error))
            return
        self.start(versions, list(states.values()))
        yield from self.replicas.publishable(record, states)
        yield from self.mark_seeded()
        self.handle(ev.SeedPersisted(versions=versions))

    def start(self, versions: tuple[Version, ...], states: list[FragmentState]) -> None:
        """Begins with these states."""
        assert self.tensors is not None, "the layout is known"
        self.tensors.start(states)
        self.updates.start(versions, [s.published for s in states])

    def mark_seeded(self) -> Work:
        """Tells the membership that this run must never be seeded again."""
        keeper, term = self.node.world.keeper, self.claim.term
        try:
            yield from keeper.ask(self.node, lambda: keeper.membership.mark_seeded(term))
        except DilocoError:
            self.node.world.tally["seed_not_marked"] += 1

    def wake_watchers(self) -> None:
        """Lets every watcher look again."""
        published, self.published = self.published, Promise()
        published.set()

    # -- heartbeats ------------------------------------------------------------------------------

    def run_heartbeats(self) -> Work:
        """Tells the membership who is alive, as `synchronizer_server.heartbeats`."""
        settings, state = self.node.world.settings, self.core.state
        membership = self.node.world.keeper.membership
        limit_s = settings.heartbeat_timeout_s
        while True:
            yield settings.heartbeat_interval_s
            batch = {x.learner_id: x.incarnation for x in state.roster.live()}
            calls: list[Any] = [lambda b=batch: membership.heartbeat(b, state.term)]
            if state.seeded:
                calls.append(lambda: membership.mark_seeded(state.term))
            calls.append(lambda: membership.expire(limit_s, state.term))
            try:
                for call in calls:
                    yield from self.node.world.keeper.ask(self.node, call)
            except DilocoError:
                self.node.world.tally["heartbeats_lost"] += 1


def _persist_failed(global_step: int, error: DilocoError) -> ev.PersistFailed:
    return ev.PersistFailed(
        global_step=global_step,
        reason=error.reason,
        message=error.message,
        retry_after_s=_PERSIST_RETRY_S,
    )
