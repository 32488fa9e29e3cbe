"""The layout puts every element into exactly one fragment, the same way in every process."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.layout import (
    Layout,
    Piece,
    Role,
    Strategy,
    TensorSpec,
    build_layout,
    first_difference,
)
from tests.contract.layout_models import any_strategy, build, models, spec, transformer


def elements_of(piece: Piece, whole: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names every element of a piece by tensor and index; the dumb way to see overlaps."""
    ranges = [range(size) for size in whole]
    if ranges:
        ranges[piece.dim] = range(piece.start, piece.stop)
    found = [(piece.tensor, index) for index in itertools.product(*ranges)]
    assert tuple(len(r) for r in ranges) == piece.shape
    return found


@given(models(), any_strategy, st.integers(1, 9))
def test_every_element_lies_in_exactly_one_fragment(tensors, strategy, num_fragments):
    layout = build(tensors, strategy, num_fragments)
    found = [
        element
        for fragment in layout.fragments
        for piece in fragment.pieces
        for element in elements_of(piece, layout.tensor(piece.tensor).shape)
    ]
    expected = {
        (t.name, index) for t in tensors for index in itertools.product(*map(range, t.shape))
    }
    assert len(found) == len(expected)
    assert set(found) == expected
    assert layout.num_parameters == len(expected)
    assert sum(fragment.num_elements for fragment in layout.fragments) == len(expected)


@given(models(), any_strategy, st.integers(1, 9))
def test_fragments_are_numbered_not_empty_and_of_one_role(tensors, strategy, num_fragments):
    layout = build(tensors, strategy, num_fragments)
    assert [f.index for f in layout.fragments] == list(range(layout.num_fragments))
    assert layout.num_fragments <= num_fragments
    for fragment in layout.fragments:
        assert fragment.pieces
        assert {layout.tensor(p.tensor).role for p in fragment.pieces} == {fragment.role}
    roles = [f.role for f in layout.fragments]
    num_embedding = roles.count(Role.EMBEDDING)
    assert roles[:num_embedding] == [Role.EMBEDDING] * num_embedding, "embedding first"
    if strategy is not Strategy.SUB_TENSOR:
        assert num_embedding == any(t.role == Role.EMBEDDING for t in tensors)
        whole = {(p.tensor, p.shape) for f in layout.fragments for p in f.pieces}
        assert whole == {(t.name, t.shape) for t in tensors}, "no tensor is cut"


@given(models(), any_strategy, st.integers(1, 9), st.randoms(use_true_random=False))
def test_order_of_the_tensors_does_not_matter(tensors, strategy, num_fragments, rng):
    layout = build(tensors, strategy, num_fragments)
    shuffled = list(tensors)
    rng.shuffle(shuffled)
    again = build(shuffled, strategy, num_fragments)
    assert again == layout
    assert again.fingerprint == layout.fingerprint


@given(models(), any_strategy, st.integers(1, 9))
def test_offsets_lay_the_pieces_end_to_end(tensors, strategy, num_fragments):
    for fragment in build(tensors, strategy, num_fragments).fragments:
        end = 0
        for piece, offset in zip(fragment.pieces, fragment.offsets, strict=True):
            assert offset == end
            end += piece.num_elements
        assert end == fragment.num_elements


def test_a_tied_tensor_counts_once_and_is_found_by_its_own_name_only():
    layout = build_layout(transformer(), strategy=Strategy.BALANCED, num_fragments=5, overlap=2)
    assert layout.fragments[0].num_elements == 50 * 4
    assert layout.num_parameters == 50 * 4 + 6 * (48 + 64 + 4) + 4
    assert layout.tensor("wte.weight").aliases == ("head.weight",)
    with pytest.raises(KeyError):
        layout.tensor("head.weight")


