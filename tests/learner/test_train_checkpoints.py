"""The trainer's own checkpoints: written beside the training, used where they are whole."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from learner_client.train.checkpoints import Checkpoints
from learner_client.training_state import TrainingState


def state(number: int) -> TrainingState:
    return TrainingState(
        model={"weight": torch.full((3,), float(number))},
        inner={},
        learner={},
        rng={},
        data={"position": number},
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def made(tmp_path):
    clock = Clock()
    path = tmp_path / "checkpoints" / "learner-0.safetensors"
    checkpoints = Checkpoints(path, every_s=10.0, clock=clock)
    yield checkpoints, clock, path
    checkpoints._pool.shutdown()


def again(path) -> TrainingState | None:
    return Checkpoints(path, every_s=10.0).load()


def test_a_checkpoint_is_written_when_it_is_due_and_not_before(made):
    checkpoints, clock, path = made
    captured = []

    def capture() -> TrainingState:
        captured.append(clock.now)
        return state(len(captured))

    for clock.now in (1.0, 9.0, 10.0, 11.0, 19.0):
        checkpoints.save_if_due(capture)
    assert captured == [10.0]
    checkpoints.close(capture)
    assert again(path).data == {"position": 2}


def test_the_training_thread_never_waits_for_the_disk(made, monkeypatch):
    checkpoints, clock, _ = made
    go_on = threading.Event()

    def slow(*_args) -> None:
        assert go_on.wait(20.0)

    monkeypatch.setattr("learner_client.train.checkpoints.save_training_state", slow)
    captured = []
    for clock.now in (10.0, 20.0, 30.0):
        checkpoints.save_if_due(lambda: captured.append(clock.now) or state(1))
    assert captured == [10.0]
    go_on.set()
    checkpoints.close()


def test_without_a_checkpoint_or_with_a_damaged_one_it_says_so(made, caplog):
    caplog.set_level(logging.INFO)
    checkpoints, _, path = made
    assert checkpoints.load() is None
    assert "there is no checkpoint" in caplog.text
    checkpoints.close(lambda: state(1))
    path.write_bytes(path.read_bytes()[:-2])
    assert again(path) is None
    assert "the checkpoint is not used: CORRUPT" in caplog.text


def test_a_disk_that_fails_is_said_once_and_training_goes_on(made, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    checkpoints, clock, path = made
    path.parent.write_text("in the way")
    for clock.now in (10.0, 20.0, 30.0):
        checkpoints.save_if_due(lambda: state(1))
        checkpoints._writing.exception()
    assert caplog.text.count("no checkpoint was written") == 1
    path.parent.unlink()
    clock.now = 40.0
    checkpoints.save_if_due(lambda: state(4))
    checkpoints.close()
    assert "checkpoints are written again" in caplog.text
    assert again(path).data == {"position": 4}
