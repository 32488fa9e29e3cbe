"""The whole state of a training process, through a file and back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Version, digest_of
from learner_client.checkpoint import SavedState
from learner_client.core.counters import Counters
from learner_client.inner_state import OptimizerState
from learner_client.training_state import (
    TrainingState,
    load_training_state,
    save_training_state,
    training_state_from,
)


class Saved:
    """A learner as far as its saved state goes."""

    def __init__(self) -> None:
        vector = torch.arange(3.0)
        version = Version(1, 7, digest_of(vector.numpy().tobytes()))
        self.state = SavedState(
            fingerprint="ab" * 32,
            local_step=5,
            counters=Counters(1),
            published={0: (version, vector)},
        ).to_dict()
        self.loaded: dict[str, torch.Tensor] | None = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded = dict(state)


class Process:
    """Model with a buffer, dropout, tied weights; a loop that draws from every generator."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)
        )
        self.model[3].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.inner = OptimizerState(self.model, self.optimizer)
        self.learner = Saved()

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            scale = random.random() + np.random.rand() + random.gauss(0, 1)
            loss = (self.model(torch.randn(8, 4)) * scale).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def capture(self) -> TrainingState:
        return TrainingState.capture(self.model, self.inner, self.learner, {"position": 12})


def test_training_goes_on_from_a_file_as_if_it_had_never_stopped(tmp_path):
    path = tmp_path / "state.safetensors"
    first = Process(1)
    first.train(3)
    random.gauss(0, 1)  # leaves a second number waiting
    save_training_state(path, first.capture())
    uninterrupted = first.train(4)
    second = Process(2)
    second.train(1)
    state = load_training_state(path)
    state.restore(second.model, second.inner, second.learner)
    assert state.data == {"position": 12}
    assert second.learner.loaded.keys() == first.learner.state.keys()
    assert second.train(4) == uninterrupted
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_capture_stays_as_it_is_while_training_goes_on():
    process = Process(1)
    process.train(1)
    state = process.capture().to_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    process.train(2)
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert "model.0.weight" in state
    assert "model.3.weight" not in state
    assert "model.1.running_mean" in state


def test_damage_anywhere_in_the_file_is_noticed(tmp_path):
    path = tmp_path / "state.safetensors"
    process = Process(1)
    process.train(1)
    save_training_state(path, process.capture())
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"x" * 50, whole[:-9] + b"\x55" + whole[-8:]):
        path.write_bytes(damaged)
        with pytest.raises(DilocoError) as refused:
            load_training_state(path)
        assert refused.value.reason is Reason.CORRUPT, len(damaged)
    path.unlink()
    with pytest.raises(DilocoError) as refused:
        load_training_state(path)
    assert refused.value.reason is Reason.STORAGE_FAILED


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    process = Process(1)
    save_training_state(path, process.capture())
    before = path.read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("learner_client.training_state.save_file", full)
    process.train(1)
    with pytest.raises(DilocoError) as refused:
        save_training_state(path, process.capture())
    assert refused.value.reason is Reason.DISK_FULL
    assert path.read_bytes() == before


def broken(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    state = dict(state)
    match how:
        case "model":
            state["model.0.weight"] = torch.zeros(4, 5)
        case "names":
            state["model.elsewhere"] = torch.zeros(1)
        case "inner":
            state["inner.optimizer.0.weight.exp_avg"] = torch.zeros(1)
        case "learner":
            del state["learner.versions"]
        case "generator":
            del state["rng.numpy"]
        case "words":
            state["rng.python"] = state["rng.python"] - 1
            state["rng.python"][0] = -1
    return state


@pytest.mark.parametrize("how", ["model", "names", "inner", "learner", "generator", "words"])
def test_a_state_that_does_not_fit_changes_nothing(how):
    process = Process(1)
    process.train(1)
    wrong = training_state_from(broken(process.capture().to_dict(), how))
    other = Process(2)
    other.train(1)
    before = other.capture().to_dict()
    with pytest.raises(UsageError):
        wrong.restore(other.model, other.inner, other.learner)
    after = other.capture().to_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert other.learner.loaded is None


@pytest.mark.parametrize(
    "state",
    [
        {"weight": torch.zeros(1)},
        {"elsewhere.weight": torch.zeros(1)},
        {"data.position": torch.zeros(1)},
        {"data.position": torch.tensor(1.5)},
    ],
)
def test_other_tensors_are_no_training_state(state):
    with pytest.raises(UsageError):
        training_state_from(state)
