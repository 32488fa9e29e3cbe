"""One synchronizer process: `synchronizer_server.node` and `assembly`, in virtual time."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.simulation.election import Leadership
from diloco_fleet.simulation.following import StandbyCopy
from diloco_fleet.simulation.kernel import Either, Process, Promise, Task, Work
from diloco_fleet.simulation.leading import Engine
from diloco_fleet.simulation.network import End
from diloco_fleet.simulation.replicas import Replicas
from synchronizer_server.core import events as ev
from synchronizer_server.core.lease import Holder, Peer, Role
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.synchronizer import SynchronizerCore
from synchronizer_server.leadership import Bidder
from synchronizer_server.ledger import restored_from
from synchronizer_server.membership.base import Roll
from synchronizer_server.run_layout import layout_from
from synchronizer_server.store.memory import MemoryStore
from synchronizer_server.tensors import TensorBook

if TYPE_CHECKING:
    from diloco_fleet.simulation.world import World

_RETRY_S = 0.5
_PEER_DEADLINE_S = 2.0
KEY = b"a key of the simulated synchronizers"


class Runner:
    """Runs jobs one at a time in order; what is submitted is done, whoever waits for it."""

    def __init__(self, node: Node) -> None:
        self._node, self._life = node, node.life
        self._free_at = 0.0

    def submit(self, name: str, job: Callable[[], Any]) -> Promise:
        """Queues a job."""
        node, promise = self._node, Promise()
        now = node.kernel.now
        self._free_at = max(self._free_at, now) + node.world.faults.job_s(name)

        def run() -> None:
            node.point(f"{name}:before")
            try:
                value = job()
            except DilocoError as error:
                promise.fail(error)
            else:
                node.point(f"{name}:after")
                promise.set(value)

        node.kernel.at(self._free_at - now, run, node, self._life)
        return promise


class Node(Process):
    """A synchronizer process; its store outlives it.

    Args:
        world: the world.
        name: name, and address.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.kernel, name)
        self.world = world
        self.num_stores = 0
        self.store: MemoryStore
        self.store_id: str
        self.in_sync: bool
        self.lose_store()
        self.key = KEY
        self._num_nonces = 0
        self.engine: Engine | None = None
        self.leadership: Leadership
        self.store_runner: Runner
        self.tensors_runner: Runner
        self._copy: StandbyCopy

    def lose_store(self) -> None:
        """An empty disk: another store, which never followed."""
        self.num_stores += 1
        self.store = MemoryStore()
        self.store_id = f"store-{self.name}-{self.num_stores}"
        self.in_sync = True
        self.world.oracle.lost(self)

    def set_in_sync(self, in_sync: bool) -> None:
        """Kept beside the store."""
        self.in_sync = in_sync

    def nonce(self) -> bytes:
        """Bytes that nobody has signed anything over."""
        self._num_nonces += 1
        return hashlib.sha256(f"{self.name} {self._num_nonces}".encode()).digest()

    def point(self, name: str) -> None:
        """An effect is about to be carried out, or was: here the process may die or freeze."""
        self.world.faults.point(self, name)

    def leads_with(self, work: Work) -> None:
        """Runs something of the term that is led; it ends with the term."""
        if self.engine is None:
            self.spawn(work)
        else:
            self.engine.spawn(work)

    def start(self) -> None:
        """A new process on the same store."""
        self.begin()
        world = self.world
        self.engine = None
        bidder = Bidder(
            run_id=world.settings.run_id,
            leader_id=f"{self.name}-{self.life}",
            store_id=self.store_id,
            address=self.name,
            key=self.key,
            timeout_s=world.settings.lease_timeout_s,
            num_peers=len(world.nodes) - 1,
        )
        self.leadership = Leadership(self, bidder)
        self.store_runner, self.tensors_runner = Runner(self), Runner(self)
        self._copy = StandbyCopy(self)
        self.spawn(self._run())
        self.spawn(self.leadership.run())

    def _run(self) -> Work:
        while True:
            yield from self._follow()
            yield from self._lead()

    # -- following -------------------------------------------------------------------------------

    def _follow(self) -> Work:
        copying = self.spawn(self._copy.run())
        yield Either((self.spawn(self.leadership.until(Role.LEADING)), copying))
        if copying.done:
            copying.result()
        copying.cancel()
        yield from self._copy.stop()

    # -- leading ---------------------------------------------------------------------------------

    def _lead(self) -> Work:
        claim = self.leadership.claim()
        try:
            engine = yield from self._begin(claim)
        except DilocoError as error:
            self.world.tally[f"cannot_lead_{error.reason}"] += 1
            is_lost = error.reason is Reason.STORE_LOST
            self.leadership.core.standing.may_lead = not is_lost
            self.leadership.core.stand_back(error.message, self.kernel.now)
            is_forgotten = is_lost and self.leadership.core.is_alone
            yield from self.leadership.give_up(error.message, forget=is_forgotten)
            yield _RETRY_S
            return
        self.engine = engine
        engine.handle(ev.Tick())
        yield Either((self.spawn(self.leadership.until(Role.FOLLOWING)), engine.store_lost))
        self.engine = None
        engine.replicas.close(self.not_leading())
        engine.close(self.not_leading())
        if engine.store_lost.done:
            self.leadership.core.standing.may_lead = False
            why = "the store of this synchronizer lost the run"
            yield from self.leadership.give_up(why, forget=True)

    def _begin(self, claim: Claim) -> Work:
        """As `assembly.assemble`, and what `Node._begin` starts beside."""
        world, store = self.world, self.store
        settings = world.settings
        replicas = Replicas(self)
        loaded = yield self.store_runner.submit("load", store.load)
        if loaded is None:
            yield from self._check_not_lost()
        layout = None if loaded is None else layout_from(store.read_run(), settings)
        restored = None
        if loaded is not None:
            world.oracle.restored(self, loaded[0], loaded[1])
            restored = restored_from(loaded[0], (yield from self._read_back()), settings.quorum)
        core = SynchronizerCore(
            settings,
            term=claim.term,
            num_fragments=layout.num_fragments if layout is not None else 0,
            restored=restored,
            now=self.kernel.now,
        )
        engine = Engine(self, core, claim, layout, replicas)
        record = None if loaded is None else _taken_over(loaded[0], claim.term)
        yield self.store_runner.submit("begin_term", lambda: self._begin_term(engine, record))
        if loaded is not None and record is not None and layout is not None:
            states = [loaded[1][i] for i in sorted(loaded[1])]
            engine.tensors = TensorBook(layout, settings, claim.term)
            engine.start(record.versions, states)
            description = store.read_run()
            assert description is not None, "a record belongs to a run"
            replicas.start(description, record, states)
        yield self.store_runner.submit("identity", lambda: self.set_in_sync(True))
        yield from replicas.gate.begin()
        world.oracle.serves(self, record)
        if record is not None:
            yield from engine.mark_seeded()
        replicas.gate.on_hold = lambda reason, detail: self._on_hold(engine, reason, detail)
        engine.spawn(replicas.gate.run())
        engine.spawn(replicas.run())
        engine.spawn(engine.run_timer())
        engine.spawn(engine.run_heartbeats())
        return engine

    def _on_hold(self, engine: Engine, reason: str, detail: str) -> None:
        if reason:
            self.world.tally[f"held_{reason}"] += 1
        engine.handle(ev.RoundHeld(reason=reason, detail=detail))

    def _begin_term(self, engine: Engine, record: RoundRecord | None) -> None:
        if record is not None and self.world.faults.disk_is_full(self):
            raise DilocoError(Reason.DISK_FULL, "no room")
        before = self.world.oracle.tip_of(self)
        self.store.begin_term(engine.claim.term, record)
        self.world.oracle.began(self, record, before)

    def _check_not_lost(self) -> Work:
        keeper = self.world.keeper
        seeded = yield from keeper.ask(self, keeper.membership.is_seeded)
        if seeded:
            raise DilocoError(Reason.STORE_LOST, "the run has merged before; the store is empty")

    def _read_back(self) -> Work:
        keeper = self.world.keeper
        try:
            roll: Roll = yield from keeper.ask(self, keeper.membership.read_back)
        except DilocoError:
            return None
        return roll

    # -- what others are told --------------------------------------------------------------------

    def not_leading(self) -> DilocoError:
        """For those who ask a process that does not lead."""
        claim, address = self.leadership.highest_claim, self.leadership.leader_address()
        peers = [node.name for node in self.world.nodes if node is not self]
        return DilocoError(
            Reason.NOT_LEADING,
            "this synchronizer does not lead",
            term=claim.term if claim else 0,
            addresses=",".join(dict.fromkeys(x for x in (address, *peers) if x)),
        )

    def leader(self) -> Engine:
        """The engine of a process that leads.

        Raises:
            DilocoError: NOT_LEADING.
        """
        if self.engine is None:
            raise self.not_leading()
        return self.engine

    def serve_replicate(self, end: End) -> Work:
        """A standby's stream."""
        yield from self.leader().replicas.replicate(end)

    def get_run(self) -> Work:
        """Who leads, for a learner that asks."""
        yield 0.0
        return self.leader().claim

    def ask_peers(self) -> Work:
        """What those that answer say of themselves, as `synchronizer_server.peers`."""
        others = [node for node in self.world.nodes if node is not self]
        network = self.world.network
        answers = [
            self.spawn(_waits(network.call(self, other, other.get_status, _PEER_DEADLINE_S)))
            for other in others
        ]
        peers = []
        for other, task in zip(others, answers, strict=True):
            answer = yield from _none_if_lost(task)
            if answer is None:
                continue
            position, claim, is_leading = answer
            leads = None
            address = other.name if is_leading else ""
            if claim is not None and self.leadership.heard(claim, address) and is_leading:
                leads = Holder(term=claim.term, leader_id=claim.leader_id, address=other.name)
            peers.append(Peer(position=position, leads=leads))
        return peers

    def get_status(self) -> Work:
        """Where this process stands: position, and claim where it leads."""
        yield 0.0
        if self.engine is None:
            return self._copy.persisted or (0, 0), self.leadership.highest_claim, False
        state = self.engine.core.state
        return (self.engine.claim.term, state.committed), self.engine.claim, True


def _waits(promise: Promise) -> Work:
    return (yield promise)


def _none_if_lost(task: Task) -> Work:
    try:
        return (yield task)
    except DilocoError:
        return None


def _taken_over(record: RoundRecord, term: int) -> RoundRecord:
    return dataclasses.replace(record, term=term, fragment=None, contributions=(), dropped=())
