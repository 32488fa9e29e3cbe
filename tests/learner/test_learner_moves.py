"""Several synchronizers: learners go to the one that leads, and stay where that is."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
import torch
from learner_kit import NAME, local_vector, make_settings, train
from move_world import A, B, C, World, no_leader, virtual
from scripted_synchronizer import ScriptedSynchronizer, until

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2, types_pb2
from learner_client import Runtime, State
from learner_client.core.leadership import MAX_LEARNT

# -- the leader is gone --------------------------------------------------------------------


@virtual
async def test_a_learner_moves_when_its_leader_dies_and_loses_nothing(caplog):
    caplog.set_level(logging.INFO, logger="learner_client")
    world = World()
    old = world.at[A]
    async with world.learner() as learner:
        assert (learner.status.address, learner.status.term) == (A, 1)
        old.publish(1, 1, torch.ones(old.published[1][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        train(world.model)
        learner.step(num_tokens=7)
        base = old.published[1][1]
        old.go_away()
        await until(lambda: not learner.status.online)
        learner.step(num_tokens=7)
        new = world.take_over(B, term=2)
        await until(lambda: new.joins and learner.status.online)
        assert (learner.status.address, learner.status.term) == (B, 2)
        join = new.joins[0]
        assert join.request_id == old.joins[0].request_id
        assert join.previous_incarnation.term == 1
        assert (join.claim.term, join.claim.signature) == (2, b"as the test says")
        assert join.clock.own_step == 2
        await until(lambda: new.watches)
        assert len(new.watches[0].held) == 4, "what is held is not sent again"
        train(world.model)
        learner.step(num_tokens=7)
        expected = base - local_vector(learner, 1)
        await until(lambda: NAME in new._down)
        new.pull(NAME, 2, 1)
        await until(lambda: new.pushes)
        assert torch.equal(new.pushes[0].vector, expected)
        assert new.pushes[0].header.num_steps == 2, "counted since the last update, over the move"
        assert learner.local_step == 3
        assert world.open == 1, "connections that were left are closed"
    assert [(m.left, m.address, m.term) for m in world.moves] == [(A, B, 2)]
    assert world.moves[0].why.startswith("UNAVAILABLE"), "why it was left"
    assert sum("moves from" in record.message for record in caplog.records) == 1
    assert world.open == 0


@virtual
async def test_versions_of_a_lineage_that_was_given_up_are_replaced_after_a_move():
    world = World()
    old = world.at[A]
    async with world.learner() as learner:
        kept = dict(old.published)
        lost = old.publish(1, 5, torch.ones(old.published[1][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        learner.step(num_tokens=1)
        assert torch.equal(local_vector(learner, 1), lost)
        old.go_away()
        new = world.take_over(B, term=2)
        new.published = kept
        await until(lambda: learner.status.num_updates == 6)
        learner.step(num_tokens=1)
        assert torch.equal(local_vector(learner, 1), kept[1][1])


@virtual
async def test_with_all_down_it_trains_on_says_so_once_and_comes_back(caplog):
    caplog.set_level(logging.INFO, logger="learner_client")
    world = World()
    async with world.learner() as learner:
        caplog.clear()
        for service in world.at.values():
            service.go_away()
        await until(lambda: not learner.status.online)
        await asyncio.sleep(5)
        asked = world.at[B].asked
        inside_s = 0.0
        for _ in range(50):
            began = time.perf_counter()
            learner.step(num_tokens=1)
            inside_s = max(inside_s, time.perf_counter() - began)
            await asyncio.sleep(10)
        assert inside_s < 1.0, "no step waits, though each came 10 s of the world's after the other"
        assert world.at[B].asked > asked + 50, "it goes on asking"
        lost, waits = (record.message for record in caplog.records)
        assert "offline, UNAVAILABLE" in lost
        assert f"{A} UNAVAILABLE, {B} UNAVAILABLE" in waits, "said once: what is waited for"
        assert learner.status.state is State.TRAINING
        world.at[A].come_back()
        await until(lambda: sum(s.num_steps for s in world.at[A].steps) == 50)
        await until(lambda: learner.status.online)
        assert len(world.at[A].joins) == 1, "the same leader goes on with the same incarnation"
    assert not world.moves


@virtual
async def test_a_new_leader_is_found_soon_even_after_a_long_time_without_one():
    world = World()
    async with world.learner() as learner:
        world.at[A].go_away()
        await asyncio.sleep(600)
        new = world.take_over(B, term=2)
        began = asyncio.get_running_loop().time()
        await until(lambda: new.joins and learner.status.online)
        assert asyncio.get_running_loop().time() - began < 1.0


@virtual
async def test_one_that_does_not_answer_holds_nobody_up_and_leaves_nothing_open():
    world = World(3)
    async with world.learner(address=[A, B, C]) as learner:
        world.at[B].is_frozen = True
        world.at[A].go_away()
        new = world.take_over(C, term=2)
        began = asyncio.get_running_loop().time()
        await until(lambda: new.joins and learner.status.online)
        assert asyncio.get_running_loop().time() - began < 1.5
        new.go_away()
        await asyncio.sleep(2)
    assert world.open == 0, "left in the middle of asking"


# -- NOT_LEADING ---------------------------------------------------------------------------


@pytest.mark.parametrize("rpc", ["message", "Report", "Push", "push outcome", "Watch", "Join"])
def test_whoever_says_that_it_does_not_lead_is_left_for_who_does(rpc):
    @virtual
    async def run():
        # Leases so long that nobody is asked but for what is said.
        world = World(lease_timeout_s=3600.0)
        old = world.at[A]
        async with world.learner() as learner:
            train(world.model)
            learner.step(num_tokens=1)
            await until(lambda: old.steps)
            new = world.take_over(B, term=2)
            if rpc == "message":
                claim = types_pb2.LeadershipClaim(term=2, leader_id="other")
                told = synchronizer_pb2.NotLeading(claim=claim, addresses=[B])
                old.say(NAME, not_leading=told)
            elif rpc == "Push":
                old.refuses = {rpc: no_leader(2)}
                old.pull(NAME, 1, 1)
            elif rpc == "push outcome":
                old.answer_pushes_with = Reason.NOT_LEADING
                old.pull(NAME, 1, 1)
            elif rpc == "Join":
                old.refuses = {rpc: no_leader(2)}
                old.restart()
            else:
                old.refuses = {rpc: no_leader(2)}
                old.go_away()
                old.come_back()
            await until(lambda: new.joins and learner.status.online)
            assert learner.status.address == B
        assert [(m.left, m.address, m.term) for m in world.moves] == [(A, B, 2)]

    run()


@virtual
async def test_at_the_start_the_leader_is_found_wherever_it_stands_in_the_list():
    world = World()
    world.follow(world.at[A])
    world.at[B].refuses = {}
    async with world.learner() as learner:
        assert learner.status.address == B
        assert not world.at[A].joins
    assert not world.moves, "the first choice is no move"


@virtual
async def test_while_nobody_leads_joining_waits_with_a_reason():
    world = World()
    world.follow(world.at[A])
    entering = asyncio.create_task((learner := world.learner()).__aenter__())
    await until(lambda: learner.status.reason == "NOT_LEADING")
    assert A in learner.status.detail
    assert B in learner.status.detail
    world.at[B].refuses = {}
    await entering
    await learner.aclose()


# -- stale leaders -------------------------------------------------------------------------


@virtual
async def test_a_leader_that_was_cut_off_from_its_peers_is_left_and_never_gets_a_learner_back():
    world = World()
    old = world.at[A]
    async with world.learner() as learner:
        new = world.take_over(B, term=2)
        await asyncio.sleep(2.9)
        assert learner.status.address == A, "not before three lease time-outs"
        await until(lambda: learner.status.address == B and learner.status.online)
        new.go_away()
        await until(lambda: not learner.status.online)
        watched, asked = len(old.watches), old.asked
        await until(lambda: old.asked > asked + 20)
        assert learner.status.address == B
        assert len(old.watches) == watched, "it leads an earlier term: not obeyed"
        assert "term 2" in learner.status.detail
        assert A in learner.status.detail
        assert old.joins[-1].claim.term == 2, "it is told of the later term"
        assert old.joins[-1].relays_claim, "and lets nobody in for it"
        new.come_back()
        await until(lambda: learner.status.online)
    assert len(world.moves) == 1


@virtual
async def test_a_single_synchronizer_that_comes_back_with_an_earlier_term_is_not_obeyed():
    world = World(1)
    service = world.at[A]
    service.term = 5
    async with world.learner() as learner:
        service.term = 3
        service.restart()
        await until(lambda: len(service.joins) > 5)
        assert learner.status.term == 5
        assert "term 4" in learner.status.detail
        assert "term 5 was heard of" in learner.status.detail
        assert service.joins[-1].claim.term == 5, "but it is told, so that it can take a later one"
        service.term = 6
        await until(lambda: learner.status.online)
        assert learner.status.term == 6


@virtual
async def test_who_leads_an_earlier_term_cannot_end_a_learner():
    world = World(1)
    service = world.at[A]
    service.term = 5
    async with world.learner() as learner:
        fenced = DilocoError(Reason.FENCED, "another process took over", term=3)
        service.refuses = {"Report": fenced, "Watch": fenced, "Join": fenced}
        service.go_away()
        service.come_back()
        await until(lambda: learner.status.reason == "NOT_LEADING")
        await asyncio.sleep(30)
        learner.step(num_tokens=1)
        assert learner.status.state is State.TRAINING
        service.refuses = {}
        await until(lambda: learner.status.online)


@virtual
async def test_a_term_that_was_only_heard_of_rules_out_who_leads_an_earlier_one():
    world = World(3)
    old, new = world.at[A], world.at[C]
    async with world.learner(address=A) as learner:
        claim = types_pb2.LeadershipClaim(run_id=old.settings.run_id, term=2, leader_id="other")
        told = synchronizer_pb2.NotLeading(claim=claim, addresses=[C])
        old.say(NAME, not_leading=told)
        await until(lambda: new.asked > 20)
        assert len(old.watches) == 1, "though it says when asked that it leads"
        world.take_over(C, term=2)
        await until(lambda: new.joins and learner.status.online)


@virtual
async def test_fenced_by_the_leader_it_stops_and_joins_nowhere():
    world = World()
    async with world.learner() as learner:
        world.at[A].go_away()
        new = world.take_over(B, term=2)
        fenced = DilocoError(Reason.FENCED, "another process took over")
        new.refuses = {"Report": fenced, "Watch": fenced}
        await until(lambda: learner.status.state is State.FENCED)
        with pytest.raises(DilocoError, match="FENCED"):
            learner.step(num_tokens=1)
        await asyncio.sleep(30)
    assert not new.joins
    assert len(world.at[A].joins) == 1


@virtual
async def test_while_the_fleet_waits_for_a_quorum_learners_ask_and_stay():
    world = World()
    async with world.learner() as learner:
        await asyncio.sleep(100)
        assert world.at[B].asked >= 20, "nothing new: others are asked again and again"
        assert world.open == 1
        assert learner.status.online
        assert len(world.at[A].watches) == 1, "and the connection was never given up"
    assert not world.moves


@virtual
async def test_news_keep_a_learner_from_asking():
    world = World()
    async with world.learner() as learner:
        service, asked = world.at[A], world.at[B].asked
        for t in range(1, 30):
            service.publish(t % 4, t, torch.ones(service.published[t % 4][1].numel()))
            await asyncio.sleep(1)
            learner.step(num_tokens=1)
        assert world.at[B].asked == asked


# -- claims --------------------------------------------------------------------------------


@virtual
async def test_a_forged_claim_is_given_up_where_the_leader_refuses_it():
    world = World()
    old = world.at[A]
    async with world.learner() as learner:
        forged = types_pb2.LeadershipClaim(
            run_id=old.settings.run_id, term=99, leader_id="nobody", signature=b"forged"
        )
        old.say(NAME, not_leading=synchronizer_pb2.NotLeading(claim=forged))
        await until(lambda: not learner.status.online)
        old.refuse_join = DilocoError(Reason.BAD_CLAIM, "not signed by a synchronizer")
        await until(lambda: learner.status.online)
        learner.step(num_tokens=1)
        await until(lambda: old.steps)
    assert not world.moves


@virtual
async def test_a_claim_of_another_run_says_nothing():
    world = World()
    async with world.learner() as learner:
        other = types_pb2.LeadershipClaim(run_id="other", term=9, signature=b"x")
        world.at[A].say(NAME, not_leading=synchronizer_pb2.NotLeading(claim=other))
        await until(lambda: len(world.at[A].watches) == 2)
        await until(lambda: learner.status.online)


# -- addresses -----------------------------------------------------------------------------


@virtual
async def test_addresses_learnt_from_a_join_are_used():
    world = World(3)
    world.at[A].addresses = (A, C, "nonsense", "10.0.0.1:0")
    async with world.learner(address=A) as learner:
        world.at[A].go_away()
        new = world.take_over(C, term=2)
        await until(lambda: new.joins and learner.status.online)
        assert learner.status.address == C


@virtual
async def test_addresses_learnt_from_an_error_are_used():
    world = World(3)
    async with world.learner(address=A) as learner:
        new = world.take_over(C, term=2)
        world.follow(world.at[A], term=2, addresses=f"{C},{B},127.0.0.1:9...")
        world.at[A].go_away()
        world.at[A].come_back()
        await until(lambda: new.joins and learner.status.online)
        assert learner.status.address == C


@virtual
async def test_a_hostile_list_of_addresses_is_bounded_and_the_configured_ones_stay():
    world = World()
    for n in range(10_000):
        world.at.setdefault(f"127.0.0.1:{20_000 + n}", ScriptedSynchronizer(make_settings()))
    for address in list(world.at)[2:]:
        world.at[address].is_away = True
    world.at[A].addresses = tuple(list(world.at)[2:])
    async with world.learner(address=[A, B]) as learner:
        world.at[A].go_away()
        new = world.take_over(B, term=2)
        await until(lambda: new.joins and learner.status.online)
        assert sum(service.asked > 0 for service in world.at.values()) <= 2 + MAX_LEARNT


@pytest.mark.asyncio
async def test_without_time_and_threads_a_learner_moves_as_well():
    world = World()
    async with world.learner(runtime=Runtime.scripted(3)) as learner:
        world.at[A].go_away()
        new = world.take_over(B, term=2)
        await until(lambda: new.joins and learner.status.online)
        assert learner.status.address == B
