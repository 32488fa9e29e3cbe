"""Learners that do not fit or go wrong, against a running fleet that must not notice."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from fleet_harness import Fleet, small
from safetensors.torch import load_file
from torch import nn

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc, synchronizer_pb2, synchronizer_pb2_grpc
from learner_client import Learner
from learner_client.train.setup import load_setup

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(
        tmp_path_factory.mktemp("bad-learners"),
        *("--learners", "2", "--restart", "never", "--global-steps", "0", "--pace", "0.2"),
        *("--evaluate-every", "1000"),
    )
    try:
        fleet.wait_for_rounds(8)
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def the_fleet_goes_on(fleet: Fleet) -> Iterator[None]:
    """After every intrusion, rounds of the healthy learner are merged as before."""
    yield
    for line in fleet.wait_for_rounds(4):
        assert "learner-0" in line["contributors"]


@pytest.mark.usefixtures("the_fleet_goes_on")
def test_a_learner_with_another_model_is_told_which_tensor_differs(fleet: Fleet) -> None:
    setup = load_setup(fleet.state().address, fleet.files.root, timeout_s=60.0, insecure=False)
    model = setup.build_model()
    name = next(name for name, p in model.named_parameters() if p.dim() == 2 and "layers.1" in name)
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    rows, columns = getattr(module, last).shape
    setattr(module, last, nn.Parameter(torch.zeros(rows + 2, columns)))
    learner = Learner(model, address=fleet.state().address, learner_id="learner-1")
    with pytest.raises(DilocoError) as caught, learner:
        pytest.fail("it was let in")
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert name in caught.value.message
    assert str(rows + 2) in caught.value.message
    assert caught.value.entry.exit_code == 65


@pytest.mark.usefixtures("the_fleet_goes_on")
def test_another_version_of_the_protocol_is_refused(fleet: Fleet) -> None:
    """Refused by both services that a learner meets first, each with the reason on the wire."""
    with grpc.insecure_channel(fleet.state().address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        synchronizer = synchronizer_pb2_grpc.SynchronizerServiceStub(channel)
        join = synchronizer_pb2.JoinRequest(
            protocol_version=99, learner_id="learner-1", request_id="r"
        )
        for call, request in (
            (admin.GetRun, admin_pb2.GetRunRequest(protocol_version=99)),
            (synchronizer.Join, join),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=30.0)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "99" in caught.value.details()
            metadata = dict(caught.value.trailing_metadata())
            assert b"PROTOCOL_MISMATCH" in metadata["grpc-status-details-bin"]


@pytest.mark.usefixtures("the_fleet_goes_on")
def test_a_learner_gone_mad_is_refused_and_never_merged(fleet: Fleet) -> None:
    """NaN in its parameters: its outer gradients never reach a sum, the others go on."""
    killed = fleet.kill("learner-1")
    fleet.wait_until(
        lambda: any(line["time"] > killed and line["live"] == ["learner-0"]
                    for line in fleet.rounds()),
        "the planned learner to be gone",
    )  # fmt: skip
    address = fleet.state().address
    setup = load_setup(address, fleet.files.root, timeout_s=60.0, insecure=False)
    model = setup.build_model()
    joined = time.time()

    def refused() -> bool:
        dropped = [line["dropped"].get("learner-1") for line in fleet.rounds()]
        return dropped.count("NON_FINITE") >= 3

    with Learner(model, address=address, learner_id="learner-1") as learner:

        def mad_step() -> bool:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(math.nan)
            learner.step(num_tokens=64, loss=None)
            return refused()

        fleet.wait_until(mad_step, "its pushes to be refused")
    merged = [line for line in fleet.rounds() if line["time"] > joined]
    assert not [line for line in merged if "learner-1" in line["contributors"]]
    assert all(math.isfinite(step["loss"]) for step in fleet.steps(0))
    totals = fleet.status()["totals"]
    assert int(totals["pushes_by_reason"]["NON_FINITE"]) >= 3


def test_the_published_copy_stays_finite(fleet: Fleet) -> None:
    fleet.interrupt()
    assert fleet.wait() == 143, fleet.text()
    assert_finite(fleet)


def assert_finite(fleet: Fleet) -> None:
    report = fleet.report()
    assert math.isfinite(report["evaluation_loss_after"])
    for name, tensor in load_file(fleet.files.model / "model.safetensors").items():
        assert bool(torch.isfinite(tensor).all()), name


def test_a_learning_rate_that_blows_up_is_survived(tmp_path: Path) -> None:
    """The run ends in order, and what is published is finite all the same."""
    fleet = Fleet(
        tmp_path,
        *("--learners", "1", "--global-steps", "60", "--pace", "0.05", "--learning-rate", "10"),
        settings=small(trainer="gradient_clip = 0.0\nwarmup_steps = 0"),
    )
    try:
        assert fleet.wait() == 0, fleet.text()
        losses = [step["loss"] for step in fleet.steps(0)]
        assert any(loss is None or loss > 100.0 for loss in losses), "it blew up"
        assert fleet.report()["rounds"] == 60
        assert_finite(fleet)
    finally:
        fleet.close()
