"""Holds a persisted round back until it may be published (design section 6)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core import replication
from synchronizer_server.core.replication import ReplicationCore
from synchronizer_server.leadership import Leadership
from synchronizer_server.membership.lease_base import LeaseKeeper, LeaseView

logger = logging.getLogger(__name__)


class PublishGate:
    """Drives a `ReplicationCore` for one term.

    Args:
        core: decides.
        leadership: knows whether the lease is held.
        keeper: told which stores are in sync.
        clock: monotonic seconds.
        tell: tells a standby whether it is in sync.

    Attributes:
        on_hold: told why the waiting round is held back (reason and detail; empty: no longer).
    """

    def __init__(
        self,
        core: ReplicationCore,
        *,
        leadership: Leadership,
        keeper: LeaseKeeper,
        clock: Callable[[], float],
        tell: Callable[[str, bool], None],
    ) -> None:
        self.core = core
        self._leadership = leadership
        self._claim = leadership.claim()
        self._keeper = keeper
        self._clock = clock
        self._tell = tell
        self.on_hold: Callable[[str, str], None] = lambda *_: None
        self._changed = asyncio.Event()
        self._released: asyncio.Future[replication.Release] | None = None
        self._writes: set[asyncio.Task[None]] = set()
        leadership.in_sync = lambda: core.may_be_in_sync
        leadership.revision = lambda: core.revision
        leadership.on_lease = self._on_lease

    async def begin(self) -> None:
        """Waits until what our store holds may be served in this term, which it has begun.

        Raises:
            DilocoError: NOT_LEADING where the lease was lost before.
        """
        self._do(self.core.begin(lease_held=self._leadership.holds(), now=self._clock()))
        try:
            while not self.core.begun:
                await self._pass()
                self._check_beginning()
            self._check_leads()
        except BaseException:
            self._cancel_writes()
            raise

    def _check_beginning(self) -> None:
        """Nobody is kept waiting by a process that cannot reach the keeper."""
        self._check_leads()
        why = f"term {self._claim.term} {self.core.why_not_begun}"
        if self.core.makes_way(lease_held=self._leadership.holds()):
            raise DilocoError(Reason.NOT_LEADING, f"the lease ran out: {why}")
        if self.core.why_not_begun:
            self._leadership.waits(why)

    def _check_leads(self) -> None:
        if not self._leadership.core.leads(self._claim.term):
            raise DilocoError(
                Reason.NOT_LEADING, f"term {self._claim.term} was over before it began"
            )

    async def run(self) -> None:
        """Lets time pass for the core; runs until cancelled."""
        try:
            while True:
                await self._pass()
        finally:
            self._cancel_writes()

    async def _pass(self) -> None:
        """Until something has changed, or is due."""
        self._advance()
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._delay_s()):
                await changed.wait()

    def _cancel_writes(self) -> None:
        for task in self._writes:
            task.cancel()

    def _delay_s(self) -> float | None:
        now = self._clock()
        ends = self._leadership.core.held_until
        times = [self.core.wake_at(now), ends if ends > now else None]
        return min((max(at - now, 0.001) for at in times if at is not None), default=None)

    async def released(self, global_step: int) -> replication.Release:
        """Waits until a round that is persisted here, and on its way to the standbys, may be
        published.
        """
        assert self._released is None, "rounds commit one after the other"
        future: asyncio.Future[replication.Release] = asyncio.get_running_loop().create_future()
        self._released = future
        held = self._leadership.holds()
        self._do(self.core.persisted(global_step, lease_held=held, now=self._clock()))
        try:
            return await future
        finally:
            self._released = None

    # -- from the replication streams ------------------------------------------------------------

    def connected(self, standby_id: str) -> None:
        """A standby's stream is open."""
        held = self._leadership.holds()
        self._do(self.core.connected(standby_id, lease_held=held, now=self._clock()))

    def acked(self, standby_id: str, term: int, global_step: int) -> None:
        """A standby has persisted everything up to a round; acks of another term prove nothing."""
        if term == self._claim.term:
            held = self._leadership.holds()
            self._do(self.core.acked(standby_id, global_step, lease_held=held, now=self._clock()))

    def lost(self, standby_id: str) -> None:
        """A standby's stream is over."""
        logger.warning("standby %s is gone", standby_id)
        held = self._leadership.holds()
        self._do(self.core.lost(standby_id, lease_held=held, now=self._clock()))

    # -- effects ---------------------------------------------------------------------------------

    def _on_lease(self, view: LeaseView | None) -> None:
        if view is not None:
            self.core.keeper_said(view.in_sync)
        self._advance()

    def _advance(self) -> None:
        held = self._leadership.holds()
        self._do(self.core.advance(lease_held=held, now=self._clock()))

    def _do(self, effects: list[replication.Effect]) -> None:
        for effect in effects:
            match effect:
                case replication.WriteInSync():
                    task = asyncio.get_running_loop().create_task(self._write(effect))
                    self._writes.add(task)
                    task.add_done_callback(self._writes.discard)
                case replication.TellStandby():
                    self._tell(effect.standby_id, effect.in_sync)
                    word = "in sync" if effect.in_sync else "not in sync"
                    logger.info("standby %s is %s", effect.standby_id, word)
                case replication.Hold():
                    self.on_hold(effect.reason, effect.detail)
                case replication.Release():
                    if self._released is not None and not self._released.done():
                        self._released.set_result(effect)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _write(self, effect: replication.WriteInSync) -> None:
        answer: bool | None
        try:
            answer = await self._keeper.set_in_sync(
                self._claim, effect.standby_ids, revision=effect.revision
            )
        except DilocoError as error:
            logger.debug("the keeper was not told who is in sync: %s", error.message)
            answer = None
        held = self._leadership.holds()
        now = self._clock()
        self._do(self.core.written(effect.standby_ids, answer, lease_held=held, now=now))
