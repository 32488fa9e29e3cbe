"""What conducts a scenario: when it strikes whom, what counts as recovered, when it ends."""

from __future__ import annotations

import math

import pytest

from diloco_fleet.chaos.conductor import Action, Arm, Begin, Heal, Phase
from diloco_fleet.chaos.scenario import AbortWhen, Fault, FaultKind
from tests.fleet.chaos_play import conducted, dies, freeze, kill, over, play
from tests.fleet.chaos_world import UNKNOWN, World


def test_nothing_happens_before_everybody_has_contributed_and_a_standby_is_in_sync() -> None:
    world = World(in_sync=False)
    conductor = conducted(world, kill())
    for _ in range(20):
        assert not conductor.handle(world.sample())
        world.sleep(0.5)
    assert conductor.phase is Phase.STEADYING
    world.in_sync = True
    conductor.handle(world.sample())
    assert conductor.phase is Phase.STRIKING


def test_a_fleet_that_does_not_become_steady_is_not_struck_and_the_reason_is_named() -> None:
    world = World(away={"learner-2": 1e9})
    conductor = conducted(world, kill())
    assert play(conductor, world, over(conductor)) == []
    assert "learner-2 did not contribute" in conductor.stopped


def test_what_was_started_again_before_the_steady_state_is_no_crash() -> None:
    world = World(away={"learner-2": 1e9}, restarts={"learner-0": 4})
    conductor = conducted(world, kill())
    play(conductor, world, over(conductor))
    assert conductor.restarts == conductor.crashes == {}


def test_what_is_awaited_is_told() -> None:
    world = World(in_sync=False)
    conductor = conducted(world, kill())
    assert not conductor.awaited
    play(conductor, world, lambda: conductor.awaited == "no standby is in sync")
    world.in_sync = True
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    assert not conductor.awaited
    play(conductor, world, lambda: conductor.phase is Phase.SETTLING, dies(world, 60.0))
    assert conductor.awaited == "not as before since: kill learner-1"


def test_a_killed_learner_has_recovered_when_its_next_life_contributes() -> None:
    """What its last life pushed and is counted late does not count."""
    world = World()
    conductor = conducted(world, kill())
    play(conductor, world, over(conductor), dies(world, 6.0))
    [record] = conductor.records
    assert record.began_s is not None
    assert record.recovered_s is not None
    assert record.recovered_s >= record.began_s + 6.0
    assert record.merging_s is not None
    assert record.merging_s < record.recovered_s, "the others merged on"


def test_a_leader_that_was_killed_is_replaced_in_a_later_term() -> None:
    """Rounds that its own term still shows do not count; nor does a fleet without a standby."""
    world = World()
    conductor = conducted(world, kill("the leader"))

    def act(action: Action) -> None:
        if isinstance(action, Begin):
            assert action.groups == (("synchronizer-0",),)
            world.in_sync = False

    play(conductor, world, lambda: conductor.records[0].began_s is not None, act)
    record = conductor.records[0]
    for _ in range(10):
        world.sleep(0.5)
        conductor.handle(world.sample())
    assert record.merging_s is None, "the old term merges on as far as is seen"
    world.term, world.leader = 2, "synchronizer-1"
    world.accepted = dict.fromkeys(world.accepted, 0)
    play(conductor, world, lambda: record.merging_s is not None)
    assert record.recovered_s is None, "no standby is in sync"
    world.in_sync = True
    play(conductor, world, over(conductor))
    assert record.recovered_s is not None


def test_a_leader_that_goes_on_leading_is_as_before_in_its_own_term() -> None:
    """Standing still, or a clock that is wrong, need not depose anybody."""
    world = World()
    conductor = conducted(world, freeze("the leader"))
    play(conductor, world, over(conductor))
    assert conductor.records[0].targets == (("synchronizer-0",),)
    assert conductor.records[0].recovered_s is not None


def test_what_lasts_is_healed_in_time_and_recovers_after_that() -> None:
    world = World()
    conductor = conducted(world, freeze())

    def act(action: Action) -> None:
        world.away = {"learner-1": 1e9} if isinstance(action, Begin) else {}

    done = play(conductor, world, over(conductor), act)
    assert [type(action) for action in done] == [Begin, Heal]
    [record] = conductor.records
    assert record.began_s is not None
    assert record.healed_s == pytest.approx(record.began_s + 4.0, abs=1.0)
    assert record.recovered_s is not None
    assert record.recovered_s > record.healed_s


def test_what_lasts_beyond_the_end_is_healed_at_the_end() -> None:
    world = World()
    conductor = conducted(world, freeze(at_s=25.0, duration_s=500.0))
    done = play(conductor, world, over(conductor))
    assert [type(action) for action in done] == [Begin, Heal]
    assert conductor.records[0].healed_s == pytest.approx(30.0, abs=1.0)


def test_stopping_heals_everything_at_once() -> None:
    world = World()
    conductor = conducted(world, freeze("learner-0", duration_s=500.0), freeze(duration_s=500.0))
    play(conductor, world, lambda: all(x.began_s is not None for x in conductor.records))
    assert sorted(x.number for x in conductor.stop("asked")) == [0, 1]
    assert conductor.phase is Phase.OVER
    assert conductor.handle(world.sample()) == []


