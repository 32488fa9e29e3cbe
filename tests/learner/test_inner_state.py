"""Inner state by name: captured, moved and restored, or refused as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from learner_client.inner_state import OptimizerState, decode_state, encode_state


class Model(nn.Module):
    """A tied head, a frozen layer, a turned matrix, a layer that is never used."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.turned = nn.Parameter(torch.randn(6, 6).t())
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.middle(self.tokens(x)).tanh()) @ self.turned)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw_lr_tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32):
    model = Model(seed, dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, OptimizerState(model, optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for i in range(first, last):
        tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(tokens).flatten(0, 1).float(), tokens.flatten()
        ).backward()
        optimizer.step()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("trained_before", [0, 2])
def test_training_goes_on_bit_for_bit_where_another_learner_left_off(kind, dtype, trained_before):
    donor, donor_optimizer, donor_state = build(kind, 0, dtype)
    train(donor, donor_optimizer, 0, 3)
    model, optimizer, state = build(kind, 1, dtype)
    train(model, optimizer, 100, 100 + trained_before)
    captured = donor_state.capture()
    model.load_state_dict(donor.state_dict())
    state.restore(decode_state(encode_state(captured)))
    assert same(state.capture(), captured)
    train(donor, donor_optimizer, 3, 6)
    train(model, optimizer, 3, 6)
    for (name, theirs), ours in zip(donor.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours), name
    assert same(state.capture(), donor_state.capture())


def test_a_capture_names_every_trained_parameter_once_and_shares_no_memory():
    model, optimizer, state = build("adamw")
    assert state.capture() == {}
    train(model, optimizer, 0, 1)
    captured = state.capture()
    assert "optimizer.tokens.weight.exp_avg" in captured
    assert captured["optimizer.middle.bias.step"].shape == ()
    assert not any("head" in n or "frozen" in n or "unused" in n for n in captured)
    before = {name: value.clone() for name, value in captured.items()}
    train(model, optimizer, 1, 2)
    assert same(captured, before)
    assert not same(state.capture(), before)
    assert all(value.is_contiguous() for value in captured.values())


def test_hyper_parameters_stay_those_of_who_restores():
    donor, donor_optimizer, donor_state = build("adamw")
    train(donor, donor_optimizer, 0, 1)
    _, optimizer, state = build("adamw")
    optimizer.param_groups[0]["lr"] = 0.125
    state.restore(donor_state.capture())
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_finding_the_first_slots_steps_nothing_of_the_user():
    donor, donor_optimizer, donor_state = build("adamw")
    train(donor, donor_optimizer, 0, 2)
    model, optimizer, state = build("adamw")
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append("pre"))
    optimizer.register_step_post_hook(lambda *_: hooked.append("post"))
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state.restore(donor_state.capture())
    assert hooked == []
    assert scheduler.last_epoch == 0
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert hooked == ["pre", "post"]


def test_what_the_donor_never_trained_is_forgotten():
    _, _, fresh = build("adamw")
    model, optimizer, state = build("adamw")
    train(model, optimizer, 0, 2)
    state.restore(fresh.capture())
    assert state.capture() == {}


def damaged(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    state = dict(state)
    name = "optimizer.middle.weight.exp_avg"
    match how:
        case "unknown":
            state["optimizer.elsewhere.weight.exp_avg"] = torch.zeros(6, 6)
        case "no_name":
            state["exp_avg"] = torch.zeros(6, 6)
        case "missing":
            del state[name]
        case "extra":
            state["optimizer.middle.weight.mystery"] = torch.zeros(6, 6)
        case "shape":
            state[name] = torch.zeros(6, 7)
        case "dtype":
            state[name] = state[name].double()
        case "nan":
            state[name] = torch.full((6, 6), float("nan"))
    return state


HOW = ["unknown", "no_name", "missing", "extra", "shape", "dtype", "nan"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("trained_before", [0, 2])
def test_a_state_that_does_not_fit_changes_nothing(how, trained_before):
    donor, donor_optimizer, donor_state = build("adamw")
    train(donor, donor_optimizer, 0, 3)
    model, optimizer, state = build("adamw", 1)
    train(model, optimizer, 50, 50 + trained_before)
    before = state.capture()
    with pytest.raises(UsageError) as refused:
        state.restore(damaged(donor_state.capture(), how))
    expected = Reason.NON_FINITE if how == "nan" else Reason.LAYOUT_MISMATCH
    assert refused.value.reason is expected
    assert same(state.capture(), before)


def test_another_optimizer_or_other_options_are_refused_on_an_empty_state_too():
    donor, donor_optimizer, donor_state = build("adamw")
    train(donor, donor_optimizer, 0, 1)
    for kind in ("sgd", "sgd_momentum", "adamw_amsgrad"):
        _, _, state = build(kind)
        with pytest.raises(UsageError, match="same optimizer"):
            state.restore(donor_state.capture())


def test_an_optimizer_of_another_model_is_refused():
    model, optimizer, _ = build("adamw")
    with pytest.raises(UsageError, match="parameters that the model has not"):
        OptimizerState(nn.Linear(2, 2), optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UsageError, match="1 parameters that the model has not"):
        OptimizerState(model, optimizer)


def test_state_that_is_no_tensor_is_named():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(UsageError, match="keeps a list"):
        OptimizerState(model, optimizer).capture()


@pytest.mark.parametrize("payload", [b"", b"garbage", b"\xff" * 64, encode_state({})[:4]])
def test_bytes_that_are_no_safetensors_are_corrupt(payload):
    with pytest.raises(DilocoError) as refused:
        decode_state(payload)
    assert refused.value.reason is Reason.CORRUPT
