"""Drives the lease: asks the keeper, checks signatures, and says when this process leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.logs import ChangeLogger
from synchronizer_server.core import lease
from synchronizer_server.core.lease import Holder, LeaseCore, Role, Seen
from synchronizer_server.membership.lease_base import LeaseKeeper, LeaseView

logger = logging.getLogger(__name__)

_REACHABLE: Final = "reachable"

AskPeers = Callable[[], Awaitable[Collection[lease.Peer]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bidder:
    """How this process bids.

    Attributes:
        run_id: the run.
        leader_id: random id of this process.
        store_id: stable id of its store.
        address: where others reach it.
        key: signs claims; whoever has no key believes nobody.
        timeout_s: time-out of the lease.
        num_peers: other synchronizers that are configured.
    """

    run_id: str
    leader_id: str
    store_id: str
    address: str
    key: bytes
    timeout_s: float
    num_peers: int

    def claim(self, term: int) -> Claim:
        """Our signed claim for a term."""
        unsigned = Claim(run_id=self.run_id, term=term, leader_id=self.leader_id)
        return unsigned.signed_with(self.key)


class Leadership:
    """One process's part in the election.

    Args:
        bidder: who bids.
        keeper: keeps the lease.
        ask_peers: asks the other synchronizers where they stand.
        clock: monotonic seconds.

    Attributes:
        in_sync: stores that a keeper that was emptied is told about; set by who replicates,
            for one term.
        revision: number of the newest word about them in this term; set likewise.
        before_bid: called before every bid; afterwards nothing may be acknowledged to a leader.
        on_lease: called with every answer while leading; None where the keeper gave none.
        num_bad_claims: claims that were not signed by a holder of the key.
    """

    def __init__(
        self,
        bidder: Bidder,
        *,
        keeper: LeaseKeeper,
        ask_peers: AskPeers,
        clock: Callable[[], float],
    ) -> None:
        self._bidder = bidder
        self._keeper = keeper
        self._ask_peers = ask_peers
        self._clock = clock
        self.core = LeaseCore(
            store_id=bidder.store_id,
            leader_id=bidder.leader_id,
            timeout_s=bidder.timeout_s,
            num_peers=bidder.num_peers,
            now=clock(),
        )
        self.in_sync: Callable[[], Collection[str]]
        self.revision: Callable[[], int]
        self.on_lease: Callable[[LeaseView | None], None]
        self._forget_standbys()
        self.before_bid: Callable[[], Awaitable[None]] = _nothing
        self.num_bad_claims = 0
        self.highest_claim: Claim | None = None
        self._addresses: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._says = ChangeLogger(logger)

    # -- for the role loop -----------------------------------------------------------------------

    async def run(self) -> None:
        """Ticks the core; runs until cancelled."""
        try:
            while True:
                self._do(self.core.tick(self._clock()))
                delay = max(self.core.wake_at() - self._clock(), 0.001)
                changed = self._changed
                # Not wait_for, which in Python 3.11 may swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await changed.wait()
        finally:
            for task in self._tasks:
                task.cancel()

    async def until(self, role: Role) -> None:
        """Waits until this process has that role."""
        while self.core.role is not role:
            await self._changed.wait()

    def lease_seconds(self) -> float:
        """How long the lease is ours still, seconds."""
        return max(self.core.held_until - self._clock(), 0.0) if self.holds() else 0.0

    @property
    def keeper_answers(self) -> bool:
        """False while the keeper of the lease does not answer."""
        return self._says.reason("keeper") in {None, _REACHABLE}

    def cannot_begin(self, reason: str) -> None:
        """The term that was won could not be begun; what follows is `give_up`."""
        self.core.stand_back(reason, self._clock())

    def waits(self, why: str) -> None:
        """Says why the term that was won is not served yet."""
        self.core.why_waiting = why
        self._says.log("leadership", why, level=logging.WARNING)

    async def changed(self) -> None:
        """Waits until anything about leadership was heard or decided."""
        await self._changed.wait()

    def holds(self) -> bool:
        """Whether the lease is ours for sure."""
        return self.core.holds(self._clock())

    def claim(self) -> Claim:
        """Our claim, while we lead."""
        return self._bidder.claim(self.core.term)

    def claim_of_begun(self, term: int) -> Claim | None:
        """The highest claim heard; where our store knows a later term, a claim of our own for it.

        Whoever leads an earlier term must hear that a later one has begun, or it leads on for ever
        where the keeper was emptied: our store follows no earlier term, nor does a learner.
        """
        heard = self.highest_claim
        if term > (0 if heard is None else heard.term):
            return self._bidder.claim(term)
        return heard

    async def give_up(self, reason: str, *, forget: bool = False) -> None:
        """Steps down and gives the lease back, so that a standby need not wait."""
        if self.core.role is not Role.LEADING:
            return
        claim = self.claim()
        self._do(self.core.step_down(reason, forget=forget))
        await self._release(claim, forget=forget)

    async def _release(self, claim: Claim, *, forget: bool = False) -> None:
        try:
            await self._keeper.release(claim, forget=forget)
        except DilocoError as error:
            logger.warning("the lease runs out by itself: %s", error.message)
            return
        if forget:
            self.core.forgotten()

    def heard(self, claim: Claim, address: str = "") -> bool:
        """Takes a claim from outside; returns whether it is signed and of this run.

        An unsigned one is counted and never obeyed.
        """
        if not claim.term:
            return True
        if claim.run_id != self._bidder.run_id or not claim.is_signed_with(self._bidder.key):
            self.num_bad_claims += 1
            self._says.log(
                "claim", "BAD_CLAIM", f"{self.num_bad_claims} claims of leadership are not signed"
            )
            return False
        if self.highest_claim is None or claim.term > self.highest_claim.term:
            self.highest_claim = claim
        if address:
            self._addresses[claim.leader_id] = address
        self._do(self.core.hear(self._holder(claim)))
        return True

    def leader_address(self) -> str:
        """Where the leader is reached; empty where nobody is known."""
        leader = self.core.leader
        return "" if leader is None else leader.address or self._addresses.get(leader.leader_id, "")

    def _holder(self, claim: Claim) -> Holder:
        address = self._addresses.get(claim.leader_id, "")
        return Holder(term=claim.term, leader_id=claim.leader_id, address=address)

    # -- effects ---------------------------------------------------------------------------------

    def _do(self, effects: list[lease.Effect]) -> None:
        for effect in effects:
            match effect:
                case lease.ReadLease():
                    self._spawn(self._ask(self._keeper.read()))
                case lease.RenewLease():
                    self._spawn(self._ask(self._renew()))
                case lease.Bid():
                    self._spawn(self._ask(self._acquire(effect.term)))
                case lease.AskPeers():
                    self._spawn(self._peers())
                case lease.Forget():
                    self._spawn(self._release(self._bidder.claim(effect.term), forget=True))
                case lease.Lead():
                    logger.info("leads in term %d", effect.term)
                    self._wake()
                case lease.StepDown():
                    logger.warning("leads no longer: %s", effect.reason)
                    self._forget_standbys()
                    self._wake()
        if self.core.role is Role.FOLLOWING:
            self._says.log("leadership", self.core.why_waiting)

    def _forget_standbys(self) -> None:
        """What was in sync in one term is not told to the keeper in the next."""
        self.in_sync = lambda: ()
        self.revision = lambda: 0
        self.on_lease = lambda _: None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _renew(self) -> Awaitable[LeaseView]:
        return self._keeper.renew(
            self.claim(),
            address=self._bidder.address,
            timeout_s=self._bidder.timeout_s,
            in_sync={self._bidder.store_id, *self.in_sync()},
            revision=self.revision(),
        )

    async def _acquire(self, term: int) -> LeaseView:
        await self.before_bid()
        return await self._keeper.acquire(
            self._bidder.claim(term),
            address=self._bidder.address,
            timeout_s=self._bidder.timeout_s,
            standby_id=self._bidder.store_id,
        )

    async def _ask(self, question: Awaitable[LeaseView]) -> None:
        asked_at = self._clock()
        try:
            view = await question
        except DilocoError as error:
            self._says.log("keeper", str(error.reason), error.message, level=logging.WARNING)
            self._do(self.core.unanswered(self._clock()))
            if self.core.role is Role.LEADING:
                self.on_lease(None)
        else:
            if self._says.reason("keeper") is not None:
                self._says.log("keeper", _REACHABLE)
            self._answered(view, asked_at)
        self._wake()

    def _answered(self, view: LeaseView, asked_at: float) -> None:
        holder = None
        if view.holder is not None:
            if not self.heard(view.holder, view.address):
                # Somebody wrote what no synchronizer did: as good as no answer.
                self._do(self.core.unanswered(self._clock()))
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
        self._do(self.core.seen(seen, self._clock()))
        if self.core.role is Role.LEADING:
            self.on_lease(view)

    async def _peers(self) -> None:
        self._do(self.core.peers(await self._ask_peers(), self._clock()))
        self._wake()


async def _nothing() -> None:
    """Nobody has to be told."""