def test_a_random_target_is_never_one_that_is_struck_already() -> None:
    world = World()
    faults = [freeze("random learner", at_s=2.0 + i, duration_s=20.0) for i in range(3)]
    conductor = conducted(world, *faults)
    done = play(conductor, world, over(conductor))
    struck = [name for x in done if isinstance(x, Begin) for name in x.groups[0]]
    assert sorted(struck) == ["learner-0", "learner-1", "learner-2"]


def test_learners_are_spared_until_others_are_back() -> None:
    world = World()
    faults = [
        Fault(
            fault=FaultKind.FREEZE, who="random learner", at_s=(2.0 + i,), duration_s=8.0, spare=2
        )
        for i in range(2)
    ]
    conductor = conducted(world, *faults)
    play(conductor, world, over(conductor))
    first, second = conductor.records
    assert "are to be spared" in second.held
    assert first.recovered_s is not None
    assert second.began_s is not None
    assert second.began_s >= first.recovered_s


def test_a_second_fault_of_synchronizers_waits_until_the_first_is_over() -> None:
    world = World()
    conductor = conducted(world, kill("the leader", 2.0), kill("the leader", 3.0))

    def act(action: Action) -> None:
        if isinstance(action, Begin):
            world.in_sync, world.term = False, world.term + 1
            world.leader = "synchronizer-1"
            world.accepted = dict.fromkeys(world.accepted, 0)

    play(conductor, world, lambda: conductor.records[0].merging_s is not None, act)
    assert conductor.records[1].began_s is None
    assert "no standby is in sync" in conductor.records[1].held
    world.in_sync = True
    play(conductor, world, lambda: conductor.records[1].began_s is not None, act)
    assert conductor.records[0].recovered_s is not None
    assert conductor.records[1].targets == (("synchronizer-1",),)


def test_a_partition_cuts_the_first_group_off_from_the_rest() -> None:
    world = World()
    cut = Fault(
        fault=FaultKind.PARTITION,
        between=("the follower, learner-2", "rest"),
        at_s=(2.0,),
        duration_s=5.0,
    )
    conductor = conducted(world, cut)
    done = play(conductor, world, over(conductor))
    [begin] = [action for action in done if isinstance(action, Begin)]
    assert begin.groups == (
        ("synchronizer-1", "learner-2"),
        ("evaluator", "learner-0", "learner-1", "redis", "synchronizer-0"),
    )


def test_an_event_sets_off_what_waits_for_it() -> None:
    world = World()
    after = Fault(fault=FaultKind.KILL, who="learner-0", on="leader-change")
    conductor = conducted(world, after)
    play(conductor, world, lambda: world.global_step > 20)
    assert conductor.records[0].began_s is None
    world.term, world.accepted = 2, dict.fromkeys(world.accepted, 0)
    done = play(conductor, world, lambda: conductor.records[0].began_s is not None)
    assert [type(action) for action in done] == [Begin]


def test_a_point_of_the_protocol_is_armed_once_and_struck_when_somebody_gets_there() -> None:
    world = World()
    donor = Fault(fault=FaultKind.KILL, who="the donor", on="mid_recovery", first_s=1.0)
    conductor = conducted(world, donor)
    done = play(conductor, world, lambda: world.global_step > 20)
    [arm] = done
    assert isinstance(arm, Arm)
    assert arm.process == "learner-*"
    world.struck[0], world.dead["learner-2"] = "learner-2", world.now_s + 2.0
    play(conductor, world, over(conductor))
    [record] = conductor.records
    assert record.targets == (("learner-2",),)
    assert record.recovered_s is not None


def test_a_standstill_aborts_and_heals() -> None:
    from diloco_fleet.chaos.scenario import AbortWhen

    world = World()
    conductor = conducted(
        world, freeze(duration_s=500.0), abort=AbortWhen(without_merging_s=5.0), duration_s=100.0
    )

    def act(_: Action) -> None:
        world.merging = False

    done = play(conductor, world, over(conductor), act)
    assert "stood still" in conductor.stopped
    assert [type(action) for action in done] == [Begin, Heal]


def test_nobody_is_struck_where_it_is_given_up_at_once() -> None:
    world = World()
    conductor = conducted(world, kill(at_s=0.0), abort=AbortWhen(learners_below=4))
    assert play(conductor, world, over(conductor)) == []
    assert conductor.stopped == "3 learners are running"
    assert conductor.records[0].began_s is None


def test_a_fleet_that_ends_is_noticed() -> None:
    world = World()
    conductor = conducted(world, kill())
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.ended = "run failed"
    conductor.handle(world.sample())
    assert conductor.phase is Phase.OVER
    assert "run failed" in conductor.stopped


def test_who_is_given_up_without_being_struck_is_counted() -> None:
    """A learner with a slow link has to stay; one that was frozen may go."""
    world = World()
    slow = Fault(
        fault=FaultKind.BANDWIDTH, who="learner-0", mbit_per_s=10, at_s=(2.0,), duration_s=5.0
    )
    conductor = conducted(world, slow, freeze())

    def act(action: Action) -> None:
        if isinstance(action, Begin):
            world.states[action.groups[0][0]] = "gone"

    play(conductor, world, over(conductor), act)
    assert conductor.expired == {"learner-0"}


