"""A process that wins the lease and cannot begin its term keeps nobody else from leading."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.simulation.faults import Profile
from diloco_fleet.simulation.final import is_healthy
from diloco_fleet.simulation.kernel import CrashedError, Process
from diloco_fleet.simulation.node import Node
from diloco_fleet.simulation.world import World

NEVER_S = 600.0
SEEDS = [
    world.seed
    for world in map(World, range(300))
    if world.profile is Profile.CALM and world.settings.replication == "one"
][:3]


class Fleet:
    """A calm world whose leader has died, with everybody in sync."""

    def __init__(self, seed: int, num_nodes: int) -> None:
        world = self.world = World(seed)
        world.nodes[:] = [Node(world, f"s{i}") for i in range(num_nodes)]
        self.first_to_lead: Node | None = None
        self.crashes = self.fills_disk = False
        world.faults.point = self.point  # type: ignore[method-assign]
        world.faults.disk_is_full = self.disk_is_full  # type: ignore[method-assign]
        for process in (*world.nodes, *world.learners):
            process.start()
        self.until(lambda: world.oracle.num_rounds_published >= 3 and is_healthy(world))
        (self.dead,) = [node for node in world.nodes if node.engine is not None]
        self.others = [node for node in world.nodes if node is not self.dead]

    def until(self, done: Callable[[], bool]) -> None:
        assert self.world.kernel.run(self.world.kernel.now + NEVER_S, done), self.world.describe()

    def point(self, node: Node, name: str) -> None:
        """The first process that wins the lease dies before it has begun."""
        if name == "lead" and self.first_to_lead is None and (self.crashes or self.fills_disk):
            self.first_to_lead = node
            if self.crashes:
                raise CrashedError

    def disk_is_full(self, process: Process) -> bool:
        return self.fills_disk and process is self.first_to_lead

    def goes_on(self, leader: Node) -> None:
        """Its rounds are published, and every invariant holds."""
        rounds = self.world.oracle.num_rounds_published + 3
        self.until(lambda: self.world.oracle.num_rounds_published >= rounds)
        assert leader.engine is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_another_store_in_sync_leads_where_the_winner_of_the_lease_dies_at_once(seed: int) -> None:
    """It never comes back, and leaves its claim in the keeper."""
    fleet = Fleet(seed, num_nodes=3)
    fleet.crashes = True
    fleet.dead.die()
    fleet.until(lambda: fleet.first_to_lead is not None)
    (left,) = [node for node in fleet.others if node is not fleet.first_to_lead]
    assert fleet.world.keeper.server.in_sync == {node.store_id for node in fleet.world.nodes}
    fleet.until(lambda: left.engine is not None)
    fleet.goes_on(left)
    assert fleet.world.keeper.server.in_sync == {left.store_id}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_standby_leads_as_soon_as_the_lease_of_a_dead_leader_runs_out(seed: int) -> None:
    """The leader was heard after it renewed, yet its records come no more."""
    fleet = Fleet(seed, num_nodes=2)
    world, (standby,) = fleet.world, fleet.others
    assert world.keeper.server.lease is not None
    ends_at = world.keeper.server.lease.ends_at
    fleet.dead.die()
    fleet.until(lambda: standby.engine is not None)
    assert ends_at <= world.kernel.now < ends_at + world.settings.lease_timeout_s / 4
    fleet.goes_on(standby)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_leader_of_before_leads_again_where_its_only_standby_dies_at_once(seed: int) -> None:
    fleet = Fleet(seed, num_nodes=2)
    fleet.crashes = True
    fleet.dead.die()
    fleet.until(lambda: fleet.first_to_lead is not None)
    fleet.dead.start()
    fleet.until(lambda: fleet.dead.engine is not None)
    fleet.goes_on(fleet.dead)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_has_no_room_to_begin_gives_the_lease_back_and_lets_another_lead(seed: int) -> None:
    fleet = Fleet(seed, num_nodes=3)
    world = fleet.world
    fleet.fills_disk = True
    fleet.dead.die()
    fleet.until(lambda: world.tally["cannot_lead_DISK_FULL"] > 0)
    failed_at, failed = world.kernel.now, fleet.first_to_lead
    assert failed is not None
    (left,) = [node for node in fleet.others if node is not failed]
    fleet.until(lambda: left.engine is not None)
    waited_s = world.kernel.now - failed_at
    assert waited_s < world.settings.lease_timeout_s, "the lease was given back, not run out"
    assert world.tally["cannot_lead_DISK_FULL"] == 1, "nor did the other one bid again before"
    fleet.goes_on(left)
    fleet.until(lambda: failed.store_id in (world.keeper.server.in_sync or ()))


@pytest.mark.parametrize("seed", SEEDS)
def test_who_alone_is_left_begins_once_there_is_room_and_says_why_not(seed: int) -> None:
    fleet = Fleet(seed, num_nodes=2)
    world = fleet.world
    fleet.fills_disk = True
    fleet.dead.die()
    fleet.until(lambda: world.tally["cannot_lead_DISK_FULL"] > 1)
    (left,) = fleet.others
    fleet.until(lambda: "lets another store in sync lead" in left.leadership.core.why_waiting)
    fleet.fills_disk = False
    fleet.until(lambda: left.engine is not None)
    fleet.goes_on(left)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_of_a_term_is_told_before_the_keeper_has_confirmed_who_is_in_sync(
    seed: int,
) -> None:
    """Its store has begun the term; the keeper is out of reach until the lease is over."""
    fleet = Fleet(seed, num_nodes=2)
    world = fleet.world
    (left,) = fleet.others
    begin = left.store.begin_term

    def begin_and_cut(*args: object) -> None:
        begin(*args)  # type: ignore[arg-type]
        world.network.cut(left.name, "keeper", 2 * world.settings.lease_timeout_s)

    left.store.begin_term = begin_and_cut  # type: ignore[method-assign]
    fleet.dead.die()
    served = world.tally["terms_served"]
    fleet.until(lambda: world.tally["cannot_lead_NOT_LEADING"] > 0)
    assert world.tally["terms_served"] == served
    with pytest.raises(DilocoError) as refused:
        left.leader()
    assert refused.value.reason is Reason.NOT_LEADING
    left.store.begin_term = begin  # type: ignore[method-assign]
    fleet.until(lambda: left.engine is not None)
    fleet.goes_on(left)
