"""One learner process: `learner_client.learner`, `worker` and `watcher`, in virtual time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Incarnation, Version
from diloco_fleet.simulation import services
from diloco_fleet.simulation.kernel import Either, Process, Promise, Work
from diloco_fleet.simulation.messages import Join, Joined, Push, Schedule, Watch
from diloco_fleet.simulation.network import End, unavailable
from diloco_fleet.simulation.pushing import Pusher, push_of
from diloco_fleet.simulation.search import LeaderSearch
from learner_client.core.connection import Event, State
from learner_client.core.learner_core import LearnerCore, PullRequest
from learner_client.core.retry import REJOIN, Backoff, is_fatal
from learner_client.exchange import Exchange
from learner_client.grants import Grant, Update
from learner_client.leases import Progress
from learner_client.updates import FRAGMENT_BROKEN, StagedUpdate, apply_update
from synchronizer_server.core import events as ev
from synchronizer_server.updates import Update as Published

if TYPE_CHECKING:
    from diloco_fleet.simulation.world import World

_ENDED = frozenset({State.FINISHED, State.FENCED, State.REFUSED, State.LEFT})
_JOIN_DEADLINE_S = 5.0
_MAX_ATTEMPTS = 20
_LEAVES = frozenset({Reason.FENCED, Reason.NOT_LEADING})


class LearnerProcess(Process):
    """A learner; every start is a new process with a new model.

    Args:
        world: the world.
        learner_id: its id.
        step_s: duration of an inner step, seconds.
        name: name of the process, where it is not the id.
    """

    def __init__(self, world: World, learner_id: str, step_s: float, name: str = "") -> None:
        super().__init__(world.kernel, name or learner_id)
        self.world = world
        self.learner_id = learner_id
        self.step_s = step_s
        self.uid = 0
        self.request_id = ""
        self.is_over = False
        self.sent: list[Push] = []
        self.exchange: Exchange
        self.search: LeaderSearch
        self.held: dict[int, tuple[Version, torch.Tensor]] = {}

    def start(self) -> None:
        """A new process, which knows nothing of the one before."""
        self.begin()
        self.is_over = False
        self.uid = self.world.new_uid()
        self.request_id = f"{self.learner_id}-{self.uid}"
        self.exchange = Exchange(self.learner_id)
        self.search = LeaderSearch(self, [node.name for node in self.world.nodes])
        self.held, self.sent = {}, []
        self.grant: Grant | None = None
        self._model = torch.full((self.world.num_parameters,), float(self.uid))
        self._num_steps = 0
        self.applied_at = [0] * self.world.layout.num_fragments
        self._is_current = False
        self._seeded: Incarnation | None = None
        self._backoff, self._watch_backoff = Backoff(), Backoff()
        self._wake = Promise()
        self._declines: list[ev.PullDeclined] = []
        self._pusher = Pusher(self)
        self._lost = Promise()
        self.spawn(self._serve())
        self.spawn(self._train())

    @property
    def state(self) -> State:
        """Where it stands."""
        return self.exchange.connection.state

    def progress(self) -> tuple[bool, int]:
        """Whether news may come, and how many did."""
        connection = self.exchange.connection
        may_come = connection.online and connection.state is not State.FINISHED
        return may_come, self.exchange.tally.num_updates

    # -- the training loop -----------------------------------------------------------------------

    def _train(self) -> Work:
        while not self.exchange.synced.done():
            yield 0.05
        if self.exchange.synced.exception() is not None:
            return
        self._write(self.exchange.take_updates())
        while self.exchange.failure is None:
            yield self.world.faults.step_s(self)
            if self.world.trains:
                self._step()

    def _step(self) -> None:
        self._num_steps += 1
        self._model += self.world.delta(self.uid, self._num_steps)
        self._write(self.exchange.count(self.world.num_tokens(self)))
        captures = self.exchange.to_copy()
        for capture in captures:
            start, stop = self.world.slices[capture.stamp.fragment]
            capture.vector.copy_(self._model[start:stop])
        self.exchange.copied(captures)
        self.exchange.report(
            num_tokens=self.world.num_tokens(self),
            loss=None,
            step_s=self.step_s,
            overhead_s=0.0,
            progress=Progress(),
        )
        self._tell()

    def _write(self, updates: list[Update]) -> None:
        for update in updates:
            start, stop = self.world.slices[update.fragment]
            self._model[start:stop] = update.vector
            self.applied_at[update.fragment] = self._num_steps
            self.exchange.applied(update)

    def _tell(self) -> None:
        wake, self._wake = self._wake, Promise()
        wake.set()

    # -- the connection --------------------------------------------------------------------------

    def _serve(self) -> Work:
        while self.state not in _ENDED:
            try:
                yield from self.search.settle()
                if self.grant is None:
                    self.grant = yield from self._join()
                yield from self._session(self.grant)
            except DilocoError as caught:
                error = self.search.judged(caught)
                if is_fatal(error):
                    self.world.oracle.stops(self, error)
                    self.exchange.failed(error)
                    break
                if error.reason in REJOIN or not self.exchange.synced.done():
                    self.grant = None
                if error.reason not in REJOIN:
                    self.exchange.lost(error)
                yield self.search.pause_s(self._backoff.failed(self.world.rng.random()))
        self._pusher.close()

    def join_request(self) -> Join:
        """What a Join says."""
        grant = self.exchange.grant
        return Join(
            learner_id=self.learner_id,
            request_id=self.request_id,
            claim=self.search.claim,
            previous=None if grant is None else grant.incarnation,
            shard=None if grant is None else grant.shard,
            merged=max((v.global_step for v, _ in self.held.values()), default=0),
        )

    def _join(self) -> Work:
        node = self.world.node_at(self.search.leadership.current)
        request = self.join_request()
        response: Joined = yield self.world.network.call(
            self, node, lambda: services.join(node, request), _JOIN_DEADLINE_S
        )
        self.search.joined(response)
        layout, settings = self.world.layout, self.world.settings
        if self.exchange.layout is None:
            core = LearnerCore(num_fragments=layout.num_fragments, overlap=settings.overlap)
            self.exchange.begin(core, layout, {})
        grant = Grant(
            incarnation=response.incarnation,
            term=response.claim.term,
            settings=settings,
            shard=response.shard,
            local_step=response.local_step,
            global_step=response.global_step,
            seed=response.seed,
        )
        self.exchange.granted(grant)
        return grant

    def _session(self, grant: Grant) -> Work:
        """One connection, from the answer to a Join until it is lost."""
        self._declines.clear()
        self._pusher.keep_only(grant)
        if grant.seed and self._seeded != grant.incarnation:
            yield from self._seed(grant)
            self._seeded = grant.incarnation
        node = self.world.node_at(self.search.leadership.current)
        self._lost = Promise()
        report = self.world.network.open(
            self,
            node,
            lambda end: services.report(node, end, self.learner_id, grant.incarnation),
        )
        works = (
            self._hear(report, grant),
            self._say(report, grant),
            self._watch(grant),
            self.search.keep_watch(grant.settings.lease_timeout_s),
        )
        tasks = [self.spawn(work) for work in works]
        yield Either((*tasks, self._lost))
        report.close(unavailable("the learner"))
        for task in tasks:
            task.cancel()
        for ended in (*tasks, self._lost):
            ended.result()
        raise unavailable("the synchronizer")

    def _seed(self, grant: Grant) -> Work:
        node = self.world.node_at(self.search.leadership.current)
        for fragment, (start, stop) in enumerate(self.world.slices):
            self.world.oracle.seeds(self)
            held = self.held.get(fragment)
            vector = self._model[start:stop].clone() if held is None else held[1]
            request = push_of(
                self.learner_id,
                grant,
                fragment=fragment,
                codec="fp32",
                vector=vector,
                base=Version(0, 0, b""),
            )
            reason = yield self.world.network.call(
                self, node, functools.partial(services.push_seed, node, request), 3.0
            )
            if reason not in {None, Reason.DUPLICATE}:
                if reason in {Reason.NOT_ASKED, Reason.ALREADY_MERGED}:
                    break
                raise DilocoError(reason, "the seed was not taken")
        self.exchange.happened(Event.SEEDED)

    # -- the report stream -----------------------------------------------------------------------

    def _hear(self, end: End, grant: Grant) -> Work:
        while True:
            message = yield from end.receive()
            self._backoff.succeeded()
            self.exchange.connected()
            if isinstance(message, Schedule):
                self.exchange.scheduled(message.global_step, message.due_fragments)
            else:
                self._pulled(message, grant)

    def _say(self, end: End, grant: Grant) -> Work:
        if grant.term != self.search.leadership.term:
            yield grant.settings.heartbeat_interval_s
        while True:
            wake = self._wake
            while self._declines:
                end.send(self._declines.pop(0))
            report = self.exchange.take_report()
            if report is not None:
                end.send(
                    ev.StepReported(
                        learner_id=self.learner_id,
                        incarnation=grant.incarnation,
                        local_step=report.local_step,
                        num_steps=report.num_steps,
                        num_tokens=report.num_tokens,
                        known_global_steps=report.applied,
                    )
                )
            yield Either((wake,), grant.settings.heartbeat_interval_s)
            if not wake.done:
                end.send(ev.Heard(learner_id=self.learner_id, incarnation=grant.incarnation))

    # -- the watch -------------------------------------------------------------------------------

    def _watch(self, grant: Grant) -> Work:
        while True:
            try:
                yield from self._stream(grant)
            except DilocoError as error:
                fragment = str(error.details.get("fragment", ""))
                if error.reason not in FRAGMENT_BROKEN or not fragment.isdecimal():
                    raise
                self.world.oracle.broken(self, error)
                del self.held[int(fragment)]
                yield self._watch_backoff.failed(self.world.rng.random())

    def _stream(self, grant: Grant) -> Work:
        node = self.world.node_at(self.search.leadership.current)
        request = Watch(
            learner_id=self.learner_id,
            incarnation=grant.incarnation,
            held={p: version for p, (version, _) in self.held.items()},
        )
        end = self.world.network.open(self, node, lambda end: services.watch(node, end, request))
        try:
            while True:
                message = yield from end.receive()
                self.exchange.connected()
                if isinstance(message, Published):
                    self._take(message)
                else:
                    self._is_current = True
                if self._is_current and len(self.held) == len(self.world.slices):
                    self.exchange.all_held()
        finally:
            end.close(unavailable("the watcher"))

    def _take(self, update: Published) -> None:
        payload = b"".join(m.chunk.data for m in update.messages[1:])
        staged = StagedUpdate(
            fragment=update.fragment,
            base=update.base,
            result=update.result,
            codec=update.messages[0].header.encoding.codec,
            num_elements=update.messages[0].header.encoding.num_elements,
            payload=memoryview(payload),
        )
        vector = apply_update(staged, self.held.get(update.fragment))
        self.held[update.fragment] = (update.result, vector)
        self.world.oracle.seen(self, update.fragment, update.result)
        self.exchange.offer(Update(fragment=update.fragment, version=update.result, vector=vector))
        self._watch_backoff.succeeded()

    def _pulled(self, message: tuple[int, int, int], grant: Grant) -> None:
        term, global_step, fragment = message
        pull = PullRequest(term=term, group=0, global_step=global_step, fragment=fragment)
        reason = self._pusher.pulled(pull, grant)
        if reason is not None:
            self._declines.append(
                ev.PullDeclined(
                    learner_id=self.learner_id,
                    incarnation=grant.incarnation,
                    global_step=global_step,
                    reason=reason,
                )
            )
            self._tell()

    def fail_session(self, error: DilocoError) -> None:
        """A push was told that this incarnation, or this leader, counts no more."""
        self._lost.fail(error)
