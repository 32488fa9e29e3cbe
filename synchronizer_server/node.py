"""The roles of one synchronizer process: it follows while another leads, and leads while it may."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, reach
from decoupled_diloco.settings import RunSettings
from synchronizer_server.assembly import Assembled, Outside, assemble
from synchronizer_server.core import events as ev
from synchronizer_server.core.lease import Role
from synchronizer_server.election import Election
from synchronizer_server.heartbeats import run_heartbeats
from synchronizer_server.leadership import Leadership
from synchronizer_server.replicas import Replicas
from synchronizer_server.service.admin import AdminService
from synchronizer_server.service.switchboard import Switchboard
from synchronizer_server.service.synchronizer import SynchronizerService
from synchronizer_server.settings import ServerSettings
from synchronizer_server.standby import StandbyCopy

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.5


class Node:
    """Leads and follows in turn.

    Args:
        run: settings of the run.
        settings: settings of this process.
        outside: the world.
        board: what is served.
        election: None where no other synchronizer can lead.
    """

    def __init__(
        self,
        run: RunSettings,
        settings: ServerSettings,
        outside: Outside,
        board: Switchboard,
        election: Election | None,
    ) -> None:
        self._run = run
        self._settings = settings
        self._outside = outside
        self._board = board
        self._election = election
        self._copy = None if election is None else StandbyCopy(run, settings, outside, election)
        if self._copy is not None:
            board.not_leading, board.follower_status = self.not_leading, self._copy.status
        if election is not None:
            board.key = election.key
        self._serve: Callable[[], Awaitable[None]]
        self.assembled: Assembled | None = None
        self.ended_at = 0
        self.finished = False

    async def run(self, stopping: asyncio.Event, serve: Callable[[], Awaitable[None]]) -> None:
        """Leads or follows until ``stopping`` is set.

        Args:
            stopping: set from outside.
            serve: opens the ports: at once where standbys must be answered, else when the run is
                ready to be served.

        Raises:
            DilocoError: why the process cannot go on.
        """
        self._serve = serve
        if self._election is None:
            await self._lead(stopping, None)
            return
        election = self._election
        await serve()
        ticking = asyncio.ensure_future(election.leadership.run())
        try:
            while not stopping.is_set():
                await self._follow(election, stopping)
                if stopping.is_set():
                    return
                await self._lead(stopping, election)
        finally:
            await election.leadership.give_up("the process stops")
            await _cancel(ticking)

    # -- following -------------------------------------------------------------------------------

    async def _follow(self, election: Election, stopping: asyncio.Event) -> None:
        """Keeps a copy of the leader's rounds until this process is to lead, or to stop."""
        assert self._copy is not None, "an election has standbys"
        self._board.follow()
        leading = election.leadership.until(Role.LEADING)
        await _first_of(leading, stopping.wait(), self._copy.run())

    # -- leading ---------------------------------------------------------------------------------

    async def _lead(self, stopping: asyncio.Event, election: Election | None) -> None:
        """Serves the run for one term, or until the process is to stop."""
        claim = None if election is None else election.leadership.claim()
        try:
            assembled = await self._begin(claim, election)
        except DilocoError as error:
            if election is None:
                raise
            logger.error("cannot lead: %s", error)
            await _cannot_begin(election.leadership, error)
            await asyncio.sleep(_RETRY_S)
            return
        if election is not None:
            reach(FaultPoint.MID_TAKEOVER)
        engine = assembled.engine
        self.assembled = assembled
        self._board.lead(
            SynchronizerService(engine, assembled.joins),
            AdminService(engine, assembled.joins),
            None if engine.parts.replicas is None else engine.parts.replicas.leader,
        )
        if election is None:
            await self._serve()
        engine.handle(ev.Tick())
        waits: list[Awaitable[object]] = [stopping.wait(), engine.fatal.wait()]
        if election is not None:
            waits += [election.leadership.until(Role.FOLLOWING), engine.store_lost.wait()]
        try:
            await _first_of(*waits)
        finally:
            await self._end(assembled, election)
        if engine.failure is not None:
            raise engine.failure
        if election is not None and engine.store_lost.is_set():
            # Another synchronizer may have what this store lost; it fills this one then.
            election.leadership.core.standing.may_lead = False
            why = "the store of this synchronizer lost the run"
            await election.leadership.give_up(why, forget=True)

    async def _begin(self, claim: Claim | None, election: Election | None) -> Assembled:
        replicas = None if election is None else self._replicas(election)

        async def before_serving() -> None:
            if election is not None and replicas is not None:
                identity = election.identity
                await self._outside.store_runner.submit(lambda: identity.set_in_sync(True))
                await replicas.gate.begin()

        assembled = await assemble(
            self._run,
            self._outside,
            max_staged_bytes=self._settings.max_staged_mb << 20,
            claim=claim,
            replicas=replicas,
            before_serving=before_serving,
        )
        engine = assembled.engine
        parts = engine.parts
        if election is not None and parts.replicas is not None:
            parts.heard = election.leadership.heard
            parts.addresses = (election.address, *election.peers)
            parts.replicas.gate.on_hold = lambda reason, detail: _ignore(
                engine.handle(ev.RoundHeld(reason=reason, detail=detail))
            )
            engine.spawn(parts.replicas.run())
        engine.spawn(engine.run_timer())
        engine.spawn(run_heartbeats(engine, self._outside.membership))
        return assembled

    def _replicas(self, election: Election) -> Replicas:
        return Replicas(
            self._run,
            leadership=election.leadership,
            keeper=election.keeper,
            key=election.key,
            store_id=election.identity.store_id,
            runner=election.runner,
            clock=self._outside.clock,
        )

    async def _end(self, assembled: Assembled, election: Election | None) -> None:
        """Finishes the rounds in flight where this process still leads, then ends all streams."""
        engine = assembled.engine
        leads = election is None or election.leadership.core.role is Role.LEADING
        self.finished = engine.complete.is_set()
        if engine.failure is None and leads:
            engine.handle(ev.DrainStarted())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.complete.wait(), self._settings.drain_s)
        self.ended_at = engine.core.state.committed
        engine.parts.journal.write("stop", global_step=self.ended_at, leads=leads)
        farewell = engine.farewell if leads else self.not_leading()
        if engine.parts.replicas is not None:
            engine.parts.replicas.close(farewell)
        await engine.close(farewell)
        engine.parts.journal.close()
        logger.info("stopped at global step %d", self.ended_at)
        self.assembled = None

    # -- what others are told --------------------------------------------------------------------

    def not_leading(self) -> DilocoError:
        """For those who ask a process that does not lead."""
        assert self._election is not None, "who is alone leads, or has not started yet"
        leadership = self._election.leadership
        claim, address = leadership.highest_claim, leadership.leader_address()
        addresses = list(dict.fromkeys(x for x in (address, *self._election.peers) if x))
        known = f"{claim.leader_id} leads in term {claim.term}" if claim else "nobody is known to"
        return DilocoError(
            Reason.NOT_LEADING,
            f"this synchronizer does not lead run {self._run.run_id!r}; {known}",
            run_id=self._run.run_id,
            term=claim.term if claim else 0,
            leader_id=claim.leader_id if claim else "",
            addresses=",".join(addresses),
        )


async def _cannot_begin(leadership: Leadership, error: DilocoError) -> None:
    """Gives a term back that could not be begun: another synchronizer may have all the rounds."""
    is_lost = error.reason is Reason.STORE_LOST
    leadership.core.standing.may_lead = not is_lost  # until a leader has filled the store
    leadership.cannot_begin(f"{error.reason}: {error.message}")
    # Whom an earlier leader named is in sync, whatever was lost here.
    await leadership.give_up(error.message, forget=is_lost and leadership.core.is_alone)


async def _first_of(*works: Awaitable[object]) -> None:
    """Waits for the first to end, ends the others, and raises what the first raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(*tasks)
    for task in done:
        task.result()


def _ignore(_: object) -> None:
    """What the core decides is carried out already."""


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
