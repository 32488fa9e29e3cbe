"""What holds once all faults have stopped (design section 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_fleet.simulation.lineages import fingerprint
from synchronizer_server.core.lease import Role

if TYPE_CHECKING:
    from diloco_fleet.simulation.node import Node
    from diloco_fleet.simulation.world import Outcome, World


def leader_of(world: World) -> Node | None:
    """The one process that leads; None where none or several do."""
    leading = [
        node
        for node in world.nodes
        if node.alive and node.engine is not None and node.leadership.core.role is Role.LEADING
    ]
    return leading[0] if len(leading) == 1 else None


def is_healthy(world: World) -> bool:
    """Whether everybody is there, one leads and the others are in sync."""
    leader, now = leader_of(world), world.kernel.now
    if leader is None or not world.keeper.alive or world.keeper.frozen_until > now:
        return False
    assert leader.engine is not None, "leads"
    if leader.engine.core.state.committed == 0 or not leader.leadership.holds():
        return False
    in_sync = world.keeper.server.in_sync or frozenset()
    for node in world.nodes:
        stands = node.alive and node.frozen_until <= now and node.store_id in in_sync
        if not stands or node.leadership.leader_address() not in {leader.name, ""}:
            return False
    live = {x.learner_id for x in leader.engine.core.state.roster.live()}
    return all(x.learner_id in live and x.frozen_until <= now for x in world.learners)


def is_quiet(world: World) -> bool:
    """Whether nothing is on its way any more: all copies are equal."""
    leader = leader_of(world)
    if leader is None or leader.engine is None or leader.engine.replicas.core.lag:
        return False
    if any(round_.state not in _WAITING for round_ in leader.engine.core.state.rounds):
        return False
    versions = leader.engine.updates.versions()
    tip = world.oracle.tip_of(leader)
    stores = all(world.oracle.tip_of(node) == tip for node in world.nodes)
    held = [tuple(v for _, (v, _) in sorted(x.held.items())) for x in world.learners]
    return stores and all(x == versions for x in held)


_WAITING = frozenset({"collecting", "grace", "suspended", "merged"})


def check_end(world: World) -> Outcome:
    """Checks the end of a world; returns what became of it."""
    leader = leader_of(world)
    assert leader is not None, world.describe()
    engine, oracle = leader.engine, world.oracle
    assert engine is not None, "leads"
    tip = oracle.tip_of(leader)
    on_line = {
        (p, version)
        for _, entry in oracle.lineages.line(tip)
        for p, version in enumerate(entry.record.versions)
    }
    lost = oracle.seen_versions - on_line
    assert not lost or not world.is_strict, f"published and lost: {lost}"
    num_steps = oracle.lineages.check_work(tip)
    assert num_steps > 0, "nothing was merged"
    for learner in world.learners:
        for fragment, (version, vector) in learner.held.items():
            copy = engine.updates.published(fragment)
            assert vector.equal(copy), f"{learner.name} holds another {version}"
    for node in world.nodes:
        if node is not leader:
            assert node.leadership.core.why_waiting, f"{node.name} waits without a reason"
    lost_errors = [task for task in world.kernel.unheard if task.is_lost]
    assert not lost_errors, f"failed, and nobody asked: {lost_errors}"
    assert engine.core.waits(world.kernel.now), "nobody trains, and nothing waits"
    states = [_stored(node) for node in world.nodes]
    assert all(state == states[0] for state in states), "stores differ"
    return outcome_of(world, rounds_lost=len(lost))


def outcome_of(world: World, *, rounds_lost: int) -> Outcome:
    """What became of a world."""
    from diloco_fleet.simulation.world import Outcome

    oracle, leader = world.oracle, leader_of(world)
    engine = None if leader is None else leader.engine
    return Outcome(
        seed=world.seed,
        profile=world.profile,
        replication=world.settings.replication,
        num_rounds=oracle.num_rounds_published,
        rounds_lost=rounds_lost,
        num_terms=world.tally["terms"],
        participation=0.0 if engine is None else engine.ledger.participation,
        measured_h=0.0
        if engine is None
        else engine.ledger.measured_h / world.settings.sync_interval,
        longest_gap_s=oracle.longest_gap_s,
        tally=world.tally,
    )


def _stored(node: Node) -> list[bytes]:
    loaded = node.store.load()
    assert loaded is not None, f"the store of {node.name} is empty"
    return [fingerprint(state) for _, state in sorted(loaded[1].items())]
