"""The transformer, its evaluation, export and sampling."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from learner_client.train.evaluate import evaluate
from learner_client.train.export import export_model, load_model
from learner_client.train.generate import generate
from learner_client.train.model import ModelConfig, Transformer, build_model, token_loss
from learner_client.train.tokenizer import ByteTokenizer

CONFIG = ModelConfig(
    vocab_size=256,
    sequence_length=16,
    num_layers=2,
    hidden_size=24,
    num_heads=3,
    intermediate_size=40,
)


def changed(**changes: Any) -> ModelConfig:
    return ModelConfig.from_json(json.dumps({**json.loads(CONFIG.to_json()), **changes}))


@pytest.fixture
def model() -> Transformer:
    return build_model(CONFIG, seed=1)


def test_equal_seeds_give_equal_parameters_whatever_the_global_generator() -> None:
    torch.manual_seed(5)
    first = build_model(CONFIG, seed=3).state_dict()
    torch.manual_seed(6)
    before = torch.get_rng_state()
    second = build_model(CONFIG, seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_model(CONFIG, seed=4).state_dict()
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    model = build_model(ModelConfig.from_preset("tiny", vocab_size=256, sequence_length=32), seed=0)
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    loss = token_loss(model, tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_a_position_does_not_see_later_tokens(model: Transformer) -> None:
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens)
        for position in (1, 9, 15):
            other = tokens.clone()
            other[:, position:] = (other[:, position:] + 1) % 256
            after = model(other)
            assert torch.allclose(before[:, :position], after[:, :position], atol=1e-6)
            assert not torch.allclose(before[:, position], after[:, position], atol=1e-3)


def test_attention_depends_on_relative_positions(model: Transformer) -> None:
    """Without positions, swapping two earlier tokens would leave the last logits as they are."""
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    one_layer = build_model(changed(num_layers=1), seed=1)
    with torch.no_grad():
        assert not torch.allclose(one_layer(tokens)[:, -1], one_layer(swapped)[:, -1], atol=1e-5)


def test_tied_embeddings_are_one_parameter(model: Transformer) -> None:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names
    assert set(model.state_dict()) == set(names)
    untied = build_model(changed(tie_embeddings=False), seed=1)
    assert "lm_head.weight" in dict(untied.named_parameters())
    assert untied(torch.zeros((1, 4), dtype=torch.int64)).shape == (1, 4, 256)


def test_a_few_steps_of_training_lower_the_loss(model: Transformer) -> None:
    tokens = torch.arange(17).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = token_loss(model, tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 5},
        {"num_heads": 8},
        {"vocab_size": 0},
        {"num_layers": 1.0},
        {"num_layers": 10**9},
        {"tie_embeddings": 1},
        {"rope_theta": math.nan},
        {"norm_epsilon": "small"},
        {"surprise": 1},
    ],
)
def test_a_bad_model_configuration_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        changed(**change)
    assert caught.value.reason == Reason.CONFIG_INVALID


def test_model_configuration_survives_json() -> None:
    assert ModelConfig.from_json(CONFIG.to_json()) == CONFIG
    with pytest.raises(UsageError):
        ModelConfig.from_json("[]")


TOKENS = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8)


def test_evaluation_equals_the_loss_written_out(model: Transformer) -> None:
    result = evaluate(model, TOKENS, sequence_length=16, batch_size=3)
    total, count = 0.0, 0
    for start in range(0, 499 - 15, 16):
        window = torch.from_numpy(TOKENS[start : start + 17].astype(np.int64))
        with torch.no_grad():
            probabilities = model(window[None, :-1])[0].log_softmax(-1)
        total -= sum(float(probabilities[i, window[i + 1]]) for i in range(16))
        count += 16
    assert result.num_tokens == count == 496
    assert result.loss == pytest.approx(total / count, rel=1e-5)


def test_evaluation_is_deterministic_and_leaves_the_model_as_it_was(model: Transformer) -> None:
    for training in (True, False):
        model.train(training)
        first = evaluate(model, TOKENS, sequence_length=16, max_tokens=100)
        assert model.training is training
        assert first == evaluate(model, TOKENS, sequence_length=16, max_tokens=100)
        assert first.num_tokens == 96
    assert all(parameter.grad is None for parameter in model.parameters())


def test_limited_evaluation_is_spread_over_the_tokens() -> None:
    class Recorder(Transformer):
        def __init__(self) -> None:
            super().__init__(CONFIG)
            self.seen: list[int] = []

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.seen += tokens[:, 0].tolist()
            return torch.zeros((*tokens.shape, 256))

    recorder = Recorder()
    evaluate(recorder, np.arange(201).astype(np.uint8), sequence_length=10, max_tokens=50)
    assert recorder.seen == [0, 40, 80, 120, 160]


def test_evaluation_of_few_or_foreign_tokens(model: Transformer) -> None:
    assert evaluate(model, TOKENS[:5], sequence_length=16).num_tokens == 4
    with pytest.raises(UsageError) as caught:
        evaluate(model, TOKENS[:1], sequence_length=16)
    assert caught.value.reason == Reason.DATA_EMPTY
    small = build_model(changed(vocab_size=8), seed=0)
    with pytest.raises(UsageError) as caught:
        evaluate(small, np.array([1, 2, 9, 3], dtype=np.uint16), sequence_length=3)
    assert caught.value.reason == Reason.DATA_MISMATCH


def test_generation_is_deterministic_and_follows_its_seed(model: Transformer) -> None:
    first = generate(model, [1, 2, 3], max_new_tokens=40, seed=5)
    assert len(first) == 40
    assert first == generate(model, [1, 2, 3], max_new_tokens=40, seed=5)
    assert first != generate(model, [1, 2, 3], max_new_tokens=40, seed=6)
    assert model.training
    encoded = generate(model, ByteTokenizer().encode("\1\2\3"), max_new_tokens=40, seed=5)
    assert encoded == first


def test_greedy_and_limited_sampling_take_the_likeliest(model: Transformer) -> None:
    greedy = generate(model, [7], max_new_tokens=10, temperature=0.0)
    assert greedy == generate(model, [7], max_new_tokens=10, top_k=1, seed=9)
    assert greedy == generate(model, [7], max_new_tokens=10, temperature=1e-300, seed=9)
    with torch.no_grad():
        assert greedy[0] == int(model(torch.tensor([[7]]))[0, -1].argmax())


@pytest.mark.parametrize(
    ("prompt", "change"),
    [
        ([], {}),
        ([256], {}),
        ([-1], {}),
        ([1], {"temperature": -0.1}),
        ([1], {"temperature": math.nan}),
        ([1], {"top_k": -1}),
        ([1], {"seed": -1}),
        ([1], {"max_new_tokens": -1}),
    ],
)
def test_a_bad_request_for_text_is_refused(
    model: Transformer, prompt: list[int], change: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as caught:
        generate(model, prompt, **{"max_new_tokens": 1, **change})
    assert caught.value.reason == Reason.CONFIG_INVALID


def export(model: Transformer, folder: Path, **metadata: Any) -> None:
    export_model(
        model.state_dict(), model.config, folder, tokenizer=ByteTokenizer(), metadata=metadata
    )


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_comes_back_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    model = build_model(changed(tie_embeddings=tied), seed=2)
    export(model, tmp_path / "model", global_step=24)
    loaded = load_model(tmp_path / "model")
    state = loaded.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int32), state[name].view(torch.int32))
    assert loaded.config == model.config
    assert loaded.metadata == {"global_step": 24}
    assert loaded.tokenizer.name == "bytes"
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_the_export_describes_itself_as_a_llama_checkpoint(
    tmp_path: Path, model: Transformer
) -> None:
    export(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["tie_word_embeddings"]) == (24, True)


def test_a_second_export_replaces_the_first(tmp_path: Path, model: Transformer) -> None:
    export(build_model(CONFIG, seed=9), tmp_path)
    export(model, tmp_path)
    loaded = load_model(tmp_path).model.state_dict()["model.norm.weight"]
    assert torch.equal(loaded, model.state_dict()["model.norm.weight"])


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_parameters_of_another_model_are_not_exported(
    tmp_path: Path, model: Transformer, change: str
) -> None:
    state = dict(model.state_dict())
    if change == "missing":
        del state["model.norm.weight"]
    elif change == "extra":
        state["lm_head.weight"] = torch.zeros(2, 2)
    else:
        state["model.norm.weight"] = torch.zeros(25)
    with pytest.raises(UsageError, match=r"model\.norm|lm_head") as caught:
        export_model(state, CONFIG, tmp_path / "x", tokenizer=ByteTokenizer(), metadata={})
    assert caught.value.reason == Reason.LAYOUT_MISMATCH
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, model: Transformer) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DilocoError) as caught:
        export(model, tmp_path / "file")
    assert caught.value.reason == Reason.STORAGE_FAILED


def _flip(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def _edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["decoupled_diloco"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, Reason.STORE_CORRUPT),
        (lambda f: (f / "model.safetensors").write_bytes(b"PK\3\4"), Reason.STORE_CORRUPT),
        (lambda f: (f / "model.safetensors").unlink(), Reason.RUN_NOT_FOUND),
        (lambda f: (f / "config.json").unlink(), Reason.RUN_NOT_FOUND),
        (lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'), Reason.CONFIG_INVALID),
        (lambda f: (f / "config.json").write_text("[]"), Reason.CONFIG_INVALID),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), Reason.CONFIG_INVALID),
        (lambda f: _edit(f, format_version=2), Reason.CONFIG_INVALID),
        (lambda f: _edit(f, metadata=3), Reason.CONFIG_INVALID),
        (lambda f: _edit(f, model={"vocab_size": 256}), Reason.CONFIG_INVALID),
        (
            lambda f: _edit(f, model=json.loads(changed(num_layers=3).to_json())),
            Reason.LAYOUT_MISMATCH,
        ),
        (lambda f: _edit(f, tokenizer="hf:00"), Reason.CONFIG_INVALID),
    ],
)
def test_a_damaged_or_foreign_model_is_refused(
    tmp_path: Path, model: Transformer, damage: Any, reason: Reason
) -> None:
    export(model, tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_model(tmp_path)
    assert caught.value.reason == reason
