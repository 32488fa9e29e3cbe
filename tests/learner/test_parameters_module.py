"""``ModuleParameters`` on odd models, through every strategy of layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.layout import Role, Strategy, build_layout
from learner_client import ModuleParameters


class Odd(nn.Module):
    """Tied head, a scalar, a buffer, a frozen layer, a non-contiguous parameter, mixed dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(nn.Linear(6, 7) for _ in range(3))
        self.low = nn.Linear(6, 5).to(torch.bfloat16)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(4, 9).t())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(100))


def layouts(parameters: ModuleParameters):
    for strategy in Strategy:
        yield build_layout(parameters.tensors, strategy=strategy, num_fragments=5, overlap=1)


def test_specs_name_tied_tensors_once_and_leave_buffers_and_frozen_ones_out():
    specs = {spec.name: spec for spec in ModuleParameters(Odd()).tensors}
    assert specs["tokens.weight"].aliases == ("head.weight",)
    assert specs["tokens.weight"].role is Role.EMBEDDING
    assert not any("frozen" in name or name == "seen" for name in specs)
    assert "head.weight" not in specs
    assert specs["scale"].shape == ()
    assert specs["turned"].shape == (9, 4)
    assert specs["low.weight"].dtype == "bfloat16"
    assert [s.name for s in specs.values() if s.role is Role.EMBEDDING] == ["tokens.weight"]


@given(st.integers(0, 1000))
def test_every_fragment_is_read_back_as_written_and_touches_nothing_else(seed):
    torch.manual_seed(seed)
    model = Odd()
    parameters = ModuleParameters(model)
    frozen = model.frozen.weight.detach().clone()
    for layout in layouts(parameters):
        held = {}
        for fragment in layout.fragments:
            vector = torch.randn(fragment.num_elements)
            parameters.write_fragment(fragment, vector)
            held[fragment.index] = parameters.local_view_of(fragment, vector)
        for fragment in layout.fragments:
            out = torch.full((fragment.num_elements,), torch.nan)
            parameters.read_fragment(fragment, out)
            assert torch.equal(out, held[fragment.index])
    assert torch.equal(model.frozen.weight, frozen)
    assert model.head.weight is model.tokens.weight


def test_the_vector_is_the_pieces_in_order_each_row_major():
    model = Odd()
    parameters = ModuleParameters(model)
    names = dict(model.named_parameters())
    for layout in layouts(parameters):
        for fragment in layout.fragments:
            out = torch.empty(fragment.num_elements)
            parameters.read_fragment(fragment, out)
            expected = []
            for piece in fragment.pieces:
                tensor = names[piece.tensor].detach().float()
                if tensor.dim():
                    tensor = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)
                expected += tensor.reshape(-1).tolist()
            assert out.tolist() == expected


def test_a_cut_tensor_is_in_several_fragments():
    parameters = ModuleParameters(Odd())
    layout = build_layout(
        parameters.tensors, strategy=Strategy.SUB_TENSOR, num_fragments=5, overlap=1
    )
    homes = [p.tensor for f in layout.fragments for p in f.pieces]
    assert len(homes) > len(set(homes)), "this model is meant to have a cut"


def test_the_view_of_a_bf16_model_is_what_the_model_holds():
    model = nn.Linear(8, 8).to(torch.bfloat16)
    parameters = ModuleParameters(model)
    layout = build_layout(
        parameters.tensors, strategy=Strategy.BALANCED, num_fragments=2, overlap=1
    )
    for fragment in layout.fragments:
        vector = torch.randn(fragment.num_elements)
        kept = vector.clone()
        view = parameters.local_view_of(fragment, vector)
        assert not torch.equal(view, vector)
        assert torch.equal(view, vector.to(torch.bfloat16).float())
        assert torch.equal(vector, kept)


def test_the_view_of_an_fp32_model_is_the_vector_itself():
    parameters = ModuleParameters(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    layout = build_layout(
        parameters.tensors, strategy=Strategy.BALANCED, num_fragments=2, overlap=1
    )
    vector = torch.randn(layout.fragments[0].num_elements)
    assert parameters.local_view_of(layout.fragments[0], vector) is vector


def test_embeddings_by_name_replace_the_default_and_may_be_an_alias():
    specs = ModuleParameters(Odd(), embedding_names=["head.weight", "scale"]).tensors
    assert {s.name for s in specs if s.role is Role.EMBEDDING} == {"tokens.weight", "scale"}
    specs = ModuleParameters(Odd(), embedding_names=[]).tensors
    assert all(s.role is Role.BODY for s in specs)


@pytest.mark.parametrize("name", ["nothing", "frozen.weight", "seen"])
def test_an_embedding_name_that_is_no_trainable_parameter_is_refused(name):
    with pytest.raises(UsageError, match=name) as caught:
        ModuleParameters(Odd(), embedding_names=[name])
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_a_mostly_frozen_model_is_warned_about(caplog):
    ModuleParameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(50, 50).requires_grad_(False)))
    assert "frozen" in caplog.text
    caplog.clear()
    ModuleParameters(Odd())
    assert not caplog.text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "complex64"),
        (nn.Linear(2, 2, device="meta"), "meta device"),
    ],
)
def test_a_parameter_that_cannot_be_merged_is_refused_by_name(model, words):
    with pytest.raises(UsageError, match=words) as caught:
        ModuleParameters(model)
    assert caught.value.reason is Reason.LAYOUT_IMPOSSIBLE


def test_an_optimizer_sees_what_was_written():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parameters = ModuleParameters(model)
    layout = build_layout(parameters.tensors, strategy=Strategy.TENSOR, num_fragments=4, overlap=1)
    for fragment in layout.fragments:
        parameters.write_fragment(fragment, torch.zeros(fragment.num_elements))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model[1].bias.tolist() == [-1.0, -1.0, -1.0]