def test_a_process_that_ends_by_itself_is_a_crash_and_one_that_was_killed_is_none() -> None:
    world = World(restarts={"synchronizer-1": 4})
    conductor = conducted(world, kill())
    play(conductor, world, lambda: conductor.records[0].began_s is not None, dies(world, 2.0))
    world.dead["synchronizer-1"] = world.now_s + 1.0
    play(conductor, world, over(conductor))
    assert world.restarts == {"learner-1": 1, "synchronizer-1": 5}
    assert conductor.crashes == {"synchronizer-1": 1}


def test_the_longest_standstill_is_measured_from_the_steady_state_on() -> None:
    world = World()
    conductor = conducted(world, kill())
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.merging = False
    start_s = world.now_s
    play(conductor, world, lambda: world.now_s > start_s + 6.0)
    world.merging = True
    play(conductor, world, over(conductor))
    assert conductor.longest_without_merging_s == pytest.approx(6.5, abs=1.5)


def test_who_ends_for_good_is_a_crash_though_nobody_starts_it_again() -> None:
    world = World()
    conductor = conducted(world, kill())
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.dead["learner-2"] = 1e9
    play(conductor, world, over(conductor), dies(world, 2.0))
    assert conductor.crashes == {"learner-2": 1}


def test_forgetting_everything_excuses_no_crash_of_redis() -> None:
    world = World()
    conductor = conducted(world, Fault(fault=FaultKind.REDIS_EMPTY, at_s=(2.0,)))
    play(conductor, world, lambda: conductor.records[0].began_s is not None)
    world.dead["redis"] = world.now_s + 2.0
    play(conductor, world, over(conductor))
    assert conductor.crashes == {"redis": 1}


@pytest.mark.parametrize(
    ("between", "expired"), [("the leader", set()), ("the follower", {"learner-0"})]
)
def test_who_is_cut_off_from_who_leads_may_be_given_up(between: str, expired: set[str]) -> None:
    """On whichever side of the partition it is; whoever still hears the leader may not."""
    world = World()
    cut = Fault(fault=FaultKind.PARTITION, between=(between, "rest"), at_s=(2.0,), duration_s=5.0)
    conductor = conducted(world, cut)

    def act(action: Action) -> None:
        world.states["learner-0"] = "gone" if isinstance(action, Begin) else "live"

    play(conductor, world, over(conductor), act)
    assert conductor.expired == expired


@pytest.mark.parametrize("state", ["live", "disconnected"])
def test_who_is_silent_without_being_struck_is_measured(state: str) -> None:
    """Also where its connection broke: that it comes back later makes it no less silent."""
    world = World()
    conductor = conducted(world, freeze())
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.states["learner-2"], world.silent_s = state, {"learner-2": 7.0, "learner-1": 9.0}
    play(conductor, world, lambda: conductor.records[0].began_s is not None)
    world.silent_s["learner-1"] = 99.0
    play(conductor, world, over(conductor))
    assert conductor.longest_silence_s == pytest.approx(9.0)


@pytest.mark.parametrize("state", ["expected", "disconnected", "gone", UNKNOWN])
def test_a_learner_that_is_not_live_just_when_it_is_struck_has_to_come_back_too(state: str) -> None:
    """A leader that has just taken over has not heard of everybody yet."""
    world = World()
    conductor = conducted(world, kill("learner-1", at_s=2.0), duration_s=4.0)

    def act(action: Action) -> None:
        world.away["learner-1"] = math.inf

    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.states["learner-1"] = state
    play(conductor, world, over(conductor), act)
    [record] = conductor.records
    assert record.began_s is not None
    assert record.merging_s is not None
    assert record.recovered_s is None, "it is left out for ever"


@pytest.mark.parametrize("state", ["left", "drained"])
def test_who_has_left_for_good_is_not_waited_for(state: str) -> None:
    world = World()
    conductor = conducted(world, freeze("learner-1"), duration_s=8.0)
    play(conductor, world, lambda: conductor.phase is Phase.STRIKING)
    world.states["learner-1"], world.away["learner-1"] = state, math.inf
    play(conductor, world, over(conductor))
    assert conductor.records[0].recovered_s is not None


@pytest.mark.parametrize(("between", "recovers"), [("the leader", False), ("the follower", True)])
def test_who_was_cut_off_from_who_led_has_to_contribute_again(
    between: str, *, recovers: bool
) -> None:
    """A side of a partition is cut off whichever of the two is named first."""
    world = World()
    cut = Fault(fault=FaultKind.PARTITION, between=(between, "rest"), at_s=(2.0,), duration_s=3.0)
    conductor = conducted(world, cut, duration_s=8.0)

    def act(action: Action) -> None:
        world.away["learner-0"] = math.inf

    play(conductor, world, over(conductor), act)
    assert (conductor.records[0].recovered_s is not None) == recovers
