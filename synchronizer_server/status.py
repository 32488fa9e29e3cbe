"""What the synchronizer sees now, as one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decoupled_diloco.v1 import admin_pb2 as pb
from decoupled_diloco.wire import MAX_COUNT, held_to, incarnation_to
from synchronizer_server.core.roster import Learner
from synchronizer_server.core.rounds import Round
from synchronizer_server.core.state import CoreState
from synchronizer_server.engine import Engine
from synchronizer_server.replicas import Replicas


def status_message(engine: Engine, labels: Mapping[str, Mapping[str, str]]) -> pb.GetStatusResponse:
    """Returns the status of a synchronizer.

    Args:
        engine: the engine.
        labels: what each learner said of itself at Join.
    """
    state = engine.core.state
    now = engine.parts.clock()
    learners = sorted(state.roster, key=lambda x: x.learner_id)
    pace = state.pace
    positions = state.data.positions() if state.data is not None else {}
    versions = engine.updates.versions()
    published = [v.global_step for v in versions]
    return pb.GetStatusResponse(
        run_id=state.settings.run_id,
        claim=engine.claim(),
        state=state_name(engine),
        global_step=state.committed,
        total_global_steps=state.settings.total_global_steps,
        quorum=state.quorum,
        waits=[
            pb.Wait(subject=w.subject, reason=w.reason, detail=w.detail, seconds=seconds)
            for w, seconds in engine.core.waits(now)
        ],
        rounds=[_round(r) for r in state.rounds],
        learners=[
            _learner(
                engine,
                x,
                now,
                published=published,
                labels=labels.get(x.learner_id, {}),
                position=positions.get(x.learner_id, (0, 0)),
            )
            for x in learners
        ],
        versions=held_to(dict(enumerate(versions))),
        pace=pb.PaceStatus(
            step_seconds=pace.step_s or 0.0,
            quorum_seconds=pace.quorum_s or 0.0,
            sync_seconds=pace.sync_s or 0.0,
            grace_seconds=pace.grace_s(),
        ),
        totals=engine.ledger.totals(min(sum(x.num_tokens_merged for x in learners), MAX_COUNT)),
        uptime_seconds=now - engine.started_at,
        snapshot=engine.snapshots.status(),
        role="leading",
        record_term=engine.parts.claim.term,
        replication=None if engine.parts.replicas is None else _replication(engine.parts.replicas),
        data=data_status(state),
    )


def _replication(replicas: Replicas) -> pb.ReplicationStatus:
    core = replicas.core
    return pb.ReplicationStatus(
        mode=core.mode,
        replicas=[
            pb.ReplicaStatus(
                standby_id=standby_id,
                connected=standby.connected,
                in_sync=standby_id in core.may_be_in_sync,
                acked_global_step=max(standby.acked, 0),
            )
            for standby_id, standby in sorted(core.standbys.items())
        ],
        unsafe_rounds=core.lag,
        lease_held=replicas.lease_seconds > 0,
        lease_seconds=replicas.lease_seconds,
    )


def state_name(engine: Engine) -> str:
    """Returns starting, seeding, running, draining or complete."""
    state = engine.core.state
    if state.draining:
        return "draining"
    if state.complete:
        return "complete"
    if state.seeded:
        return "running"
    return "seeding" if state.num_fragments else "starting"


def data_status(state: CoreState) -> pb.DataStatus:
    """Where the training data stands."""
    book = state.data
    if book is None:
        return pb.DataStatus(mode=state.settings.data_mode)
    epoch, totals = book.record.epoch, book.totals
    num_fresh = (epoch + 1) * totals.length - totals.issued if totals.length else 0
    return pb.DataStatus(
        mode=state.settings.data_mode,
        epoch=epoch,
        num_free=num_fresh + totals.free,
        num_leased=totals.leased,
        num_merged=totals.merged,
        num_returned=totals.returned,
    )


def _round(round_: Round) -> pb.RoundStatus:
    return pb.RoundStatus(
        global_step=round_.global_step,
        fragment=round_.fragment,
        state=str(round_.state),
        pending=sorted(round_.pending),
        accepted=list(round_.accepted),
        grace_seconds=round_.grace_s,
    )


def _learner(
    engine: Engine,
    learner: Learner,
    now: float,
    *,
    published: Sequence[int],
    labels: Mapping[str, str],
    position: tuple[int, int],
) -> pb.LearnerStatus:
    ledger = engine.ledger
    return pb.LearnerStatus(
        learner_id=learner.learner_id,
        incarnation=incarnation_to(learner.incarnation),
        state=str(learner.state),
        shard=learner.shard,
        local_step=learner.local_step,
        loss=learner.loss,
        tokens_per_second=learner.tokens_per_second if learner.live else 0.0,
        versions_behind=_versions_behind(published, learner),
        heard_seconds_ago=max(now - learner.heard_at, 0.0),
        bytes_up=ledger.bytes_up[learner.learner_id],
        bytes_down=ledger.bytes_down[learner.learner_id],
        accepted=learner.num_accepted,
        dropped=learner.num_dropped,
        refused=learner.num_refused,
        last_reason=learner.last_reason,
        tokens_merged=learner.num_tokens_merged,
        labels=labels,
        data_position=position[0],
        data_stop=position[1],
        tokens_processed=learner.num_tokens,
        quarantine=learner.quarantine,
    )


def _versions_behind(published: Sequence[int], learner: Learner) -> int:
    """Fragments of which the learner has not applied the published version."""
    if len(published) != len(learner.known_global_steps):
        return len(published)
    return sum(a != b for a, b in zip(published, learner.known_global_steps, strict=True))
