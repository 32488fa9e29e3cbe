"""A process that does not lead: `synchronizer_server.standby` and its follower, in virtual time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.simulation.kernel import Either, Promise, Task, Work
from diloco_fleet.simulation.network import End, unavailable
from diloco_fleet.simulation.replicas import Challenge, Hello, Run, State
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.strict_json import canonical_json
from synchronizer_server.proofs import Handshake
from synchronizer_server.replication.messages import Transfer

if TYPE_CHECKING:
    from diloco_fleet.simulation.node import Node

_FIRST_MESSAGE_S = 5.0


class Follower:
    """Keeps a store equal to the leader's."""

    def __init__(self, copy: StandbyCopy, node: Node) -> None:
        self._copy = copy
        self._node = node
        self.highest_term = 0
        self._claim: Claim | None = None
        self._due: deque[Transfer] = deque()
        self._wake = Promise()
        self._loaded = False
        self.streaming = self.in_sync = False
        self.record: RoundRecord | None = None

    @property
    def persisted(self) -> tuple[int, int] | None:
        """Term and global step of the newest record here."""
        return None if self.record is None else (self.record.term, self.record.global_step)

    def load(self) -> Work:
        """Reads what the store holds."""
        yield self._node.store_runner.submit("load", self._load)
        self._copy.changed()

    def _load(self) -> None:
        """In the runner: a record that was still being written when a stream ended is there now."""
        if self._loaded:
            return
        self._loaded = True
        loaded = self._node.store.load()
        self.record = loaded[0] if loaded is not None else None
        self.highest_term = self._node.store.highest_term()

    def follow(self, address: str, highest: Claim | None) -> Work:
        """Follows the leader at an address; raises what ended it."""
        yield from self.load()
        node, other = self._node, self._node.world.node_at(address)
        end = node.world.network.open(node, other, other.serve_replicate)
        try:
            yield from self._stream(end, highest)
        finally:
            self.streaming = False
            end.close(unavailable("the standby"))
            self._copy.changed()

    def _stream(self, end: End, highest: Claim | None) -> Work:
        challenge = yield from end.receive(_FIRST_MESSAGE_S)
        if challenge is None:
            raise unavailable("the leader")
        handshake = self._challenged(challenge)
        end.send(self._hello(handshake, highest))
        run = yield from end.receive(_FIRST_MESSAGE_S)
        if run is None:
            raise unavailable("the leader")
        self._begin(run, handshake, highest)
        yield from self._describe(run)
        work = [self._node.spawn(job) for job in (self._receive(end), self._keep(end))]
        try:
            yield Either(work)
            for task in work:
                if task.done:
                    task.result()
        finally:
            for task in work:
                task.cancel()

    def _receive(self, end: End) -> Work:
        while True:
            message = yield from end.receive()
            match message:
                case State():
                    self.in_sync = message.in_sync
                    self._copy.changed()
                case Run():
                    yield from self._describe(message)
                case Transfer():
                    self._due.append(message)
                    wake, self._wake = self._wake, Promise()
                    wake.set()

    def _keep(self, end: End) -> Work:
        """Beside what receives: a slow disk does not make the leader's word come late."""
        while True:
            while self._due:
                yield from self._persist(end, self._due.popleft())
            yield self._wake

    def _challenged(self, challenge: Challenge) -> Handshake:
        if not self._node.leadership.heard(challenge.claim):
            raise DilocoError(Reason.BAD_CLAIM, "its claim of leadership is not signed")
        return Handshake(
            claim=challenge.claim,
            standby_id=self._node.store_id,
            leader_nonce=challenge.nonce,
            standby_nonce=self._node.nonce(),
        )

    def _hello(self, handshake: Handshake, highest: Claim | None) -> Hello:
        return Hello(
            standby_id=self._node.store_id,
            held=dict(enumerate(self.record.versions)) if self.record else {},
            claim=highest,
            nonce=handshake.standby_nonce,
            proof=handshake.standby_proof(self._node.key),
        )

    def _begin(self, run: Run, handshake: Handshake, highest: Claim | None) -> None:
        if not handshake.proves_leader(run.proof, self._node.key):
            raise DilocoError(Reason.BAD_CLAIM, "it does not prove that it holds the key")
        known = max(self.highest_term, highest.term if highest is not None else 0)
        if run.claim.term < known:
            raise DilocoError(Reason.STALE_TERM, f"term {known} has begun")
        same_term = highest is not None and highest.term == run.claim.term
        if same_term and highest is not None and highest.leader_id != run.claim.leader_id:
            raise DilocoError(Reason.BAD_CLAIM, "two claim one term; none is followed")
        self._due.clear()
        self._claim, self.streaming, self.in_sync = run.claim, True, False

    def _describe(self, run: Run) -> Work:
        description = run.description
        if description is not None:
            kept = yield self._node.store_runner.submit(
                "open_run", lambda: self._node.store.open_run(description)
            )
            if canonical_json(kept) != canonical_json(description):
                raise DilocoError(Reason.RUN_MISMATCH, "the store describes another run")
        self._copy.changed()

    def _persist(self, end: End, transfer: Transfer) -> Work:
        record = transfer.record
        yield self._node.store_runner.submit("install", lambda: self._install(transfer))
        self._node.point("ack")
        end.send((record.term, record.global_step))
        self._copy.changed()

    def _install(self, transfer: Transfer) -> None:
        node, record = self._node, transfer.record
        node.store.install(record, transfer.fragments)
        node.world.oracle.installed(node, record)
        held = self.persisted
        if held is None or held < (record.term, record.global_step):
            self.record = record
        self.highest_term = max(self.highest_term, record.term)


