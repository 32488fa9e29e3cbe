"""Watch: what differs from what the watcher holds, then every new version."""

from __future__ import annotations

from collections.abc import AsyncIterator

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, reach
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import held_from, incarnation_from
from synchronizer_server.convert import check_id
from synchronizer_server.engine import Engine
from synchronizer_server.limits import MAX_OBSERVERS, MAX_PER_PEER
from synchronizer_server.service.identity import require_current
from synchronizer_server.updates import Update


async def watch(engine: Engine, request: pb.WatchRequest) -> AsyncIterator[pb.WatchResponse]:
    """Serves one watcher, at its own pace: it reads from what is retained, there is no queue.

    Raises:
        DilocoError: FENCED, UNKNOWN_LEARNER, RUN_MISMATCH or LAYOUT_MISMATCH;
            the engine's farewell at the end.
    """
    check_id(request.watcher_id, "watcher_id")
    learner_id = _learner(engine, request)
    _check(engine, request)
    peer = engine.limits.hold(
        "watch", learner_id or "", MAX_PER_PEER if learner_id else MAX_OBSERVERS
    )
    with peer:
        async for message in _serve(engine, request, learner_id):
            yield message


async def _serve(
    engine: Engine, request: pb.WatchRequest, learner_id: str | None
) -> AsyncIterator[pb.WatchResponse]:
    held: dict[int, Version] | None = None
    while True:
        published = engine.parts.committer.published
        if held is None and engine.core.state.seeded:
            held = held_from(request.held, engine.updates.num_fragments)
        sent = False
        if held is not None:
            for fragment in _stale_first(engine, held):
                for update in engine.updates.plan(fragment, held.get(fragment)):
                    messages = _messages(engine, update)
                    for number, message in enumerate(messages):
                        if number == len(messages) // 2:
                            reach(FaultPoint.MID_WATCH)
                        yield message
                    held[fragment] = update.result
                    engine.ledger.sent(learner_id, update.payload_bytes, update.codec)
                    sent = True
            if not sent:
                yield pb.WatchResponse(caught_up=pb.CaughtUp(clock=engine.clock_message()))
        if not sent:
            if not engine.closed:  # or it was closed while this watcher was being served
                await published.wait()
            if engine.closed:
                raise engine.farewell
            _learner(engine, request)


def _stale_first(engine: Engine, held: dict[int, Version]) -> list[int]:
    """Fragments that differ, the longest behind first."""
    versions = engine.updates.versions()
    stale = [i for i, v in enumerate(versions) if held.get(i) != v]
    return sorted(stale, key=lambda i: versions[i].global_step)


def _messages(engine: Engine, update: Update) -> list[pb.WatchResponse]:
    header = pb.WatchResponse()
    header.CopyFrom(update.messages[0])
    header.header.clock.CopyFrom(engine.clock_message())
    return [header, *update.messages[1:]]


def _learner(engine: Engine, request: pb.WatchRequest) -> str | None:
    """Id of the learner that watches; None for an observer, which never contributes."""
    if not request.HasField("incarnation"):
        return None
    require_current(engine, request.watcher_id, incarnation_from(request.incarnation))
    return request.watcher_id


def _check(engine: Engine, request: pb.WatchRequest) -> None:
    run_id = engine.parts.settings.run_id
    if request.run_id and request.run_id != run_id:
        raise DilocoError(
            Reason.RUN_MISMATCH, f"this synchronizer serves run {run_id!r}; check the address"
        )
    layout = engine.layout
    given = request.layout_fingerprint
    if given and layout is not None and given != layout.fingerprint:
        raise DilocoError(
            Reason.LAYOUT_MISMATCH, "the watcher's layout is not the fleet's; use the same model"
        )
