"""Each strategy of the layout shares the tensors out as it says."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.layout import Fragment, Layout, Piece, Role, Strategy, build_layout
from tests.contract.layout_models import build, models, spec


def body_loads(layout: Layout) -> list[int]:
    """Bytes of each body fragment, in the tensors' own dtypes."""
    return [
        sum(layout.tensor(p.tensor).num_bytes for p in f.pieces)
        for f in layout.fragments
        if f.role is Role.BODY
    ]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(2, 5), st.booleans())
def test_balanced_is_within_four_thirds_of_the_best_partition(sizes, num_fragments, embedding):
    tensors = [spec(f"t{i}", size) for i, size in enumerate(sizes)]
    if embedding:
        tensors.append(spec("wte", 100, 2, role=Role.EMBEDDING))
    layout = build(tensors, Strategy.BALANCED, num_fragments)
    num_bins = min(num_fragments - embedding, len(sizes))
    assert len(body_loads(layout)) == num_bins
    possible = {(0,) * num_bins}
    for size in sizes:
        possible = {
            tuple(sorted((*loads[:i], loads[i] + size, *loads[i + 1 :])))
            for loads in possible
            for i in range(num_bins)
        }
    best = min(max(loads) for loads in possible)
    assert max(body_loads(layout)) * 3 <= best * 4 * 4  # 4 bytes per element


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.integers(1, 24))
def test_balanced_is_within_the_mean_plus_the_largest_tensor(sizes, num_fragments):
    tensors = [spec(f"t{i}", size) for i, size in enumerate(sizes)]
    loads = body_loads(build(tensors, Strategy.BALANCED, num_fragments))
    assert max(loads) <= Fraction(sum(loads), len(loads)) + 4 * max(sizes)


def test_balanced_goes_by_bytes_descending_then_name():
    tensors = [spec("b", 4), spec("a", 4), spec("c", 6, dtype="bfloat16"), spec("d", 2)]
    layout = build_layout(tensors, strategy=Strategy.BALANCED, num_fragments=2, overlap=0)
    # a (16 bytes) -> 0, b (16) -> 1, c (12) -> 0, d (8) -> 1
    assert [[p.tensor for p in f.pieces] for f in layout.fragments] == [["a", "c"], ["b", "d"]]


@given(models(), st.integers(1, 12))
def test_sub_tensor_fragments_exceed_the_mean_by_at_most_one_granule(tensors, num_fragments):
    layout = build(tensors, Strategy.SUB_TENSOR, num_fragments)
    for role in {t.role for t in tensors}:
        sizes = [f.num_elements for f in layout.fragments if f.role == role]
        granules = [
            t.num_elements // (t.shape[1 if role is Role.EMBEDDING and len(t.shape) == 2 else 0])
            if t.shape
            else 1
            for t in tensors
            if t.role == role
        ]
        assert max(sizes) <= Fraction(sum(sizes), len(sizes)) + max(granules)


@given(models(), st.integers(1, 12))
def test_sub_tensor_shares_fragments_between_roles_as_evenly_as_can_be(tensors, num_fragments):
    layout = build(tensors, Strategy.SUB_TENSOR, num_fragments)
    total, limit = {}, {}
    for t in tensors:
        total[t.role] = total.get(t.role, 0) + t.num_elements
        cut = 1 if t.role is Role.EMBEDDING and len(t.shape) == 2 else 0
        limit[t.role] = limit.get(t.role, 0) + (t.shape[cut] if t.shape else 1)
    roles = list(total)
    possible = [
        counts
        for counts in itertools.product(*(range(1, limit[r] + 1) for r in roles))
        if sum(counts) == layout.num_fragments
    ]

    def largest_mean(counts: tuple[int, ...]) -> Fraction:
        return max(Fraction(total[r], n) for r, n in zip(roles, counts, strict=True))

    got = tuple(sum(f.role == r for f in layout.fragments) for r in roles)
    assert layout.num_fragments == min(num_fragments, sum(limit.values()))
    assert largest_mean(got) == min(map(largest_mean, possible))


