"""What has to wait in a scenario: for its event, for whom it strikes, and not beyond the end."""

from __future__ import annotations

from diloco_fleet.chaos.conductor import Arm, Heal, Phase
from diloco_fleet.chaos.scenario import Fault, FaultKind
from tests.fleet.chaos_play import conducted, over, play
from tests.fleet.chaos_world import World


def test_what_had_to_wait_until_the_end_does_not_happen_any_more() -> None:
    """It would be healed at once, and would have been no fault."""
    world = World(in_sync=True)
    cut = Fault(
        fault=FaultKind.PARTITION, between=("the follower", "rest"), at_s=(2.0,), duration_s=5.0
    )
    conductor = conducted(world, cut)
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.in_sync = False
    start_s = conductor.zero_s
    play(conductor, world, lambda: world.now_s >= start_s + 29.5)
    world.in_sync = True
    world.sleep(0.5)
    assert play(conductor, world, over(conductor)) == []
    assert conductor.records[0].began_s is None


def test_what_waits_for_a_point_is_disarmed_at_the_end() -> None:
    """Who got there just before that is let go on at once."""
    world = World()
    stop = Fault(
        fault=FaultKind.FREEZE, who="learner-1", on="mid_push", duration_s=9.0, first_s=1.0
    )
    conductor = conducted(world, stop)
    done = play(conductor, world, lambda: conductor.phase is Phase.SETTLING)
    assert [type(action) for action in done] == [Arm, Heal]
    world.struck[0] = "learner-1"
    assert [type(action) for action in conductor.handle(world.sample())] == [Heal]


def test_what_has_to_wait_after_its_event_needs_no_other_one() -> None:
    world = World()
    after = Fault(fault=FaultKind.KILL, who="the leader", on="leader-change")
    conductor = conducted(world, after)
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.term, world.accepted, world.in_sync = 2, dict.fromkeys(world.accepted, 0), False
    play(conductor, world, lambda: "no standby" in conductor.records[0].held)
    world.in_sync = True
    play(conductor, world, lambda: conductor.records[0].began_s is not None)


def test_who_is_nobody_now_holds_up_the_whole_group() -> None:
    """A datacenter without its learner would be another fault than was planned."""
    world = World()
    cut = Fault(
        fault=FaultKind.PARTITION, between=("the follower, learner-1", "rest"),
        at_s=(2.0,), duration_s=5.0,
    )  # fmt: skip
    conductor = conducted(world, cut)
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.dead["learner-1"] = 1e9
    assert play(conductor, world, over(conductor)) == []
    assert "the follower, learner-1 from rest" in conductor.records[0].held
