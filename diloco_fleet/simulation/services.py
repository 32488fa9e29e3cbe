"""What a leader serves: `joining`, `service.report`, `push` and `watch`, in virtual time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Incarnation, Version
from diloco_fleet.simulation.kernel import Promise, Work
from diloco_fleet.simulation.leading import Engine, Reporting, Ticket
from diloco_fleet.simulation.messages import Join, Joined, Push, Schedule, Watch
from diloco_fleet.simulation.network import End, unavailable
from synchronizer_server.commits import layout_description
from synchronizer_server.core import events as ev
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.tensors import TensorBook

if TYPE_CHECKING:
    from diloco_fleet.simulation.node import Node


def join(node: Node, request: Join) -> Work:
    """Grants an incarnation; one join at a time."""
    yield 0.0
    engine = node.leader()
    _check_claim(engine, request)
    if request.relays_claim:
        return engine.claim
    _check_not_lost(engine, request)
    while engine.joining is not None:
        yield engine.joining
    lock = engine.joining = Promise()
    try:
        if engine.layout is None:
            yield from _fix_layout(engine)
        name = (request.learner_id, request.request_id)
        known = engine.granted.get(name)
        if known is None or _needs_new_life(engine, request.learner_id, known):
            known = yield from _grant(engine, request)
            engine.granted[name] = known
        return _response(engine, request.learner_id, known)
    finally:
        engine.joining = None
        lock.set()


def _check_claim(engine: Engine, request: Join) -> None:
    claim = request.claim
    if claim is None or claim.term <= engine.claim.term:
        return
    if engine.node.leadership.heard(claim):
        raise DilocoError(
            Reason.NOT_LEADING, f"term {claim.term} is led elsewhere", term=claim.term
        )


def _check_not_lost(engine: Engine, request: Join) -> None:
    state = engine.core.state
    if state.seeded or state.seed_persisting:
        return
    if request.merged and not state.seed_forbidden:
        engine.handle(ev.SeedForbidden(learner_id=request.learner_id))
        engine.store_lost.set()
    if state.seed_forbidden:
        raise DilocoError(Reason.STORE_LOST, "the run has merged before; the store is empty")


def _needs_new_life(engine: Engine, learner_id: str, incarnation: Incarnation) -> bool:
    learner = require_current(engine, learner_id, incarnation)
    state = engine.core.state
    nobody_seeds = not state.seeded and not state.seed_persisting and state.seeder is None
    return nobody_seeds or learner.has_left


def require_current(engine: Engine, learner_id: str, incarnation: Incarnation) -> LearnerState:
    """Where the learner stands whose newest incarnation this is, as `service.identity`."""
    state = engine.core.state
    stranger = state.roster.why_not_current(learner_id, incarnation, state.term)
    if stranger is not None:
        raise DilocoError(*stranger)
    learner = state.roster.find(learner_id)
    assert learner is not None, "current"
    return learner.state


def _fix_layout(engine: Engine) -> Work:
    node, layout = engine.node, engine.node.world.layout
    description: dict[str, object] = {"layout": layout_description(layout)}
    yield node.store_runner.submit("open_run", lambda: node.store.open_run(description))
    engine.replicas.describe(description)
    engine.layout = layout
    engine.tensors = TensorBook(layout, node.world.settings, engine.claim.term)
    engine.core.fix_layout(layout.num_fragments)


def _grant(engine: Engine, request: Join) -> Work:
    learner_id = request.learner_id
    shard = engine.core.shard_for(learner_id, request.shard)
    if shard is None:
        raise DilocoError(Reason.NO_SHARD_LEFT, "all shards belong to others")
    incarnation = yield from _grant_incarnation(engine, request)
    engine.node.point("granted")
    engine.node.world.oracle.granted(engine, learner_id, incarnation)
    engine.handle(
        ev.LearnerJoined(
            learner_id=learner_id,
            incarnation=incarnation,
            shard=shard,
            previous=request.previous,
        )
    )
    return incarnation


def _grant_incarnation(engine: Engine, request: Join) -> Work:
    node, roster, learner_id = engine.node, engine.core.state.roster, request.learner_id
    keeper = node.world.keeper
    while True:
        proposed = roster.next_incarnation(learner_id, engine.core.state.term)
        node.world.oracle.proposes(request, proposed)
        held_s = node.world.faults.grant_held_s(node)
        grant = functools.partial(keeper.membership.grant_incarnation, learner_id, proposed)
        try:
            known: Incarnation = yield from keeper.ask(node, grant, held_s)
        except DilocoError as error:
            if error.reason not in {Reason.MEMBERSHIP_UNAVAILABLE, Reason.MALFORMED}:
                raise
            return proposed
        if known == proposed:
            return proposed
        node.world.tally["number_taken"] += 1
        roster.is_taken(learner_id, known.number)


def _response(engine: Engine, learner_id: str, incarnation: Incarnation) -> Joined:
    state = engine.core.state
    learner = state.roster.current(learner_id, incarnation)
    assert learner is not None, "joined"
    return Joined(
        claim=engine.claim,
        incarnation=incarnation,
        seed=state.seeder == (learner_id, incarnation),
        shard=learner.shard,
        local_step=learner.local_step,
        global_step=state.committed,
    )


def report(node: Node, end: End, learner_id: str, incarnation: Incarnation) -> Work:
    """Serves one report stream."""
    engine = node.leader()
    require_current(engine, learner_id, incarnation)
    before = engine.streams.pop(learner_id, None)
    if before is not None:
        before.close(unavailable("the stream before"))
    stream = engine.streams[learner_id] = Reporting(learner_id, incarnation, end)
    state = engine.core.state
    engine.handle(ev.StreamOpened(learner_id=learner_id, incarnation=incarnation))
    if state.seeded:
        end.send(Schedule(state.committed, state.due_fragments()))
    try:
        while True:
            message = yield from end.receive()
            if stream.closed:
                return
            engine.handle(message)
    finally:
        engine.stream_ended(stream)


def push(node: Node, request: Push) -> Work:
    """Serves one push: header, bytes, then the instant that decides."""
    yield 0.0
    engine = node.leader()
    key = ev.PushKey(request.learner_id, request.incarnation, request.global_step, request.fragment)
    ticket = engine.tickets.setdefault(key, Ticket())
    engine.handle(
        ev.PushOpened(
            key=key,
            term=request.term,
            base=request.base,
            local_step=request.local_step,
            num_tokens=request.num_tokens,
            num_steps=request.num_steps,
        )
    )
    if not ticket.answer.done:
        yield from _stage(engine, ticket, key, request)
    return (yield ticket.answer)


def _stage(engine: Engine, ticket: Ticket, key: ev.PushKey, request: Push) -> Work:
    world = engine.node.world
    ticket.streams += 1
    stream = ticket.streams
    for _ in range(2):
        yield world.faults.transfer_s()
        if ticket.answer.done or ticket.streams != stream:
            return
        if world.faults.breaks_push():
            raise unavailable("the stream of the push")
        engine.handle(ev.PushProgressed(key=key, staged_bytes=len(request.payload)))
    tensors = engine.tensors
    assert tensors is not None, "a round is open"
    try:
        vector, norm = yield engine.node.tensors_runner.submit(
            "decode", lambda: tensors.decode(request.codec, request.payload, key.fragment)
        )
    except DilocoError as error:
        if not ticket.answer.done:
            engine.handle(
                ev.PushFailed(key=key, reason=error.reason, message=error.message, refused=True)
            )
        return
    if not ticket.answer.done:
        ticket.vector, ticket.work = vector, request.work
        engine.handle(ev.PushStaged(key=key, norm=norm))


def push_seed(node: Node, request: Push) -> Work:
    """Serves the first parameters of a fragment; answers why not, or None."""
    yield 0.0
    engine = node.leader()
    who = (request.learner_id, request.incarnation, request.fragment)
    refusal = engine.core.seed_refusal(*who)
    if refusal is not None:
        return refusal
    yield node.world.faults.transfer_s()
    tensors = engine.tensors
    assert tensors is not None, "joined"
    vector = yield node.tensors_runner.submit(
        "decode", lambda: tensors.decode_seed(request.codec, request.payload, request.fragment)
    )
    refusal = engine.core.seed_refusal(*who)
    if refusal is not None:
        return refusal
    engine.stage_seed(request.fragment, vector)
    engine.handle(
        ev.SeedStaged(
            learner_id=request.learner_id,
            incarnation=request.incarnation,
            fragment=request.fragment,
        )
    )
    return None


def watch(node: Node, end: End, request: Watch) -> Work:
    """Serves one watcher: what differs from what it holds, then every new version."""
    engine = node.leader()
    require_current(engine, request.learner_id, request.incarnation)
    held: dict[int, Version] | None = None
    while True:
        published, sent = engine.published, False
        if held is None and engine.core.state.seeded:
            held = dict(request.held)
        versions: dict[int, Version] = {} if held is None else held
        for fragment in _stale_first(engine, versions) if held is not None else ():
            for update in engine.updates.plan(fragment, versions.get(fragment)):
                end.send(update)
                node.point("update_sent")
                versions[fragment] = update.result
                sent = True
                yield 0.0
        if sent:
            continue
        if held is not None:
            end.send("caught_up")
        if not engine.closed:
            yield published
        if engine.closed:
            raise engine.farewell
        require_current(engine, request.learner_id, request.incarnation)


def _stale_first(engine: Engine, held: dict[int, Version]) -> list[int]:
    versions = engine.updates.versions()
    stale = [i for i, v in enumerate(versions) if held.get(i) != v]
    return sorted(stale, key=lambda i: versions[i].global_step)
