"""Training settings, presets, learning-rate schedule, optimizer, device."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import Reason, UsageError
from learner_client.train.device import compute_precision, resolve_device
from learner_client.train.loop import ScheduleClock
from learner_client.train.model import ModelConfig, build_model, num_parameters
from learner_client.train.optimizer import build_optimizer, set_learning_rate
from learner_client.train.presets import PRESETS
from learner_client.train.schedule import learning_rate_at
from learner_client.train.settings import TrainSettings


@given(
    st.builds(
        TrainSettings,
        preset=st.sampled_from(sorted(PRESETS)),
        learning_rate=st.floats(1e-6, 1.0),
        seed=st.integers(0, 2**63 - 1),
        precision=st.sampled_from(["fp32", "bf16"]),
        tokenizer=st.text(min_size=1),
        corpus_hash=st.text(),
    )
)
def test_settings_survive_json_exactly(settings: TrainSettings) -> None:
    assert TrainSettings.from_json(settings.to_json()) == settings


def test_json_holds_every_setting_by_its_name() -> None:
    names = {field.name for field in dataclasses.fields(TrainSettings)}
    assert set(json.loads(TrainSettings().to_json())) == names


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"preset": "tinny"}, "did you mean 'tiny'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 2.5}, "whole number"),
        ({"sequence_length": 1}, "sequence_length"),
        ({"learning_rate": 0.0}, "above 0"),
        ({"learning_rate": math.nan}, "finite"),
        ({"learning_rate": math.inf}, "finite"),
        ({"weight_decay": 10**400}, "finite"),
        ({"learning_rate": "fast"}, "finite number"),
        ({"beta2": 1.0}, "beta2"),
        ({"gradient_clip": -1.0}, "gradient_clip"),
        ({"min_learning_rate_ratio": 1.5}, "min_learning_rate_ratio"),
        ({"precision": "fp8"}, "fp32, bf16"),
        ({"seed": -1}, "seed"),
        ({"tokenizer": ""}, "tokenizer"),
        ({"tokenizer": 3}, "a text"),
        ({"num_shards": 0}, "num_shards"),
    ],
)
def test_a_bad_value_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        TrainSettings(**change)
    assert caught.value.reason == Reason.CONFIG_INVALID


def test_a_warm_up_longer_than_the_run_is_a_conflict() -> None:
    with pytest.raises(UsageError, match=r"warmup_steps 50 .* total_global_steps 50") as caught:
        TrainSettings(warmup_steps=50, total_global_steps=50)
    assert caught.value.reason == Reason.CONFIG_CONFLICT


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'learning_rate'") as caught:
        TrainSettings.from_json('{"learning_rat": 0.1}')
    assert caught.value.reason == Reason.CONFIG_UNKNOWN_KEY


@pytest.mark.parametrize("text", ["", "[1]", "3", '{"seed": ', "[" * 100_000])
def test_settings_that_are_no_json_object_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainSettings.from_json(text)
    assert caught.value.reason == Reason.CONFIG_INVALID


def test_schedule_warms_up_decays_and_stays() -> None:
    settings = TrainSettings(
        learning_rate=1.0, warmup_steps=9, total_global_steps=109, min_learning_rate_ratio=0.1
    )
    assert learning_rate_at(0, settings) == pytest.approx(0.1)
    assert learning_rate_at(4, settings) == pytest.approx(0.5)
    assert learning_rate_at(9, settings) == pytest.approx(1.0)
    assert learning_rate_at(59, settings) == pytest.approx(0.55)
    assert learning_rate_at(84, settings) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2)
    assert learning_rate_at(109, settings) == pytest.approx(0.1)
    assert learning_rate_at(10_000, settings) == pytest.approx(0.1)


@given(st.floats(0, 2000), st.integers(0, 700))
def test_learning_rate_is_positive_and_at_most_its_peak(step: float, warmup: int) -> None:
    settings = TrainSettings(warmup_steps=warmup, total_global_steps=800)
    assert 0 < learning_rate_at(step, settings) <= settings.learning_rate * (1 + 1e-12)


def test_norms_do_not_decay_and_every_parameter_is_optimized_once() -> None:
    config = ModelConfig.from_preset("tiny", vocab_size=256, sequence_length=8)
    model = build_model(config, seed=0)
    optimizer = build_optimizer(model, TrainSettings(weight_decay=0.3))
    decay = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert len(decay) == len(list(model.parameters()))
    for parameter in model.parameters():
        assert decay[id(parameter)] == (0.3 if parameter.dim() > 1 else 0.0)
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [
        ("tiny", 0.4e6, 0.6e6),
        ("mini", 1.5e6, 2.5e6),
        ("small", 8e6, 12e6),
        ("medium", 25e6, 35e6),
        ("large", 90e6, 110e6),
    ],
)
def test_presets_have_the_sizes_they_promise(preset: str, low: float, high: float) -> None:
    with torch.device("meta"):
        config = ModelConfig.from_preset(preset, vocab_size=256, sequence_length=128)
        model = build_model(config, seed=0) if preset == "tiny" else _meta_model(config)
    assert low <= num_parameters(model) <= high


def _meta_model(config: ModelConfig) -> torch.nn.Module:
    from learner_client.train.model import Transformer

    return Transformer(config)


def test_tiny_has_tensors_for_23_body_fragments() -> None:
    config = ModelConfig.from_preset("tiny", vocab_size=256, sequence_length=8)
    names = [name for name, _ in build_model(config, seed=0).named_parameters()]
    assert len([name for name in names if "embed" not in name]) >= 23


def test_devices_resolve_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    for name, reason in [
        ("cuda:0", Reason.DEVICE_UNAVAILABLE),
        ("cuda", Reason.DEVICE_UNAVAILABLE),
        ("gpu", Reason.CONFIG_INVALID),
        ("meta", Reason.CONFIG_INVALID),
    ]:
        with pytest.raises(UsageError) as caught:
            resolve_device(name)
        assert caught.value.reason == reason


def test_learners_spread_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device("auto", index).index for index in range(4)] == [0, 1, 0, 1]
    assert resolve_device("cuda:1", 0) == torch.device("cuda:1")
    with pytest.raises(UsageError, match="sees 2 GPUs") as caught:
        resolve_device("cuda:2")
    assert caught.value.reason == Reason.DEVICE_UNAVAILABLE


def test_bf16_computes_in_bf16_over_fp32_parameters() -> None:
    model = build_model(ModelConfig.from_preset("tiny", vocab_size=256, sequence_length=8), seed=0)
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    with compute_precision("bf16", torch.device("cpu")):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
    with compute_precision("fp32", torch.device("cpu")):
        assert model(tokens).dtype == torch.float32


def test_the_schedule_goes_on_where_it_was_saved() -> None:
    clock, again = ScheduleClock(0.5, 8.0), ScheduleClock(0.5, 8.0)
    for global_step in (3, 3, 3, 4, 4):
        clock.read(global_step)
    again.restore(clock.state())
    for global_step in (4, 4, 5):
        assert again.read(global_step) == clock.read(global_step)
    fresh = ScheduleClock(0.5, 8.0)
    fresh.restore({})
    assert [fresh.read(7), fresh.read(7)] == [7.0, 7.5]
