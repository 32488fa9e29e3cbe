"""A learner that is left out trains on, says so once, and shows it."""

from __future__ import annotations

import logging

import pytest
from learner_kit import NAME, make_learner, make_model, make_settings, train
from scripted_synchronizer import ScriptedSynchronizer, until

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2
from learner_client import State
from learner_client.core.retry import is_fatal


@pytest.mark.asyncio
async def test_being_left_out_is_said_once_shown_and_over_when_it_is_over(caplog):
    caplog.set_level(logging.INFO, logger="learner_client")
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        learner.step(num_tokens=1)
        await until(lambda: service.steps)
        told = synchronizer_pb2.Quarantine(reason="NON_FINITE was the last of 5", seconds=10.0)
        for _ in range(3):
            service.say(NAME, quarantine=told)
        await until(lambda: learner.status.reason == "QUARANTINED")
        assert "training on: NON_FINITE was the last of 5" in learner.status.detail
        assert learner.status.online
        assert learner.status.state is State.TRAINING
        train(model)
        learner.step(num_tokens=1)
        await until(lambda: len(service.steps) == 2)
        service.say(NAME, quarantine=synchronizer_pb2.Quarantine())
        await until(lambda: not learner.status.reason)
        warnings = [r for r in caplog.records if "QUARANTINED" in r.getMessage()]
        assert len(warnings) == 1
        assert warnings[0].levelno == logging.WARNING


@pytest.mark.asyncio
async def test_a_join_after_the_first_names_the_run_so_that_a_lost_store_is_noticed():
    service = ScriptedSynchronizer(make_settings(run_id="amber"))
    async with make_learner(service, make_model()) as learner:
        learner.step(num_tokens=1)
        service.restart()
        await until(lambda: len(service.joins) == 2)
        first, again = service.joins
        assert (first.run_id, again.run_id) == ("", "amber")
        assert again.held


def test_a_learner_outlives_a_synchronizer_that_lost_its_store():
    assert not is_fatal(DilocoError(Reason.STORE_LOST, "empty"))
    assert is_fatal(DilocoError(Reason.RUN_MISMATCH, "another run"))
