"""A leader's standbys: `replicas`, `gate` and `replication.leader`, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.versions import Version
from diloco_fleet.simulation.kernel import Either, Promise, Work
from diloco_fleet.simulation.network import End, unavailable
from synchronizer_server.core import replication
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.replication import ReplicationCore
from synchronizer_server.limits import HELLO_S
from synchronizer_server.membership.lease_base import LeaseView
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.proofs import Handshake
from synchronizer_server.replication.messages import Transfer
from synchronizer_server.replication.outbox import Outbox
from synchronizer_server.store.base import RunDescription

if TYPE_CHECKING:
    from diloco_fleet.simulation.node import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """What a leader begins with."""

    claim: Claim
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a standby answers."""

    standby_id: str
    held: Mapping[int, Version]
    claim: Claim | None
    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a leader answers."""

    claim: Claim
    description: RunDescription | None
    proof: bytes


@dataclass(frozen=True, slots=True)
class State:
    """Where a standby stands."""

    in_sync: bool


class _Outbox(Outbox):
    """The shipped outbox; its sender waits in virtual time."""

    def __init__(self, standby_id: str, held: Mapping[int, Version], *, behind: bool) -> None:
        self.woken = Promise()
        super().__init__(standby_id, held, behind=behind)

    def wake(self) -> None:
        """Lets the sender look again."""
        woken, self.woken = self.woken, Promise()
        woken.set()


class Gate:
    """Holds a persisted round back until it may be published."""

    def __init__(
        self, node: Node, core: ReplicationCore, tell: Callable[[str, bool], None]
    ) -> None:
        self.core = core
        self.on_hold: Callable[[str, str], None] = lambda *_: None
        self._node, self._life = node, node.life
        self._leadership = node.leadership
        self._claim = node.leadership.claim()
        self._tell = tell
        self._changed = Promise()
        self._released: Promise | None = None
        node.leadership.in_sync = lambda: core.may_be_in_sync
        node.leadership.revision = lambda: core.revision
        node.leadership.on_lease = self._on_lease

    def begin(self) -> Work:
        """Waits until what our store holds may be served in this term, which it has begun."""
        held, now = self._leadership.holds(), self._node.kernel.now
        self._do(self.core.begin(lease_held=held, now=now))
        while not self.core.begun:
            yield from self._pass()
            self._check_beginning()
        self._check_leads()

    def _check_beginning(self) -> None:
        self._check_leads()
        why = f"term {self._claim.term} {self.core.why_not_begun}"
        if self.core.makes_way(lease_held=self._leadership.holds()):
            raise DilocoError(Reason.NOT_LEADING, f"the lease ran out: {why}")
        if self.core.why_not_begun:
            self._leadership.core.why_waiting = why

    def _check_leads(self) -> None:
        if not self._leadership.core.leads(self._claim.term):
            raise DilocoError(Reason.NOT_LEADING, "the term was over before it began")

    def run(self) -> Work:
        """Lets time pass for the core."""
        while True:
            yield from self._pass()

    def _pass(self) -> Work:
        self._advance()
        yield Either((self._changed,), self._delay_s())

    def _delay_s(self) -> float | None:
        now = self._node.kernel.now
        ends = self._leadership.core.held_until
        times = [self.core.wake_at(now), ends if ends > now else None]
        return min((max(at - now, 0.001) for at in times if at is not None), default=None)

    def released(self, global_step: int) -> Work:
        """Waits until a round that is persisted here may be published."""
        assert self._released is None, "rounds commit one after the other"
        promise = self._released = Promise()
        held, now = self._leadership.holds(), self._node.kernel.now
        self._do(self.core.persisted(global_step, lease_held=held, now=now))
        try:
            return (yield promise)
        finally:
            self._released = None

    def connected(self, standby_id: str) -> None:
        """A standby's stream is open."""
        held, now = self._leadership.holds(), self._node.kernel.now
        self._do(self.core.connected(standby_id, lease_held=held, now=now))

    def acked(self, standby_id: str, term: int, global_step: int) -> None:
        """A standby has persisted everything up to a round."""
        self._node.point("ack_heard")
        if term == self._claim.term:
            held, now = self._leadership.holds(), self._node.kernel.now
            self._do(self.core.acked(standby_id, global_step, lease_held=held, now=now))

    def lost(self, standby_id: str) -> None:
        """A standby's stream is over."""
        if self._life == self._node.life:
            held, now = self._leadership.holds(), self._node.kernel.now
            self._do(self.core.lost(standby_id, lease_held=held, now=now))

    def _on_lease(self, view: LeaseView | None) -> None:
        if view is not None:
            self.core.keeper_said(view.in_sync)
        self._advance()

    def _advance(self) -> None:
        held, now = self._leadership.holds(), self._node.kernel.now
        self._do(self.core.advance(lease_held=held, now=now))

    def _do(self, effects: list[replication.Effect]) -> None:
        for effect in effects:
            match effect:
                case replication.WriteInSync():
                    self._node.point("write_in_sync")
                    self._node.leads_with(self._write(effect))
                case replication.TellStandby():
                    self._tell(effect.standby_id, effect.in_sync)
                case replication.Hold():
                    self.on_hold(effect.reason, effect.detail)
                case replication.Release():
                    self._node.point("release")
                    if self._released is not None:
                        self._released.set(effect)
        changed, self._changed = self._changed, Promise()
        changed.set()

    def _write(self, effect: replication.WriteInSync) -> Work:
        keeper = self._node.world.keeper
        answer: bool | None
        try:
            answer = yield from keeper.ask(
                self._node,
                lambda: keeper.lease.set_in_sync(
                    self._claim, effect.standby_ids, revision=effect.revision
                ),
                self._node.world.faults.write_held_s(self._node),
            )
        except DilocoError:
            answer = None
        held, now = self._leadership.holds(), self._node.kernel.now
        self._do(self.core.written(effect.standby_ids, answer, lease_held=held, now=now))


