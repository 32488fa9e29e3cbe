"""LeaseData: ranges of the training data; and the leases that a learner claims as it re-joins."""

from __future__ import annotations

from typing import Final

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.snapshots import SnapshotName
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.versions import Incarnation
from decoupled_diloco.wire import check_count, incarnation_from, malformed
from synchronizer_server.convert import check_id
from synchronizer_server.core import effects as fx
from synchronizer_server.core import events as ev
from synchronizer_server.core.data_records import DataLease, DataRange
from synchronizer_server.core.leases import MAX_OPEN_LEASES
from synchronizer_server.core.waits import claimants_text
from synchronizer_server.engine import Engine
from synchronizer_server.service.identity import require_current

_MAX_CLAIMS: Final = 2 * MAX_OPEN_LEASES


def lease_data(engine: Engine, request: pb.LeaseDataRequest) -> pb.LeaseDataResponse:
    """Leases the next range; a repeated request gets the same one again.

    The range is empty where the learner is to train first on what it has.

    Raises:
        DilocoError: CONFIG_CONFLICT where shards are fixed; STARTING while leases of before a
            restart are claimed; UNKNOWN_LEARNER, STALE_TERM, FENCED or LEASE_LOST; MALFORMED.
    """
    state = engine.core.state
    if state.data is None:
        raise DilocoError(
            Reason.CONFIG_CONFLICT,
            "this run does not lease its data: train on the shard of the Join, or start the "
            "synchronizer with data_mode = leases",
        )
    check_id(request.request_id, "request_id")
    incarnation = incarnation_from(request.incarnation)
    require_current(engine, request.learner_id, incarnation)
    wait_s = state.claims_until - engine.parts.clock()
    if wait_s > 0:
        raise DilocoError(
            Reason.STARTING,
            f"data is leased once {claimants_text(state)} claimed what was leased before the "
            f"synchronizer started, in {wait_s:.1f} s at most",
        )
    effects = engine.handle(
        ev.DataRequested(
            learner_id=request.learner_id, incarnation=incarnation, request_id=request.request_id
        )
    )
    (lease,) = (x.lease for x in effects if isinstance(x, fx.GrantData))
    require_current(engine, request.learner_id, incarnation)  # it may have held too much
    if lease is None:
        return pb.LeaseDataResponse(clock=engine.clock_message())
    return pb.LeaseDataResponse(
        lease_id=lease.lease_id,
        epoch=lease.where.epoch,
        start=lease.where.start,
        stop=lease.where.stop,
        clock=engine.clock_message(),
    )


def previous_from(request: pb.JoinRequest) -> Incarnation | None:
    """Incarnation under which the process was known before; None where there was none."""
    if not request.HasField("previous_incarnation"):
        return None
    return incarnation_from(request.previous_incarnation)


def snapshot_from(request: pb.JoinRequest) -> str:
    """The snapshot whose part the process goes on from; empty where it does not.

    Raises:
        DilocoError: MALFORMED.
    """
    if not request.snapshot:
        return ""
    try:
        return str(SnapshotName.parse(request.snapshot))
    except UsageError as error:
        raise malformed(error.message) from None


def leases_from(request: pb.JoinRequest) -> tuple[DataLease, ...]:
    """The data leases that a learner says it holds.

    Raises:
        DilocoError: MALFORMED.
    """
    if len(request.leases) > _MAX_CLAIMS:
        raise malformed(f"{len(request.leases)} data leases, at most {_MAX_CLAIMS} can be")
    claims = []
    for message in request.leases:
        stop = check_count(message.stop, "the end of a data lease")
        if not message.lease_id or message.start >= stop:
            raise malformed(f"data lease {message.lease_id} from {message.start} to {stop}")
        where = DataRange(check_count(message.epoch, "an epoch"), message.start, stop)
        claims.append(
            DataLease(lease_id=check_count(message.lease_id, "a data lease"), where=where)
        )
    return tuple(claims)
