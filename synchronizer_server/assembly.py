"""Puts a synchronizer together: from a store that may hold a run to an engine that serves it."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.claims import Claim
from decoupled_diloco.codecs import check_codecs
from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.journal import Journal, Observer
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Version
from synchronizer_server.commits import Committer
from synchronizer_server.core.effects import RoundSummary
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.state import Restored
from synchronizer_server.core.synchronizer import SynchronizerCore
from synchronizer_server.engine import Engine
from synchronizer_server.joining import JoinDesk
from synchronizer_server.ledger import make_record, restored_from
from synchronizer_server.membership.base import Membership, Roll
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.parts import Parts
from synchronizer_server.replicas import Replicas
from synchronizer_server.run_layout import layout_from
from synchronizer_server.runner import Runner
from synchronizer_server.store.base import RoundStore
from synchronizer_server.tensors import TensorBook
from synchronizer_server.updates import UpdateBook

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Everything of the world that a synchronizer touches; scripted fleets give their own.

    Attributes:
        store: durable records.
        membership: who is alive.
        tensors_runner: runs tensor work.
        store_runner: runs the store.
        clock: monotonic seconds.
        journal_path: file of events, if wanted.
        on_event: hears of the same events.
    """

    store: RoundStore
    membership: Membership
    tensors_runner: Runner
    store_runner: Runner
    clock: Callable[[], float]
    journal_path: Path | None = None
    on_event: Observer | None = None


@dataclass(slots=True, kw_only=True)
class Assembled:
    """An engine, and who grants its incarnations."""

    engine: Engine
    joins: JoinDesk


async def assemble(
    settings: RunSettings,
    outside: Outside,
    *,
    max_staged_bytes: int,
    claim: Claim | None = None,
    replicas: Replicas | None = None,
    before_serving: Callable[[], Awaitable[None]] | None = None,
) -> Assembled:
    """Builds a synchronizer; goes on where the store left off.

    Args:
        settings: settings of the run.
        outside: the world.
        max_staged_bytes: bound on pushes under way.
        claim: our claim of leadership, whose term begins; None where nobody else could lead.
        replicas: our standbys; None as above.
        before_serving: awaited once the store has begun the term, before anybody hears of it.

    Raises:
        DilocoError: STORE_CORRUPT, STORE_LOST, RUN_MISMATCH, CONFIG_CONFLICT.
    """
    check_codecs(settings)
    store, membership = outside.store, outside.membership
    # Off the loop: a take-over must renew its lease while a large store is read.
    loaded = await outside.store_runner.submit(store.load)
    if loaded is None:
        await _check_not_lost(membership, settings.run_id)
    layout = layout_from(store.read_run(), settings) if loaded is not None else None
    claim = claim or _lone_claim(settings, store)
    restored = await _restored(loaded[0], membership, settings) if loaded is not None else None
    core = SynchronizerCore(
        settings,
        term=claim.term,
        num_fragments=layout.num_fragments if layout is not None else 0,
        restored=restored,
        now=outside.clock(),
    )
    parts = Parts(
        settings=settings,
        core=core,
        membership=membership,
        committer=_new_committer(settings, outside, claim.term),
        tensors_runner=outside.tensors_runner,
        clock=outside.clock,
        journal=Journal(outside.journal_path, observer=outside.on_event),
        max_staged_bytes=max_staged_bytes,
        claim=claim,
        replicas=replicas,
    )
    engine = Engine(parts, layout)
    parts.committer.make_record = _record_maker(engine)
    await outside.store_runner.submit(lambda: _begin_term(engine, store, loaded, restored))
    _start(engine, store, loaded)
    engine.snapshots.start(await outside.store_runner.submit(store.snapshots))
    if before_serving is not None:
        await before_serving()
    if loaded is not None:
        await engine.rounds.mark_seeded()  # it may have been away when the run was seeded
    return Assembled(engine=engine, joins=JoinDesk(engine, store))


def _new_committer(settings: RunSettings, outside: Outside, term: int) -> Committer:
    return Committer(
        store=outside.store,
        tensors_runner=outside.tensors_runner,
        store_runner=outside.store_runner,
        updates=UpdateBook(settings.retained_updates),
        term=term,
        make_record=lambda *_: _never(),
    )


def _never() -> RoundRecord:
    raise AssertionError("records are made once the engine is there")


