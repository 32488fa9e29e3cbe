"""Report: metadata of inner steps up, pulls and schedule down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from decoupled_diloco.errors import reason_of
from decoupled_diloco.logs import ChangeLogger
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.versions import Incarnation
from decoupled_diloco.wire import check_count, incarnation_from, malformed
from synchronizer_server.convert import MAX_FRAGMENTS, loss_from, one_line
from synchronizer_server.core import events as ev
from synchronizer_server.engine import Engine
from synchronizer_server.limits import MESSAGES_PER_S, Throttle
from synchronizer_server.service.identity import require_current
from synchronizer_server.streams import ReportStream

logger = logging.getLogger(__name__)


async def report(
    engine: Engine, requests: AsyncIterator[pb.ReportRequest]
) -> AsyncIterator[pb.ReportResponse]:
    """Serves one report stream until the learner or the core ends it.

    Raises:
        DilocoError: FENCED, UNKNOWN_LEARNER or MALFORMED.
    """
    hello = await _hello(engine, requests)
    incarnation = incarnation_from(hello.incarnation)
    require_current(engine, hello.learner_id, incarnation)
    with engine.limits.hold("report", hello.learner_id):
        stream = _open(engine, hello.learner_id, incarnation)
        engine.snapshots.heard(hello.learner_id, incarnation, hello.clock)
        reader = asyncio.ensure_future(_read(engine, stream, requests))
        try:
            async for message in stream.messages():
                yield message
        finally:
            reader.cancel()
            engine.stream_ended(stream)


async def _hello(engine: Engine, requests: AsyncIterator[pb.ReportRequest]) -> pb.ReportHello:
    first = await engine.limits.first(requests)
    if first is None or first.WhichOneof("kind") != "hello":
        raise malformed("a report stream does not begin with a hello")
    return first.hello


def _open(engine: Engine, learner_id: str, incarnation: Incarnation) -> ReportStream:
    before = engine.streams.pop(learner_id, None)
    if before is not None:
        before.close()
    stream = ReportStream(learner_id, incarnation)
    engine.streams[learner_id] = stream
    state = engine.core.state
    engine.handle(ev.StreamOpened(learner_id=learner_id, incarnation=incarnation))
    if state.seeded:
        schedule = pb.Schedule(global_step=state.committed, due_fragments=state.due_fragments())
        stream.send(pb.ReportResponse(schedule=schedule))
    until = state.quarantine.until(learner_id)
    if until is not None:
        learner = state.roster.find(learner_id)
        assert learner is not None, "current"
        seconds = max(until - engine.parts.clock(), 0.0)
        told = pb.Quarantine(reason=learner.quarantine, seconds=seconds)
        stream.send(pb.ReportResponse(quarantine=told))
    if state.finished:
        stop = pb.Stop(global_step=state.committed, reason="the run is complete")
        stream.send(pb.ReportResponse(stop=stop))
    return stream


async def _read(
    engine: Engine, stream: ReportStream, requests: AsyncIterator[pb.ReportRequest]
) -> None:
    throttle, changes = Throttle(engine.parts.clock), ChangeLogger(logger)
    try:
        async for request in requests:
            if stream.closed:
                return
            engine.handle(_event(stream, request))
            for message in (request.inner_step, request.heartbeat):
                engine.snapshots.heard(stream.learner_id, stream.incarnation, message.clock)
            delay_s = throttle.delay_s()
            if delay_s > 0.0:
                changes.log(
                    stream.learner_id,
                    "reports too fast",
                    f"they are read at {MESSAGES_PER_S:g} per second",
                    level=logging.WARNING,
                )
                await asyncio.sleep(delay_s)
    except Exception as error:
        stream.close(error)
    else:
        stream.close()


def _event(stream: ReportStream, request: pb.ReportRequest) -> ev.Event:
    learner_id, incarnation = stream.learner_id, stream.incarnation
    match request.WhichOneof("kind"):
        case "inner_step":
            return _step(learner_id, incarnation, request.inner_step)
        case "heartbeat":
            return ev.Heard(learner_id=learner_id, incarnation=incarnation)
        case "pull_declined":
            return ev.PullDeclined(
                learner_id=learner_id,
                incarnation=incarnation,
                global_step=request.pull_declined.global_step,
                reason=reason_of(request.pull_declined.reason),
            )
        case "part_missing":
            told = request.part_missing
            return ev.SnapshotRecorded(
                learner_id=learner_id,
                incarnation=incarnation,
                global_step=told.global_step,
                missing=one_line(told.reason) or "it has no part, and does not say why",
            )
        case _:
            raise malformed("a report of a kind that is not known here")


def _step(learner_id: str, incarnation: Incarnation, step: pb.InnerStep) -> ev.StepReported:
    if len(step.clock.known_global_steps) > MAX_FRAGMENTS:
        raise malformed(f"versions of {len(step.clock.known_global_steps)} fragments")
    return ev.StepReported(
        learner_id=learner_id,
        incarnation=incarnation,
        local_step=check_count(step.clock.own_step, "a local step"),
        num_steps=step.num_steps,
        num_tokens=check_count(step.num_tokens, "a number of tokens"),
        known_global_steps=tuple(step.clock.known_global_steps),
        loss=loss_from(step),
        data_lease_id=check_count(step.data_lease_id, "a data lease"),
        data_position=check_count(step.data_position, "a data position"),
    )