@pytest.mark.parametrize(
    ("tensors", "strategy", "num_fragments", "overlap", "words"),
    [
        ([], Strategy.BALANCED, 24, 2, ["no trainable tensors"]),
        ([spec("a", 2), spec("a", 2)], Strategy.BALANCED, 2, 0, ["'a'", "twice"]),
        ([spec("a", 2), spec("b", 2, aliases=("a",))], Strategy.BALANCED, 2, 0, ["'a'", "twice"]),
        ([spec("a", 2, aliases=("a",))], Strategy.BALANCED, 2, 0, ["'a'", "twice"]),
        (transformer(), Strategy.BALANCED, 2, 2, ["overlap = 2", "num_fragments = 2", "raise"]),
        (transformer(1), Strategy.LAYER, 24, 2, ["only 2", "at most 1", "'balanced'"]),
        ([spec("a", 2)], Strategy.SUB_TENSOR, 24, 2, ["only 2", "overlap to at most 1"]),
        (transformer(), Strategy.SUB_TENSOR, 1, 0, ["num_fragments = 1", "at least 2"]),
        (transformer(), Strategy.BALANCED, 0, 0, ["num_fragments = 0"]),
        ([spec("a", 2)], Strategy.BALANCED, -3, 0, ["num_fragments = -3"]),
    ],
)
def test_what_cannot_be_says_which_setting_helps(tensors, strategy, num_fragments, overlap, words):
    with pytest.raises(UsageError) as caught:
        build_layout(tensors, strategy=strategy, num_fragments=num_fragments, overlap=overlap)
    assert caught.value.reason is Reason.LAYOUT_IMPOSSIBLE
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "int8"}, ["'x.w'", "'int8'", "float32"]),
        ({"dtype": "torch.float32"}, ["'x.w'", "torch.float32"]),
        ({"shape": (3, 0)}, ["'x.w'", "no elements"]),
        ({"shape": (-1,)}, ["'x.w'", "no elements"]),
        ({"role": "head"}, ["'x.w'", "'head'", "embedding, body"]),
        ({"name": ""}, ["empty name"]),
        ({"aliases": ("",)}, ["empty name"]),
    ],
)
def test_a_tensor_that_cannot_be_right_is_refused_by_name(change, words):
    fields = {"name": "x.w", "shape": (2,), "dtype": "float32"} | change
    with pytest.raises(UsageError) as caught:
        TensorSpec(**fields)
    assert caught.value.reason is Reason.LAYOUT_IMPOSSIBLE
    for word in words:
        assert word in caught.value.message


@given(models(), any_strategy, st.integers(1, 9), st.data())
def test_the_layout_always_has_more_fragments_than_overlap(tensors, strategy, num_fragments, data):
    layout = build(tensors, strategy, num_fragments)
    overlap = data.draw(st.integers(0, 9))
    if overlap < layout.num_fragments:
        same = build_layout(
            tensors, strategy=strategy, num_fragments=num_fragments, overlap=overlap
        )
        assert same == layout
    else:
        with pytest.raises(UsageError, match="LAYOUT_IMPOSSIBLE"):
            build_layout(tensors, strategy=strategy, num_fragments=num_fragments, overlap=overlap)


GOLDEN = "2b45619d20c6411fb24ee6a0afbb640f9a4e167a86fc7cb2a922f1bd5b4e8103"


def golden_layout() -> Layout:
    return build_layout(transformer(2), strategy=Strategy.BALANCED, num_fragments=4, overlap=2)


def test_the_fingerprint_of_a_small_layout_never_changes():
    """A change here cuts every stored run off: bump the format tag only with a migration."""
    assert golden_layout().fingerprint == GOLDEN