def _record_maker(
    engine: Engine,
) -> Callable[[int, tuple[Version, ...], RoundSummary | None], RoundRecord]:
    def make(
        global_step: int, versions: tuple[Version, ...], summary: RoundSummary | None
    ) -> RoundRecord:
        assert engine.layout is not None, "a record needs the layout"
        return make_record(
            engine.core.state,
            global_step=global_step,
            versions=versions,
            fingerprint=engine.layout.fingerprint,
            summary=summary,
        )

    return make


def _begin_term(
    engine: Engine,
    store: RoundStore,
    loaded: tuple[RoundRecord, dict[int, FragmentState]] | None,
    restored: Restored | None,
) -> None:
    term = engine.core.state.term
    journal = engine.parts.journal
    if loaded is None or restored is None:
        store.begin_term(term)
        journal.write("start", term=term, global_step=0, restored=False)
        logger.info("a new run, term %d", term)
        return
    record = loaded[0]
    assert engine.layout is not None, "a record belongs to a layout"
    if record.layout_fingerprint != engine.layout.fingerprint:
        raise DilocoError(
            Reason.STORE_CORRUPT, "the newest record belongs to another layout; restore a backup"
        )
    store.begin_term(term, _taken_over(record, term))
    journal.write("start", term=term, global_step=record.global_step, restored=True)
    logger.info("goes on at global step %d, term %d", record.global_step, term)


def _start(
    engine: Engine,
    store: RoundStore,
    loaded: tuple[RoundRecord, dict[int, FragmentState]] | None,
) -> None:
    """Fills tensors, updates and standbys with what was loaded."""
    parts = engine.parts
    if loaded is None or engine.layout is None:
        return
    record, tensors = loaded
    states = [tensors[i] for i in sorted(tensors)]
    parts.committer.begin(TensorBook(engine.layout, parts.settings, parts.claim.term))
    parts.committer.start(record.versions, states)
    if parts.replicas is not None:
        taken_over = _taken_over(record, parts.claim.term)
        parts.replicas.start(store.read_run(), taken_over, states)


def _taken_over(record: RoundRecord, term: int) -> RoundRecord:
    """The record with which a term begins: the newest one, which it takes over."""
    return dataclasses.replace(
        record, term=term, fragment=None, contributions=(), dropped=(), rolled_back=""
    )


async def _check_not_lost(membership: Membership, run_id: str) -> None:
    """A run that was seeded is never seeded again by a synchronizer that lost its store."""
    try:
        seeded = await membership.is_seeded()
    except DilocoError as error:
        raise DilocoError(
            error.reason, f"{error.message}; a new run needs its membership to start"
        ) from error
    if seeded:
        raise DilocoError(
            Reason.STORE_LOST,
            f"run {run_id!r} has merged before, but the store is empty: start with the store of "
            "that run, or choose a new run_id",
        )


def _lone_claim(settings: RunSettings, store: RoundStore) -> Claim:
    """The claim of a synchronizer that nobody could compete with."""
    term = 1 + store.highest_term()
    return Claim(run_id=settings.run_id, term=term, leader_id=secrets.token_hex(8))


async def _restored(record: RoundRecord, membership: Membership, settings: RunSettings) -> Restored:
    """What the core needs of a record to go on.

    Raises:
        UsageError: CONFIG_CONFLICT.
    """
    _check_data(record, settings)
    return restored_from(record, await _read_back(membership), settings.quorum)


def _check_data(record: RoundRecord, settings: RunSettings) -> None:
    """Data that is leased stays so, in passes of one length, or the ledger means nothing.

    Raises:
        UsageError: CONFIG_CONFLICT.
    """
    data = record.data
    is_leased = settings.data_mode == "leases"
    if data.num_issued and not (is_leased and settings.data_length == data.length):
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            f"run {settings.run_id!r} leases its data, {data.length} samples per pass, but the "
            f"settings say data_mode = {settings.data_mode} and data_length = "
            f"{settings.data_length}: go on with the settings of the run, or choose a new run_id "
            "and store",
        )


async def _read_back(membership: Membership) -> Roll | None:
    """What the membership knows of the run; None where it does not answer."""
    try:
        return await membership.read_back()
    except DilocoError as error:
        logger.warning("members and quorum from the last round record: %s", error)
        return None
