"""Joining, being cut off, coming back, being fenced, ending."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch
from learner_kit import NAME, local_vector, make_learner, make_model, make_settings, train
from scripted_synchronizer import ScriptedSynchronizer, until
from torch import nn

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2
from learner_client import State


@pytest.mark.asyncio
async def test_training_goes_on_while_the_synchronizer_is_away_and_it_is_said_once(caplog):
    caplog.set_level(logging.INFO, logger="learner_client")
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        learner.step(num_tokens=1)
        await until(lambda: len(service.steps) == 1)
        service.go_away()
        await until(lambda: not learner.status.online)
        caplog.clear()
        for _ in range(5):
            train(model)
            learner.step(num_tokens=3, loss=2.0)
            await asyncio.sleep(0)
        assert learner.local_step == 6
        assert learner.status.state is State.TRAINING
        assert not caplog.records, "being away is said once"
        service.come_back()
        await until(lambda: learner.status.online and len(service.steps) == 2)
        assert sum("online" in record.message for record in caplog.records) == 1
        merged = service.steps[1]
        assert (merged.num_steps, merged.num_tokens, merged.loss) == (5, 15, 2.0)
        assert merged.clock.own_step == 6
        assert len(service.joins) == 1, "the incarnation is kept, so that no successor is fenced"
        assert all(len(watch.held) == 4 for watch in service.watches[1:]), "nothing comes twice"


@pytest.mark.asyncio
async def test_after_a_restart_of_the_synchronizer_the_same_process_joins_again_and_contributes():
    service = ScriptedSynchronizer(make_settings(codec_up="fp32"))
    model = make_model()
    async with make_learner(service, model) as learner:
        train(model)
        learner.step(num_tokens=1)
        base = service.published[1][1]
        service.restart()
        await until(lambda: len(service.joins) == 2 and learner.status.online)
        first, again = service.joins
        assert again.request_id == first.request_id
        assert (again.previous_incarnation.term, again.previous_incarnation.number) == (1, 1)
        assert [item.fragment for item in again.held] == [0, 1, 2, 3]
        assert again.clock.own_step == 1
        assert again.claim.term == 1
        await until(lambda: len(service.watches) == 2)
        assert len(service.watches[1].held) == 4, "nothing comes twice"
        learner.step(num_tokens=1)
        expected = base - local_vector(learner, 1)
        await until(lambda: service._down)
        service.pull(NAME, 1, 1)
        await until(lambda: service.pushes)
        assert torch.equal(service.pushes[0].vector, expected)
        assert service.pushes[0].header.incarnation.term == 2
        assert service.pushes[0].header.num_steps == 2
        assert learner.local_step == 2


@pytest.mark.asyncio
async def test_what_was_missed_while_away_comes_with_the_watch():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        service.go_away()
        await until(lambda: not learner.status.online)
        published = service.publish(3, 3, torch.ones(service.published[3][1].numel()))
        service.come_back()
        await until(lambda: learner.status.num_updates == 5)
        learner.step(num_tokens=1)
        assert torch.equal(local_vector(learner, 3), published)
        assert learner.global_step == 3


@pytest.mark.asyncio
async def test_fenced_is_raised_at_the_next_boundary_and_nothing_is_said_to_the_successor():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()

    async def loop() -> None:
        async with make_learner(service, model) as learner:
            service.refuse_join = DilocoError(Reason.FENCED, "another process joined as learner-0")
            train(model)
            learner.step(num_tokens=1)
            service.answer_pushes_with = Reason.UNKNOWN_LEARNER
            service.pull(NAME, 1, 1)
            await until(lambda: learner.status.state is State.FENCED)
            learner.step(num_tokens=1)

    with pytest.raises(DilocoError) as caught:
        await loop()
    assert caught.value.reason is Reason.FENCED
    assert not service.leaves


@pytest.mark.asyncio
async def test_a_refused_join_is_raised_as_the_synchronizer_says_it():
    service = ScriptedSynchronizer(make_settings())
    service.refuse_join = DilocoError(Reason.LAYOUT_MISMATCH, "tensor 'x' has shape 1", tensor="x")
    with pytest.raises(DilocoError, match="tensor 'x' has shape 1") as caught:
        async with make_learner(service, make_model()):
            pass
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert caught.value.details["tensor"] == "x"


@pytest.mark.asyncio
async def test_another_layout_than_the_runs_is_refused():
    service = ScriptedSynchronizer(make_settings())
    async with make_learner(service, make_model()):
        pass
    with pytest.raises(DilocoError, match="fingerprint") as caught:
        async with make_learner(service, nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))):
            pass
    assert caught.value.reason is Reason.LAYOUT_MISMATCH


@pytest.mark.asyncio
async def test_joining_waits_for_a_synchronizer_that_starts_later_and_gives_up_with_a_reason():
    service = ScriptedSynchronizer(make_settings(), is_away=True)
    with pytest.raises(DilocoError, match="away") as caught:
        async with make_learner(service, make_model(), join_timeout_s=0.05):
            pass
    assert caught.value.reason is Reason.UNAVAILABLE
    late = make_learner(service, make_model())
    entering = asyncio.create_task(late.__aenter__())
    await until(lambda: late.status.reason == "UNAVAILABLE")
    service.come_back()
    await entering
    assert late.status.state is State.TRAINING
    await late.aclose()


@pytest.mark.asyncio
async def test_drain_and_stop_are_seen_by_the_loop():
    service = ScriptedSynchronizer(make_settings())
    async with make_learner(service, make_model()) as learner:
        await until(lambda: NAME in service._down)
        assert not learner.draining
        service.say(NAME, drain=synchronizer_pb2.Drain(reason="maintenance"))
        await until(lambda: learner.draining)
        assert not learner.finished
        service.say(NAME, stop=synchronizer_pb2.Stop(global_step=8, reason="all steps are done"))
        await until(lambda: learner.finished)
        learner.step(num_tokens=1)
    assert learner.finished, "leaving does not undo it"


@pytest.mark.asyncio
async def test_a_run_that_is_over_lets_a_learner_in_to_see_that():
    service = ScriptedSynchronizer(make_settings(total_global_steps=2))
    async with make_learner(service, make_model()):
        service.publish(2, 2, torch.ones(service.published[2][1].numel()))
    async with make_learner(service, make_model(), learner_id="late") as late:
        assert late.finished
        assert late.global_step == 2


@pytest.mark.asyncio
async def test_the_last_global_step_finishes_the_loop_by_itself():
    service = ScriptedSynchronizer(make_settings(total_global_steps=2))
    async with make_learner(service, make_model()) as learner:
        service.publish(2, 2, torch.ones(service.published[2][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        assert not learner.finished
        learner.step(num_tokens=1)
        assert learner.finished


@pytest.mark.asyncio
async def test_reports_say_versions_steps_and_durations():
    service = ScriptedSynchronizer(make_settings())
    async with make_learner(service, make_model()) as learner:
        service.publish(1, 1, torch.ones(service.published[1][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        learner.step(num_tokens=9, loss=1.5)
        await until(lambda: service.steps)
        step = service.steps[0]
        assert list(step.clock.known_global_steps) == [0, 1, 0, 0]
        assert (step.clock.sender, step.clock.own_step, step.clock.term) == (NAME, 1, 1)
        assert (step.num_steps, step.num_tokens, step.loss) == (1, 9, 1.5)
        assert step.step_seconds >= step.overhead_seconds > 0
        overhead = learner.overhead
        assert overhead.num_steps == 1
        assert 0 < overhead.median_s <= overhead.p99_s
        assert 0 < overhead.share <= 1


def test_in_a_thread_of_its_own_step_never_waits_and_exceptions_of_the_loop_propagate():
    service = ScriptedSynchronizer(make_settings(heartbeat_interval_s=0.02))
    model = make_model()

    def loop() -> None:
        with make_learner(service, model, runtime=None) as learner:
            for _ in range(20):
                train(model)
                learner.step(num_tokens=1)
            asyncio.run(until(lambda: sum(s.num_steps for s in service.steps) == 20))
            asyncio.run(until(lambda: service.heartbeats > 0))
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        loop()
    assert service.leaves[0].reason == "the training loop raised ZeroDivisionError"
