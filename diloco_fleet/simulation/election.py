"""One process in the election: `synchronizer_server.leadership`, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError
from diloco_fleet.simulation.kernel import Either, Promise, Work
from synchronizer_server.core import lease
from synchronizer_server.core.lease import Holder, LeaseCore, Role, Seen
from synchronizer_server.leadership import Bidder
from synchronizer_server.membership.lease_base import LeaseView

if TYPE_CHECKING:
    from diloco_fleet.simulation.node import Node


def nothing() -> Work:
    """Nobody has to be told."""
    yield 0.0


class Leadership:
    """One process's part in the election.

    Args:
        node: the process.
        bidder: who bids.
    """

    def __init__(self, node: Node, bidder: Bidder) -> None:
        self._node = node
        self._bidder = bidder
        self.core = LeaseCore(
            store_id=bidder.store_id,
            leader_id=bidder.leader_id,
            timeout_s=bidder.timeout_s,
            num_peers=bidder.num_peers,
            now=node.kernel.now,
        )
        self.in_sync: Callable[[], Collection[str]] = lambda: ()
        self.revision: Callable[[], int] = lambda: 0
        self.on_lease: Callable[[LeaseView | None], None] = lambda _: None
        self.before_bid: Callable[[], Work] = nothing
        self.highest_claim: Claim | None = None
        self.num_bad_claims = 0
        self.changed = Promise()
        self._addresses: dict[str, str] = {}

    def run(self) -> Work:
        """Ticks the core."""
        while True:
            now = self._node.kernel.now
            self._do(self.core.tick(now))
            yield Either((self.changed,), max(self.core.wake_at() - now, 0.001))

    def until(self, role: Role) -> Work:
        """Waits until this process has that role."""
        while self.core.role is not role:
            yield self.changed

    def holds(self) -> bool:
        """Whether the lease is ours for sure."""
        return self.core.holds(self._node.kernel.now)

    def claim(self) -> Claim:
        """Our claim, while we lead."""
        return self._bidder.claim(self.core.term)

    def claim_of_begun(self, term: int) -> Claim | None:
        """The highest claim heard; where our store knows a later term, a claim of our own."""
        heard = self.highest_claim
        if term > (0 if heard is None else heard.term):
            return self._bidder.claim(term)
        return heard

    def give_up(self, reason: str, *, forget: bool = False) -> Work:
        """Steps down and gives the lease back."""
        if self.core.role is not Role.LEADING:
            return
        claim = self.claim()
        self._do(self.core.step_down(reason, forget=forget))
        yield from self._release(claim, forget=forget)

    def _release(self, claim: Claim, *, forget: bool = False) -> Work:
        keeper = self._node.world.keeper
        try:
            yield from keeper.ask(self._node, lambda: keeper.lease.release(claim, forget=forget))
        except DilocoError:
            return  # it runs out by itself
        if forget:
            self.core.forgotten()

    def heard(self, claim: Claim, address: str = "") -> bool:
        """Takes a claim from outside; returns whether it is signed and of this run."""
        if not claim.term:
            return True
        if claim.run_id != self._bidder.run_id or not claim.is_signed_with(self._bidder.key):
            self.num_bad_claims += 1
            return False
        if self.highest_claim is None or claim.term > self.highest_claim.term:
            self.highest_claim = claim
        if address:
            self._addresses[claim.leader_id] = address
        known = self._addresses.get(claim.leader_id, "")
        self._do(self.core.hear(Holder(term=claim.term, leader_id=claim.leader_id, address=known)))
        return True

    def leader_address(self) -> str:
        """Where the leader is reached; empty where nobody is known."""
        leader = self.core.leader
        return "" if leader is None else leader.address or self._addresses.get(leader.leader_id, "")

    def _do(self, effects: list[lease.Effect]) -> None:
        keeper = self._node.world.keeper
        for effect in effects:
            match effect:
                case lease.ReadLease():
                    self._spawn(keeper.ask(self._node, keeper.lease.read))
                case lease.RenewLease():
                    self._node.point("renew")
                    self._spawn(self._renew())
                case lease.Bid():
                    self._spawn(self._acquire(effect.term))
                case lease.AskPeers():
                    self._node.spawn(self._peers())
                case lease.Forget():
                    self._node.world.tally["forgets_again"] += 1
                    self._node.spawn(self._release(self._bidder.claim(effect.term), forget=True))
                case lease.Lead():
                    self._node.point("lead")
                    self._node.world.oracle.leads(self._node, effect.term)
                    self._wake()
                case lease.StepDown():
                    self._node.point("step_down")
                    self._node.world.tally["steps_down"] += 1
                    self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, Promise()
        changed.set()

    def _renew(self) -> Work:
        keeper, claim, bidder = self._node.world.keeper, self.claim(), self._bidder
        in_sync = {bidder.store_id, *self.in_sync()}
        revision = self.revision()
        return (
            yield from keeper.ask(
                self._node,
                lambda: keeper.lease.renew(
                    claim,
                    address=bidder.address,
                    timeout_s=bidder.timeout_s,
                    in_sync=in_sync,
                    revision=revision,
                ),
            )
        )

    def _acquire(self, term: int) -> Work:
        keeper, bidder = self._node.world.keeper, self._bidder
        yield from self.before_bid()
        self._node.point("bid")
        claim = bidder.claim(term)
        return (
            yield from keeper.ask(
                self._node,
                lambda: keeper.lease.acquire(
                    claim,
                    address=bidder.address,
                    timeout_s=bidder.timeout_s,
                    standby_id=bidder.store_id,
                ),
            )
        )

    def _spawn(self, question: Work) -> None:
        self._node.spawn(self._ask(question))

    def _ask(self, question: Work) -> Work:
        asked_at = self._node.kernel.now
        try:
            view = yield from question
        except DilocoError:
            self._do(self.core.unanswered(self._node.kernel.now))
            if self.core.role is Role.LEADING:
                self.on_lease(None)
        else:
            self._node.point("keeper_answer")
            self._answered(view, asked_at)
        self._wake()

    def _answered(self, view: LeaseView, asked_at: float) -> None:
        holder = None
        if view.holder is not None:
            if not self.heard(view.holder, view.address):
                self._do(self.core.unanswered(self._node.kernel.now))
                return
            holder = Holder(
                term=view.holder.term, leader_id=view.holder.leader_id, address=view.address
            )
        seen = Seen(
            holder=holder,
            term=view.term,
            in_sync=view.in_sync,
            asked_at=asked_at,
            remaining_s=view.remaining_s,
        )
        self._do(self.core.seen(seen, self._node.kernel.now))
        if self.core.role is Role.LEADING:
            self.on_lease(view)

    def _peers(self) -> Work:
        peers = yield from self._node.ask_peers()
        self._do(self.core.peers(peers, self._node.kernel.now))
        self._wake()