class StandbyCopy:
    """Follows whoever leads, for as long as it is run."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._follower = Follower(self, node)
        self._following: Task | None = None
        self._bidding = False
        node.leadership.before_bid = self._before_bid

    @property
    def persisted(self) -> tuple[int, int] | None:
        """Term and global step of the newest record here."""
        return self._follower.persisted

    def run(self) -> Work:
        """Follows until cancelled; `stop` is to be called afterwards."""
        self._follower = Follower(self, self._node)
        self._bidding = False
        yield from self._follower.load()
        while True:
            yield from self._follow_leader()

    def stop(self) -> Work:
        """Nothing is written or acknowledged any more."""
        yield from self._stop()
        self._node.leadership.core.standing.leader_heard_at = None

    def _follow_leader(self) -> Work:
        leadership = self._node.leadership
        address = leadership.leader_address()
        if not address or self._bidding:
            self._bidding = False
            yield leadership.changed
            return
        claim = leadership.claim_of_begun(self._follower.highest_term)
        following = self._node.spawn(self._follower.follow(address, claim))
        self._following = following
        try:
            yield following
        except DilocoError:
            self._node.world.tally["follow_ended"] += 1
        yield self._node.world.settings.lease_timeout_s / 8

    def _before_bid(self) -> Work:
        self._bidding = True
        yield from self._stop()

    def _stop(self) -> Work:
        if self._following is not None:
            self._following.cancel()
            self._following = None
        # A record that was being written may still become part of what we take over.
        yield self._node.store_runner.submit("wait", lambda: None)
        self.changed()

    def changed(self) -> None:
        """Tells the election where the copy stands."""
        node, follower = self._node, self._follower
        standing = node.leadership.core.standing
        standing.begun_term = max(standing.begun_term, follower.highest_term)
        if follower.persisted is not None:
            standing.may_lead = True
            standing.position = follower.persisted
        if follower.streaming:
            standing.leader_heard_at = node.kernel.now
            if follower.in_sync != node.in_sync:
                in_sync = follower.in_sync
                node.store_runner.submit("identity", lambda: node.set_in_sync(in_sync))
            standing.in_sync = follower.in_sync
        else:
            standing.leader_heard_at = None
            standing.in_sync = node.in_sync