class Replicas:
    """Replication of one term."""

    def __init__(self, node: Node) -> None:
        self._node = node
        settings = node.world.settings
        self._word_s = settings.lease_timeout_s / 4
        self._claim = node.leadership.claim()
        self.core = ReplicationCore(
            mode=settings.replication,
            store_id=node.store_id,
            expects_standby=True,
            ack_timeout_s=settings.lease_timeout_s,
            position=-1,
            published=-1,
        )
        self.gate = Gate(node, self.core, self._tell)
        self._told: dict[str, bool] = {}
        self._description: RunDescription | None = None
        self._newest: Transfer | None = None
        self._outboxes: dict[str, _Outbox] = {}
        self._error: DilocoError | None = None

    def start(self, description: RunDescription, record: RoundRecord,
              states: Sequence[FragmentState]) -> None:  # fmt: skip
        """Begins where the store stands."""
        self.describe(description)
        self.core.position = self.core.published = record.global_step
        self._send(record, dict(enumerate(states)))

    def describe(self, description: RunDescription) -> None:
        """The run's description is known."""
        self._description = description
        for outbox in self._outboxes.values():
            outbox.wake()

    def publishable(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> Work:
        """Sends a record that is persisted here, and waits until it may be published."""
        self._send(record, fragments)
        self._node.point("sent")
        return (yield from self.gate.released(record.global_step))

    def run(self) -> Work:
        """Tells standbys again and again where they stand: it is a sign of life."""
        while True:
            for standby_id, in_sync in self._told.items():
                self._tell_state(standby_id, in_sync)
            yield self._word_s

    def close(self, error: DilocoError) -> None:
        """Ends every stream."""
        self._error = error
        for outbox in self._outboxes.values():
            outbox.close(error)
        self._outboxes.clear()

    def _tell(self, standby_id: str, in_sync: bool) -> None:
        self._told[standby_id] = in_sync
        self._tell_state(standby_id, in_sync)

    def _tell_state(self, standby_id: str, in_sync: bool) -> None:
        if standby_id in self._outboxes:
            self._outboxes[standby_id].tell(in_sync=in_sync)

    def _send(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> None:
        known = self._newest.fragments if self._newest is not None else {}
        self._newest = Transfer(record=record, fragments={**known, **fragments})
        for outbox in self._outboxes.values():
            outbox.offer(Transfer(record=record, fragments=fragments))

    # -- one stream ------------------------------------------------------------------------------

    def replicate(self, end: End) -> Work:
        """Serves one standby until either side ends."""
        challenge = Challenge(claim=self._claim, nonce=self._node.nonce())
        end.send(challenge)
        hello = yield from end.receive(HELLO_S)
        if hello is None:
            raise DilocoError(Reason.NO_PROGRESS, "nothing was said")
        handshake = Handshake(
            claim=self._claim,
            standby_id=hello.standby_id,
            leader_nonce=challenge.nonce,
            standby_nonce=hello.nonce,
        )
        if not handshake.proves_standby(hello.proof, self._node.key):
            raise DilocoError(Reason.BAD_CLAIM, "the hello is not signed for this stream")
        outbox = self._open(hello)
        reader = self._node.spawn(self._read(outbox, end))
        try:
            yield from self._messages(outbox, end, handshake.leader_proof(self._node.key))
        finally:
            reader.cancel()
            outbox.close()
            if self._outboxes.get(outbox.standby_id) is outbox:
                del self._outboxes[outbox.standby_id]
                self.gate.lost(outbox.standby_id)

    def _open(self, hello: Hello) -> _Outbox:
        claim = hello.claim
        if claim is not None and claim.term:
            if not self._node.leadership.heard(claim):
                raise DilocoError(Reason.BAD_CLAIM, "the claim in the hello is not signed")
            if claim.term > self._claim.term:
                raise DilocoError(Reason.NOT_LEADING, f"term {claim.term} is led elsewhere")
        if self._error is not None:
            raise self._error
        before = self._outboxes.pop(hello.standby_id, None)
        if before is not None:
            before.close(DilocoError(Reason.FENCED, "a later stream of this standby is open"))
            self.gate.lost(hello.standby_id)
        outbox = _Outbox(hello.standby_id, hello.held, behind=self._newest is not None)
        self._outboxes[hello.standby_id] = outbox
        self.gate.connected(hello.standby_id)
        return outbox

    def _read(self, outbox: _Outbox, end: End) -> Work:
        try:
            while True:
                term, global_step = yield from end.receive()
                if outbox.closed:
                    return
                outbox.acked(pb.ReplicateAck(term=term, global_step=global_step))
                self.gate.acked(outbox.standby_id, term, global_step)
        except DilocoError as error:
            outbox.close(error)

    def _messages(self, outbox: _Outbox, end: End, proof: bytes) -> Work:
        described = self._description
        end.send(Run(claim=self._claim, description=described, proof=proof))
        while not outbox.closed:
            if described is not self._description:
                described = self._description
                end.send(Run(claim=self._claim, description=described, proof=proof))
            if (in_sync := outbox.take_state()) is not None:
                end.send(State(in_sync))
            transfer = outbox.take(self._newest)
            if transfer is None:
                yield outbox.woken
                continue
            end.send(transfer)
            self._node.point("record_sent")
        raise unavailable("the leader")
