"""A process that does not lead: keeps its store equal to the leader's, ready to take over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.logs import ChangeLogger
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import admin_pb2 as pb
from decoupled_diloco.wire import held_to
from synchronizer_server.assembly import Outside
from synchronizer_server.core.lease import Role
from synchronizer_server.election import Election
from synchronizer_server.replication.follower import Follower
from synchronizer_server.settings import ServerSettings

logger = logging.getLogger(__name__)

_RETRIES_PER_TIMEOUT: Final = 8


class StandbyCopy:
    """Follows whoever leads, for as long as it is run.

    Args:
        run: settings of the run.
        settings: settings of this process.
        outside: the world.
        election: our part in it.
    """

    def __init__(
        self, run: RunSettings, settings: ServerSettings, outside: Outside, election: Election
    ) -> None:
        self._run = run
        self._insecure = settings.insecure
        self._outside = outside
        self._election = election
        self._says = ChangeLogger(logger)
        self._follower = self._new_follower()
        self._following: asyncio.Future[None] | None = None
        self._bidding = False
        election.leadership.before_bid = self._before_bid

    async def run(self) -> None:
        """Follows until cancelled; afterwards nothing is written or acknowledged any more.

        Raises:
            DilocoError: what our store cannot be read for; STORE_REMOVED: whoever starts this
                process anew gets a store that can be filled.
        """
        self._follower = self._new_follower()
        self._bidding = False
        await self._follower.load()
        try:
            while True:
                await self._follow_leader()
        finally:
            await self._stop()
            self._election.leadership.core.standing.leader_heard_at = None

    async def _follow_leader(self) -> None:
        leadership = self._election.leadership
        address = leadership.leader_address()
        if not address or self._bidding:
            self._bidding = False
            await leadership.changed()
            return
        claim = leadership.claim_of_begun(self._follower.highest_term)
        following = asyncio.ensure_future(self._follower.follow(address, claim))
        self._following = following
        await asyncio.wait((following,))
        if not following.cancelled() and (error := following.exception()) is not None:
            if not isinstance(error, DilocoError) or error.reason is Reason.STORE_REMOVED:
                raise error
            self._says.log("replication", str(error.reason), error.message)
        await asyncio.sleep(self._run.lease_timeout_s / _RETRIES_PER_TIMEOUT)

    async def _before_bid(self) -> None:
        """A bid ends our part in the leader's term: what we acknowledged is ours, and no more."""
        self._bidding = True
        await self._stop()

    async def _stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError, DilocoError):
                await self._following
            self._following = None
        # A record that was being written may still become part of what we take over.
        await self._outside.store_runner.submit(lambda: None)
        self._changed()

    # -- what is known of the copy ---------------------------------------------------------------

    def _new_follower(self) -> Follower:
        return Follower(
            self._outside.store,
            self._outside.store_runner,
            self._run,
            standby_id=self._election.identity.store_id,
            heard=self._election.leadership.heard,
            key=self._election.key,
            insecure=self._insecure,
            on_change=self._changed,
        )

    def _changed(self) -> None:
        follower, identity = self._follower, self._election.identity
        standing = self._election.leadership.core.standing
        standing.begun_term = max(standing.begun_term, follower.highest_term)
        if follower.persisted is not None:
            standing.may_lead = True
            standing.position = follower.persisted
        if follower.streaming:
            standing.leader_heard_at = self._outside.clock()
            if follower.in_sync != identity.in_sync:
                in_sync = follower.in_sync
                self._outside.store_runner.submit(lambda: self._keep(in_sync))
            standing.in_sync = follower.in_sync
            self._says.log("replication", "in sync" if follower.in_sync else "catching up")
        else:
            standing.leader_heard_at = None
            standing.in_sync = identity.in_sync

    def _keep(self, in_sync: bool) -> None:
        """In the runner; what fails is tried again with the leader's next word."""
        try:
            self._election.identity.set_in_sync(in_sync)
        except DilocoError as error:
            self._says.log("identity", str(error.reason), error.message, level=logging.WARNING)
        else:
            self._says.forget("identity")

    def status(self) -> pb.GetStatusResponse:
        """Status of a process that does not lead."""
        follower, leadership = self._follower, self._election.leadership
        claim, record = leadership.highest_claim, self._follower.record
        term, global_step = follower.persisted or (0, 0)
        is_following = leadership.core.role is Role.FOLLOWING
        return pb.GetStatusResponse(
            run_id=self._run.run_id,
            claim=None if claim is None else claim.to_proto(),
            state="following",
            role="following",
            global_step=global_step,
            record_term=term,
            total_global_steps=self._run.total_global_steps,
            quorum=self._run.quorum,
            waits=[
                pb.Wait(
                    subject="leadership",
                    reason="following" if is_following else "beginning",
                    detail=leadership.core.why_waiting,
                )
            ],
            versions=held_to(dict(enumerate(record.versions))) if record is not None else [],
        )
