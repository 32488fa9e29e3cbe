"""Joining: layout, shard, incarnation, seeding. One join at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Final

from decoupled_diloco.claims import Claim, claim_from
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout, Strategy, build_layout, first_difference
from decoupled_diloco.settings import PROTOCOL_VERSION
from decoupled_diloco.settings_proto import settings_to_proto
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.versions import Incarnation
from decoupled_diloco.wire import incarnation_to, malformed, tensors_from
from synchronizer_server.commits import layout_description
from synchronizer_server.convert import check_id, check_tensors
from synchronizer_server.core import events as ev
from synchronizer_server.core.data_records import DataLease
from synchronizer_server.engine import Engine
from synchronizer_server.service.data import leases_from, previous_from, snapshot_from
from synchronizer_server.service.identity import require_current
from synchronizer_server.store.base import RoundStore, RunDescription
from synchronizer_server.tensors import TensorBook

logger = logging.getLogger(__name__)

_MAX_REMEMBERED: Final = 1024
_MAX_LABELS: Final = 32

MAX_LEARNERS: Final = 10_000
"""Learner ids of a run. Each is in every round record, for ever: about 200 bytes."""


class JoinDesk:
    """Grants incarnations.

    Args:
        engine: the engine.
        store: keeps the layout from the first join on.
    """

    def __init__(self, engine: Engine, store: RoundStore) -> None:
        self._engine = engine
        self._store = store
        self._lock = asyncio.Lock()
        self._granted: OrderedDict[tuple[str, str], Incarnation] = OrderedDict()
        self.labels: dict[str, dict[str, str]] = {}

    async def join(self, request: pb.JoinRequest) -> pb.JoinResponse:
        """Lets a learner in; a repeated request gets the same incarnation again.

        While nobody seeds the run it gets a new one, and with it the seeding; also after it has
        left, or lost its data leases. A process that was fenced cannot take its id back.

        Raises:
            DilocoError: why it may not join.
        """
        learner_id = check_id(request.learner_id, "learner_id")
        check_id(request.request_id, "request_id")
        self._check_claim(claim_from(request.claim))
        if len(request.labels) > _MAX_LABELS:
            raise malformed(f"{len(request.labels)} labels, at most {_MAX_LABELS}")
        self._check_run(request)
        if request.relays_claim:
            # A grant here would be a life that nobody lives: the learner asks, and lives elsewhere.
            return pb.JoinResponse(claim=self._engine.claim())
        async with self._lock:
            self._check_not_lost(request)
            await self._check_layout(request)
            known = self._granted.get((learner_id, request.request_id))
            if known is None or self._needs_new_life(learner_id, known):
                known = await self._grant(learner_id, request)
                self._remember((learner_id, request.request_id), known)
                self.labels[learner_id] = {k[:64]: v[:256] for k, v in request.labels.items()}
            return self._response(learner_id, known)

    def _needs_new_life(self, learner_id: str, incarnation: Incarnation) -> bool:
        """Whether a process gets another incarnation: it has left or lost its data, or it seeds.

        Raises:
            DilocoError: FENCED where another process has taken the id.
        """
        state = self._engine.core.state
        known = state.roster.current(learner_id, incarnation)
        if known is not None and known.lease_lost:
            return True
        learner = require_current(self._engine, learner_id, incarnation)
        nobody_seeds = not state.seeded and not state.seed_persisting and state.seeder is None
        return nobody_seeds or learner.state.has_left

    def _remember(self, request: tuple[str, str], incarnation: Incarnation) -> None:
        self._granted[request] = incarnation
        while len(self._granted) > _MAX_REMEMBERED:
            self._granted.popitem(last=False)

    def _check_run(self, request: pb.JoinRequest) -> None:
        if request.protocol_version != PROTOCOL_VERSION:
            raise DilocoError(
                Reason.PROTOCOL_MISMATCH,
                f"the learner speaks protocol {request.protocol_version}, the synchronizer "
                f"{PROTOCOL_VERSION}; install the same version on both sides",
            )
        run_id = self._engine.parts.settings.run_id
        if request.run_id and request.run_id != run_id:
            raise DilocoError(
                Reason.RUN_MISMATCH,
                f"this synchronizer serves run {run_id!r}, not "
                f"{request.run_id!r}; check the address",
            )
        if self._engine.core.state.draining:
            raise DilocoError(Reason.DRAINING, "the synchronizer stops; try again later")

    def _check_claim(self, claim: Claim) -> None:
        """Obeys a higher claim that a learner relays, if a synchronizer of this run signed it."""
        parts = self._engine.parts
        if parts.heard is None or claim.term <= parts.claim.term:
            return
        if parts.heard(claim):
            raise DilocoError(
                Reason.NOT_LEADING,
                f"{claim.leader_id[:40]} leads in term {claim.term}; ask the other addresses",
                run_id=claim.run_id,
                term=claim.term,
                leader_id=claim.leader_id,
                addresses=",".join(parts.addresses[1:]),
            )

    def _check_not_lost(self, request: pb.JoinRequest) -> None:
        """Refuses to begin anew what a joiner knows as merged: never seeded twice.

        From the first such joiner on nobody is let in, or the run would start over without those
        whose work it is; they train on.
        """
        state = self._engine.core.state
        if state.seeded or state.seed_persisting:
            return
        merged = max((x.version.global_step for x in request.held), default=0)
        if merged and request.run_id and not state.seed_forbidden:
            self._engine.handle(ev.SeedForbidden(learner_id=request.learner_id))
            logger.critical(
                "%s: %s holds global step %d of run %s, and this store is empty",
                Reason.STORE_LOST,
                request.learner_id,
                merged,
                request.run_id,
            )
            self._engine.parts.journal.write("store_lost", learner_id=request.learner_id)
            self._engine.store_lost.set()
        if state.seed_forbidden:
            raise DilocoError(
                Reason.STORE_LOST,
                f"run {state.settings.run_id!r} has merged before ({state.seed_forbidden} holds "
                "its versions), but the synchronizer's store is empty: start the synchronizer with "
                "the store of that run, or begin another run under a new run_id",
            )

    async def _check_layout(self, request: pb.JoinRequest) -> None:
        engine = self._engine
        settings = engine.parts.settings
        check_tensors(request.tensors)
        # Off the loop: a model of many tensors takes a while, and nothing may be behind a Join.
        runner = engine.parts.committer.store_runner
        tensors = await runner.submit(lambda: tensors_from(request.tensors))
        if engine.layout is None:
            layout = await runner.submit(
                lambda: build_layout(
                    tensors,
                    strategy=Strategy(settings.strategy),
                    num_fragments=settings.num_fragments,
                    overlap=settings.overlap,
                )
            )
            self._check_fingerprint(request, layout)
            await self._fix_layout(layout)
            return
        ours = engine.layout.tensors
        difference = await runner.submit(lambda: first_difference(ours, tensors))
        if difference is not None:
            raise DilocoError(
                Reason.LAYOUT_MISMATCH,
                f"the model of {request.learner_id} is not the fleet's: {difference} (here is the "
                "fleet, there the learner); train the same model everywhere",
            )
        self._check_fingerprint(request, engine.layout)

    def _check_fingerprint(self, request: pb.JoinRequest, layout: Layout) -> None:
        if request.layout_fingerprint and request.layout_fingerprint != layout.fingerprint:
            raise DilocoError(
                Reason.LAYOUT_MISMATCH,
                "the same tensors gave another layout at the learner; install the same version "
                "on both sides",
            )

    async def _fix_layout(self, layout: Layout) -> None:
        engine = self._engine
        description: RunDescription = {"layout": layout_description(layout)}
        store_runner = engine.parts.committer.store_runner
        await store_runner.submit(lambda: self._store.open_run(description))
        if engine.parts.replicas is not None:
            engine.parts.replicas.leader.describe(description)
        engine.layout = layout
        tensors = TensorBook(layout, engine.parts.settings, engine.core.state.term)
        engine.parts.committer.begin(tensors)
        engine.core.fix_layout(layout.num_fragments)
        logger.info(
            "layout: %d parameters in %d fragments", layout.num_parameters, layout.num_fragments
        )

    async def _grant(self, learner_id: str, request: pb.JoinRequest) -> Incarnation:
        engine = self._engine
        shard = self._shard(learner_id, request.shard if request.HasField("shard") else None)
        previous, claims = previous_from(request), leases_from(request)
        self._check_leases(request, previous, claims)  # who is refused leaves no trace
        incarnation = await self._grant_incarnation(learner_id)
        self._check_leases(request, previous, claims)  # they may be handed out meanwhile
        engine.handle(
            ev.LearnerJoined(
                learner_id=learner_id,
                incarnation=incarnation,
                shard=shard,
                records_parts=request.records_parts,
                previous=previous,
                claims=claims,
            )
        )
        return incarnation

    def _check_leases(
        self,
        request: pb.JoinRequest,
        previous: Incarnation | None,
        claims: tuple[DataLease, ...],
    ) -> None:
        engine, learner_id = self._engine, request.learner_id
        why = engine.core.lease_refusal(
            learner_id, previous, claims, engine.parts.clock(), snapshot=snapshot_from(request)
        )
        if why is not None:
            raise DilocoError(
                Reason.LEASE_LOST,
                f"{learner_id} has lost its data leases: {why}; join again without them, and "
                "without what it has trained since its last updates",
            )

    def _shard(self, learner_id: str, claimed: int | None) -> int:
        state = self._engine.core.state
        shard = self._engine.core.shard_for(learner_id, claimed)
        if shard is None:
            raise DilocoError(
                Reason.NO_SHARD_LEFT,
                f"{learner_id} cannot join: all {state.settings.num_learners} data shards belong "
                "to other learner ids; join under one of those, or plan more learners at the "
                "start, or set data_mode = leases, with which any number may join",
            )
        if state.roster.find(learner_id) is None and len(state.roster) >= MAX_LEARNERS:
            raise DilocoError(
                Reason.NO_SHARD_LEFT,
                f"{learner_id} cannot join: {MAX_LEARNERS} learner ids are known, and every one is "
                "remembered for ever; let learners that come and go keep their ids",
            )
        return shard

    def _response(self, learner_id: str, incarnation: Incarnation) -> pb.JoinResponse:
        engine = self._engine
        state = engine.core.state
        learner = state.roster.current(learner_id, incarnation)
        assert learner is not None, "joined"
        assert engine.layout is not None, "checked"
        return pb.JoinResponse(
            claim=engine.claim(),
            incarnation=incarnation_to(incarnation),
            settings=settings_to_proto(state.settings),
            layout_fingerprint=engine.layout.fingerprint,
            seed=state.seeder == (learner_id, incarnation),
            shard=learner.shard,
            local_step=learner.local_step,
            addresses=engine.parts.addresses,
            clock=engine.clock_message(),
        )

    async def _grant_incarnation(self, learner_id: str) -> Incarnation:
        """A new incarnation, entered in the membership where that answers.

        Incarnations belong to the round record and the membership has a copy, so its failing
        alone keeps nobody out. What is granted without its answer is what it was asked to enter:
        were it another one, the next leader could believe in a life that nobody lives.
        """
        state = self._engine.core.state
        while True:
            proposed = state.roster.next_incarnation(learner_id, state.term)
            try:
                known = await self._engine.parts.membership.grant_incarnation(learner_id, proposed)
            except DilocoError as error:
                if error.reason not in {Reason.MEMBERSHIP_UNAVAILABLE, Reason.MALFORMED}:
                    raise
                logger.warning("%s joins without the membership: %s", learner_id, error.message)
                return proposed
            if known == proposed:
                return proposed
            state.roster.is_taken(learner_id, known.number)
