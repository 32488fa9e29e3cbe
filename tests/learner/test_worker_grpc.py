"""The same over real gRPC on the loopback interface."""

from __future__ import annotations

import pytest
import torch
from served_synchronizer import served
from torch import nn

from decoupled_diloco.codecs import CHUNK_BYTES
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import RunSettings
from learner_client import Learner, State, wait_for_settings

NAME = "learner-0"


def make_model(width: int = 8) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def test_a_learner_trains_over_two_connections_of_its_own():
    """More than 1 MiB per fragment: several chunks each way, and the bits are the same."""
    model = make_model(700)
    with served() as running:
        service = running.service
        assert wait_for_settings(running.address, timeout_s=20) == RunSettings(
            num_fragments=3, overlap=1, codec_up="fp32", push_floor_s=1.0
        )
        with Learner(model, address=running.address, learner_id=NAME) as learner:
            layout = learner._exchange.layout
            out = torch.empty(layout.fragments[1].num_elements)
            learner._parameters.read_fragment(layout.fragments[1], out)
            base = out.clone()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.125)
            learner.step(num_tokens=4, loss=3.0)
            learner._parameters.read_fragment(layout.fragments[1], out)
            running.wait(lambda: service.steps)
            service.push_offsets.clear()
            service.cut_push_at = 1
            running.do(lambda: service.pull(NAME, 1, 1))
            running.wait(lambda: service.pushes)
            assert service.push_offsets == [0, 0, CHUNK_BYTES], "resumed where it was staged"
            assert torch.equal(service.pushes[0].vector, base - out)
            running.do(lambda: service.publish(1, 1, torch.randn(out.numel())))
            running.wait(lambda: learner.status.num_updates == 4)
            learner.step(num_tokens=4)
            learner._parameters.read_fragment(layout.fragments[1], out)
            assert torch.equal(out, service.published[1][1])
            assert learner.status.bytes_down > 0
        sockets = {wire.split(" ", 1)[0]: wire.split(" ", 1)[1] for wire in service.wires}
        assert sockets["report"] != sockets["watch"]
        assert sockets["push"] == sockets["watch"]
        assert [leave.reason for leave in service.leaves] == ["done"]


def test_the_connection_comes_back_after_an_outage():
    with served(heartbeat_interval_s=0.05) as running:
        service = running.service
        with Learner(make_model(), address=running.address, learner_id=NAME) as learner:
            running.away()
            running.wait(lambda: not learner.status.online)
            learner.step(num_tokens=1)
            learner.step(num_tokens=1)
            assert learner.status.state is State.TRAINING
            running.back()
            running.wait(lambda: sum(step.num_steps for step in service.steps) == 2)
            running.wait(lambda: learner.status.online)
            running.wait(lambda: service.heartbeats > 1)


def test_a_refusal_arrives_with_reason_message_and_details():
    with served() as running:
        running.service.refuse_join = DilocoError(
            Reason.NO_SHARD_LEFT, "4 learners are planned; raise num_learners", learner="x"
        )
        with (
            pytest.raises(DilocoError, match="raise num_learners") as caught,
            Learner(make_model(), address=running.address, learner_id=NAME),
        ):
            pass
        assert caught.value.reason is Reason.NO_SHARD_LEFT
        assert caught.value.details["learner"] == "x"


def test_nobody_there_is_unavailable_and_says_so():
    with pytest.raises(DilocoError) as caught:
        wait_for_settings("127.0.0.1:1", timeout_s=0.5)
    assert caught.value.reason is Reason.UNAVAILABLE
    with (
        pytest.raises(DilocoError, match="check address") as caught,
        Learner(make_model(), address="127.0.0.1:1", learner_id=NAME, join_timeout_s=0.5),
    ):
        pass
    assert caught.value.reason is Reason.UNAVAILABLE
