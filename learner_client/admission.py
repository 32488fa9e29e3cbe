"""Joining: asks to take part, and agrees with the run on the layout."""

from __future__ import annotations

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout, Strategy, build_layout
from decoupled_diloco.settings import PROTOCOL_VERSION, RunSettings
from decoupled_diloco.settings_proto import settings_from_proto
from decoupled_diloco.v1 import synchronizer_pb2
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import (
    held_to,
    incarnation_from,
    incarnation_to,
    malformed,
    tensors_to,
)
from learner_client.checkpoint import SavedState
from learner_client.core.learner_core import LearnerCore
from learner_client.grants import Grant
from learner_client.leaders import LeaderSearch
from learner_client.link import Link
from learner_client.transport.base import Transport


class Admission:
    """Joins, and joins again under the same request id, so that one process keeps one incarnation.

    Args:
        link: the way to the synchronizer.
        search: knows the claims that were heard.
        saved: state to go on from.
    """

    def __init__(self, link: Link, search: LeaderSearch, saved: SavedState | None) -> None:
        self._link = link
        self._search = search
        self._saved = saved
        if saved is not None and saved.leases is not None:
            link.exchange.data.restore(saved.leases)
        self._request_id = f"{link.runtime.rng.getrandbits(128):032x}"

    async def relay(self, calls: Transport) -> None:
        """Takes the highest claim to a synchronizer that knows of none so high; obeys nothing.

        By the time it arrives that synchronizer may lead a later term: nobody joins by it.
        """
        link = self._link
        request = synchronizer_pb2.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._run_id,
            learner_id=link.identity.learner_id,
            request_id=self._request_id,
            claim=self._search.claim,
            relays_claim=True,
        )
        try:
            response = await calls.join(request)
        except DilocoError as error:
            if error.reason is Reason.BAD_CLAIM:
                self._search.judged(error)
        else:
            self._search.heard(response.claim)

    async def join(self, held: dict[int, Version]) -> Grant:
        """Joins with the published copies that are held.

        Raises:
            DilocoError: as the synchronizer says it; ``LAYOUT_MISMATCH`` where the layouts differ,
                ``MALFORMED`` where the answer makes no sense.
        """
        link = self._link
        layout = link.exchange.layout
        response = await link.transport.join(self._request(held))
        grant = _read_grant(response)
        self._search.joined(response)
        if layout is None:
            layout = build_layout(
                link.parameters.tensors,
                strategy=Strategy(grant.settings.strategy),
                num_fragments=grant.settings.num_fragments,
                overlap=grant.settings.overlap,
            )
        self._check_fingerprint(layout, response.layout_fingerprint, grant.settings)
        if link.exchange.layout is None:
            self._begin(layout, grant.settings)
        link.exchange.granted(grant)
        return grant

    @property
    def _run_id(self) -> str:
        """The run that is wanted, or was joined before; empty takes whichever is served."""
        link = self._link
        before = link.exchange.grant
        return link.identity.run_id or ("" if before is None else before.settings.run_id)

    def _request(self, held: dict[int, Version]) -> synchronizer_pb2.JoinRequest:
        link = self._link
        before, layout = link.exchange.grant, link.exchange.layout
        claims = link.exchange.data.claims
        snapshot, previous = "", None if before is None else before.incarnation
        saved = self._saved
        if before is None and saved is not None and claims:
            assert saved.cut is not None, "restored from a part of a snapshot"
            assert saved.leases is not None, "it has them"
            snapshot, previous = str(saved.cut.name), saved.leases.incarnation
        return synchronizer_pb2.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._run_id,
            learner_id=link.identity.learner_id,
            request_id=self._request_id,
            layout_fingerprint="" if layout is None else layout.fingerprint,
            tensors=tensors_to(link.parameters.tensors),
            held=held_to(held),
            clock=link.clock(),
            previous_incarnation=None if previous is None else incarnation_to(previous),
            claim=self._search.claim,
            labels=link.identity.labels,
            leases=[
                synchronizer_pb2.DataLease(
                    lease_id=x.lease_id, epoch=x.epoch, start=x.start, stop=x.stop
                )
                for x in claims
            ],
            snapshot=snapshot,
            shard=None if before is None else before.shard,
            records_parts=link.exchange.snapshots.records_parts,
        )

    def _begin(self, layout: Layout, settings: RunSettings) -> None:
        saved = self._saved
        if saved is not None:
            self._check_saved(saved, layout)
        core = LearnerCore(
            num_fragments=layout.num_fragments,
            overlap=settings.overlap,
            local_step=0 if saved is None else saved.local_step,
            counters=None if saved is None else saved.counters,
            versions=None if saved is None else {p: v for p, (v, _) in saved.published.items()},
        )
        bases = {} if saved is None else {p: copy for p, (_, copy) in saved.published.items()}
        self._link.exchange.begin(core, layout, bases)

    def _check_fingerprint(self, layout: Layout, theirs: str, settings: RunSettings) -> None:
        if layout.fingerprint != theirs:
            raise DilocoError(
                Reason.LAYOUT_MISMATCH,
                f"the layout of this model has fingerprint {layout.fingerprint[:12]}, that of run "
                f"{settings.run_id} {theirs[:12]}; every learner needs the same model and the same "
                "version of this software",
            )

    def _check_saved(self, saved: SavedState, layout: Layout) -> None:
        sizes = {p: copy.numel() for p, (_, copy) in saved.published.items()}
        ours = {f.index: f.num_elements for f in layout.fragments}
        if saved.fingerprint != layout.fingerprint or sizes != ours:
            raise DilocoError(
                Reason.LAYOUT_MISMATCH,
                "the saved state is of another model or another layout; start without it, or "
                "with the model and the run that it was saved with",
            )


def _read_grant(response: synchronizer_pb2.JoinResponse) -> Grant:
    incarnation = incarnation_from(response.incarnation)
    if incarnation.number < 1:
        raise malformed("the synchronizer granted no incarnation")
    settings = settings_from_proto(response.settings)
    if response.shard >= settings.num_learners and settings.data_mode == "shards":
        raise DilocoError(
            Reason.MALFORMED,
            f"granted data shard {response.shard} of {settings.num_learners}; "
            "check the synchronizer's version",
        )
    return Grant(
        incarnation=incarnation,
        term=response.claim.term,
        settings=settings,
        shard=response.shard,
        local_step=response.local_step,
        global_step=response.clock.own_step,
        seed=response.seed,
        snapshot=response.clock.snapshot,
    )