def test_sub_tensor_cuts_an_embedding_by_columns_and_a_matrix_by_rows():
    tensors = [spec("wte", 10, 6, role=Role.EMBEDDING), spec("w", 12, 5)]
    layout = build_layout(tensors, strategy=Strategy.SUB_TENSOR, num_fragments=4, overlap=2)
    assert layout.fragments == (
        Fragment(
            index=0,
            role=Role.EMBEDDING,
            pieces=(Piece(tensor="wte", dim=1, start=0, stop=3, shape=(10, 3)),),
        ),
        Fragment(
            index=1,
            role=Role.EMBEDDING,
            pieces=(Piece(tensor="wte", dim=1, start=3, stop=6, shape=(10, 3)),),
        ),
        Fragment(
            index=2,
            role=Role.BODY,
            pieces=(Piece(tensor="w", dim=0, start=0, stop=6, shape=(6, 5)),),
        ),
        Fragment(
            index=3,
            role=Role.BODY,
            pieces=(Piece(tensor="w", dim=0, start=6, stop=12, shape=(6, 5)),),
        ),
    )


def held(layout: Layout) -> list[list[str]]:
    return [[p.tensor for p in f.pieces] for f in layout.fragments]


def test_layer_spreads_blocks_by_stride_as_the_paper_does():
    tensors = [spec(f"h.{i}.{w}", 2, 2) for i in range(1, 7) for w in ("a", "b")]
    tensors += [spec("wte", 9, 2, role=Role.EMBEDDING), spec("norm", 2)]
    layout = build_layout(tensors, strategy=Strategy.LAYER, num_fragments=4, overlap=2)
    assert held(layout) == [
        ["wte"],
        ["h.1.a", "h.1.b", "h.4.a", "h.4.b", "norm"],
        ["h.2.a", "h.2.b", "h.5.a", "h.5.b"],
        ["h.3.a", "h.3.b", "h.6.a", "h.6.b"],
    ]


def test_layer_orders_blocks_by_number_and_gives_at_most_one_fragment_per_block():
    tensors = [spec(f"h.{i}.w", 2) for i in (10, 9, 2)]
    layout = build_layout(tensors, strategy=Strategy.LAYER, num_fragments=24, overlap=2)
    assert held(layout) == [["h.2.w"], ["h.9.w"], ["h.10.w"]]


def test_layer_keeps_the_blocks_of_two_stacks_apart():
    tensors = [spec("decoder.0.w", 2), spec("encoder.0.w", 2)]
    layout = build_layout(tensors, strategy=Strategy.LAYER, num_fragments=9, overlap=1)
    assert layout.num_fragments == 2


def test_tensor_spreads_the_tensors_of_blocks_by_stride_as_the_paper_does():
    tensors = [spec(f"h.{i}.w", 2) for i in range(1, 10)]
    tensors.append(spec("wte", 9, 2, role=Role.EMBEDDING))
    layout = build_layout(tensors, strategy=Strategy.TENSOR, num_fragments=4, overlap=2)
    assert held(layout)[1:] == [
        [f"h.{i}.w" for i in trio] for trio in ((1, 4, 7), (2, 5, 8), (3, 6, 9))
    ]


@pytest.mark.parametrize("strategy", [Strategy.LAYER, Strategy.TENSOR])
def test_without_embeddings_fragment_0_holds_what_has_no_block(strategy):
    tensors = [spec("norm", 2), spec("head", 9, 2), *(spec(f"h.{i}.w", 2) for i in range(3))]
    layout = build_layout(tensors, strategy=strategy, num_fragments=4, overlap=2)
    assert held(layout) == [["head", "norm"], ["h.0.w"], ["h.1.w"], ["h.2.w"]]


@pytest.mark.parametrize("strategy", [Strategy.LAYER, Strategy.TENSOR])
def test_an_embedding_inside_a_block_joins_the_embedding_fragment(strategy):
    tensors = [
        spec("wte", 9, 2, role=Role.EMBEDDING),
        spec("h.0.ple", 9, 2, role=Role.EMBEDDING),
        spec("h.0.w", 2),
        spec("h.1.w", 2),
    ]
    layout = build_layout(tensors, strategy=strategy, num_fragments=4, overlap=2)
    assert held(layout) == [["h.0.ple", "wte"], ["h.0.w"], ["h.1.w"]]


def test_a_name_with_endless_digits_is_a_name():
    layout = build_layout(
        [spec("h." + "9" * 5000, 2)], strategy=Strategy.LAYER, num_fragments=1, overlap=0
    )
    assert layout.num_fragments == 1