def test_the_fingerprint_is_the_same_in_another_process_with_another_hash_seed():
    code = (
        "from decoupled_diloco.layout import *;"
        "print(build_layout([TensorSpec(name='h.1.é', shape=(2, 3), dtype='bfloat16',"
        "aliases=('z', 'y')), TensorSpec(name='b', shape=(), dtype='float32')],"
        "strategy=Strategy.SUB_TENSOR, num_fragments=2, overlap=1).fingerprint)"
    )
    path = ":".join(sys.path)
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    tensors = [spec("b"), spec("h.1.é", 2, 3, dtype="bfloat16", aliases=("y", "z"))]
    layout = build_layout(tensors, strategy=Strategy.SUB_TENSOR, num_fragments=2, overlap=1)
    assert found == {layout.fingerprint + "\n"}


CHANGES = [
    {"name": "h.0.other"},
    {"shape": (16, 4)},
    {"dtype": "bfloat16"},
    {"role": Role.EMBEDDING},
    {"aliases": ("tied",)},
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_tensor_changes_the_fingerprint(change):
    tensors = transformer(2)
    changed = [replace(t, **change) if t.name == "h.0.mlp.weight" else t for t in tensors]
    assert changed != tensors
    layout = build_layout(changed, strategy=Strategy.BALANCED, num_fragments=4, overlap=2)
    assert layout.fingerprint != golden_layout().fingerprint


def test_strategy_num_fragments_and_tensors_change_the_fingerprint():
    seen = {golden_layout().fingerprint}
    for strategy in Strategy:
        for num_fragments in (3, 4):
            for tensors in (transformer(2), transformer(3)):
                layout = build_layout(
                    tensors, strategy=strategy, num_fragments=num_fragments, overlap=2
                )
                seen.add(layout.fingerprint)
    # the layer strategy has only three fragments with two blocks
    assert len(seen) == 2 * 2 * len(Strategy) - 1


def test_fragments_beyond_what_the_model_allows_change_nothing():
    some, many = (
        build_layout(transformer(2), strategy=Strategy.BALANCED, num_fragments=n, overlap=2)
        for n in (8, 1000)
    )
    assert some == many


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shape": (16, 4)}, "tensor 'h.0.mlp.weight' has shape (4, 16) here and (16, 4) there"),
        ({"dtype": "float16"}, "tensor 'h.0.mlp.weight' has dtype float32 here and float16 there"),
        (
            {"role": Role.EMBEDDING},
            "tensor 'h.0.mlp.weight' has role body here and embedding there",
        ),
        ({"aliases": ("x",)}, "tensor 'h.0.mlp.weight' has aliases () here and ('x',) there"),
        ({"name": "h.0.mlp.w"}, "tensor 'h.0.mlp.w' of shape (4, 16) is extra there"),
        ({"name": "h.1.mlp.w"}, "tensor 'h.0.mlp.weight' of shape (4, 16) is missing there"),
    ],
)
def test_first_difference_names_the_tensor_and_how_it_differs(change, sentence):
    ours = transformer(2)
    theirs = [replace(t, **change) if t.name == "h.0.mlp.weight" else t for t in ours]
    random.Random(1).shuffle(theirs)
    assert first_difference(ours, theirs) == sentence


def test_first_difference_explains_a_tie_that_one_side_lacks():
    tied = [spec("wte", 9, 2, aliases=("head",))]
    untied = [spec("wte", 9, 2), spec("head", 9, 2)]
    for ours, theirs, where in ((tied, untied, "extra"), (untied, tied, "missing")):
        sentence = first_difference(ours, theirs)
        assert sentence is not None
        assert f"'head' of shape (9, 2) is {where} there" in sentence
        assert "ties it to 'wte'" in sentence


@given(models(), st.randoms(use_true_random=False))
def test_first_difference_is_none_for_the_same_tensors_in_any_order(tensors, rng):
    shuffled = list(tensors)
    rng.shuffle(shuffled)
    assert first_difference(tensors, shuffled) is None


def test_rows_are_those_of_matrices_and_one_for_the_rest():
    def rows(*shape: int) -> int:
        return Piece(tensor="t", dim=0, start=0, stop=1, shape=shape).rows

    assert (rows(), rows(5), rows(5, 2), rows(5, 2, 3)) == (1, 1, 5, 5)
