"""Average and RDA against references written in plain float64 Python."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.layout import Piece
from synchronizer_server.merge.accumulate import Accumulator, Granularity, MergeMethod

SHAPES = [(4, 5), (7,), (), (3, 2, 2), (1, 6)]
PIECES = [
    Piece(tensor=f"t{i}", dim=0, start=0, stop=shape[0] if shape else 1, shape=shape)
    for i, shape in enumerate(SHAPES)
]
NUM_ELEMENTS = sum(piece.num_elements for piece in PIECES)
METHODS = [(MergeMethod.AVERAGE, Granularity.TENSOR)] + [
    (MergeMethod.RDA, granularity) for granularity in Granularity
]


def units(granularity: Granularity) -> list[range]:
    """Index ranges of the vectors that have a norm of their own."""
    if granularity is Granularity.FRAGMENT:
        return [range(NUM_ELEMENTS)]
    ranges, start = [], 0
    for shape in SHAPES:
        size = math.prod(shape)
        rows = shape[0] if granularity is Granularity.ROW and len(shape) > 1 else 1
        step = size // rows
        ranges += [range(start + row * step, start + (row + 1) * step) for row in range(rows)]
        start += size
    return ranges


def reference(
    vectors: list[list[float]], weights: list[float], method: MergeMethod, granularity: Granularity
) -> list[float]:
    """Weighted average or RDA, spelled out."""
    total = math.fsum(weights)
    merged = [
        math.fsum(w * v[i] for v, w in zip(vectors, weights, strict=True)) / total
        for i in range(NUM_ELEMENTS)
    ]
    if method is MergeMethod.AVERAGE:
        return merged
    for unit in units(granularity):
        norms = [math.sqrt(math.fsum(v[i] ** 2 for i in unit)) for v in vectors]
        mean_norm = math.fsum(w * n for w, n in zip(weights, norms, strict=True)) / total
        direction = [
            math.fsum(
                w * v[i] / n for v, w, n in zip(vectors, weights, norms, strict=True) if n > 0
            )
            / total
            for i in unit
        ]
        length = math.sqrt(math.fsum(x * x for x in direction))
        if length >= 1e-6:
            for i, x in zip(unit, direction, strict=True):
                merged[i] = mean_norm * x / length
    return merged


def merge(
    vectors: list[torch.Tensor],
    weights: list[float],
    method: MergeMethod = MergeMethod.RDA,
    granularity: Granularity = Granularity.TENSOR,
) -> torch.Tensor:
    accumulator = Accumulator(PIECES, method, granularity)
    for vector, weight in zip(vectors, weights, strict=True):
        accumulator.add(vector, weight)
    return accumulator.result()


def random_vectors(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_ELEMENTS, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(("method", "granularity"), METHODS)
@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e14), min_size=1, max_size=6),
    st.floats(-6, 6),
    st.data(),
)
def test_equals_the_reference(
    method: MergeMethod,
    granularity: Granularity,
    weights: list[float],
    log_scale: float,
    data: st.DataObject,
) -> None:
    """Any number of contributors, any weights, any scale, with zero tensors among them."""
    seed = data.draw(st.integers(0, 2**31))
    vectors = [v * 10**log_scale for v in random_vectors(len(weights), seed)]
    for vector in vectors:
        for index in data.draw(st.sets(st.sampled_from(range(len(SHAPES))))):
            unit = units(Granularity.TENSOR)[index]
            vector[unit.start : unit.stop] = 0
    expected = reference([v.tolist() for v in vectors], weights, method, granularity)
    torch.testing.assert_close(
        merge(vectors, weights, method, granularity).double(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=2e-4,
        atol=2e-5 * 10**log_scale,
    )


@pytest.mark.parametrize(("method", "granularity"), METHODS)
@pytest.mark.parametrize("weight", [1e-9, 1.0, 3.7e7, 1e26])
def test_a_single_contributor_is_merged_into_itself(
    method: MergeMethod, granularity: Granularity, weight: float
) -> None:
    """Exactly, denormals included: with one learner alive the outer gradient is that learner's."""
    vector = random_vectors(1)[0]
    vector[:4] = torch.tensor([0.0, 1e-41, -3e-39, 1e20])
    silent = torch.full_like(vector, 5.0)
    assert torch.equal(merge([vector], [weight], method, granularity), vector)
    assert torch.equal(merge([silent, vector], [0.0, weight], method, granularity), vector)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_rda_keeps_the_mean_norm_of_every_unit(granularity: Granularity) -> None:
    """Near-orthogonal contributions keep one learner's length, where averaging shrinks it."""
    vectors, weights = random_vectors(8), [float(i + 1) for i in range(8)]
    merged = merge(vectors, weights, MergeMethod.RDA, granularity)
    average = merge(vectors, weights, MergeMethod.AVERAGE)
    for unit in units(granularity):
        part = slice(unit.start, unit.stop)
        norms = sum(w * v[part].norm().item() for v, w in zip(vectors, weights, strict=True))
        assert merged[part].norm().item() == pytest.approx(norms / sum(weights), rel=1e-5)
        assert average[part].norm() <= merged[part].norm() * 1.00001
    assert average.norm() < 0.6 * merged.norm()


@pytest.mark.parametrize("granularity", list(Granularity))
def test_zero_vector_shrinks_the_norm_but_not_the_direction(granularity: Granularity) -> None:
    """It adds 0 to both sums and its weight to sum w."""
    vector = random_vectors(1)[0]
    merged = merge([vector, torch.zeros_like(vector)], [3.0, 1.0], MergeMethod.RDA, granularity)
    torch.testing.assert_close(merged, 0.75 * vector)


@pytest.mark.parametrize(("method", "granularity"), METHODS)
def test_all_zero_vectors_merge_into_zero(method: MergeMethod, granularity: Granularity) -> None:
    zeros = torch.zeros(NUM_ELEMENTS)
    assert torch.equal(merge([zeros] * 3, [1.0, 2.0, 3.0], method, granularity), zeros)


def test_nothing_merges_into_zero() -> None:
    """No contribution, or contributions of no weight, move nothing."""
    zeros = torch.zeros(NUM_ELEMENTS)
    assert torch.equal(merge([], []), zeros)
    assert torch.equal(merge(random_vectors(2), [0.0, 0.0]), zeros)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_cancelling_directions_fall_back_to_the_average(granularity: Granularity) -> None:
    """v and -3v at equal weights have no direction; their average is -v."""
    vector = random_vectors(1)[0]
    merged = merge([vector, -3 * vector], [2.0, 2.0], MergeMethod.RDA, granularity)
    torch.testing.assert_close(merged, -vector)


def test_only_the_units_that_cancel_fall_back() -> None:
    first, second = random_vectors(2)
    second[:5] = -2 * first[:5]
    merged = merge([first, second], [1.0, 1.0], MergeMethod.RDA, Granularity.ROW)
    torch.testing.assert_close(merged[:5], -0.5 * first[:5])
    norm = (first[5:10].norm() + second[5:10].norm()) / 2
    torch.testing.assert_close(merged[5:10].norm(), norm)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_unresolvable_vectors_do_not_poison_the_sums(granularity: Granularity) -> None:
    """The direction of a denormal vector would be a division of noise, or overflow."""
    vector = random_vectors(1)[0]
    merged = merge(
        [torch.full_like(vector, 1e-44), vector, vector],
        [1e7, 1e7, 1e7],
        MergeMethod.RDA,
        granularity,
    )
    torch.testing.assert_close(merged, vector * (2 / 3))


@pytest.mark.parametrize(("method", "granularity"), METHODS)
def test_scale_of_the_weights_does_not_matter(
    method: MergeMethod, granularity: Granularity
) -> None:
    """By a power of two not even in the last bit."""
    vectors = random_vectors(3)
    merged = merge(vectors, [1.0, 2.5, 0.5], method, granularity)
    for factor in (2.0**-40, 2.0**50):
        weights = [factor, 2.5 * factor, 0.5 * factor]
        assert torch.equal(merge(vectors, weights, method, granularity), merged)


@pytest.mark.parametrize(("method", "granularity"), METHODS)
def test_absurd_ratios_of_weights_stay_exact(method: MergeMethod, granularity: Granularity) -> None:
    """A feather-weight that comes first neither overflows the sums nor blurs what follows."""
    light, *heavy = [vector * 1e10 for vector in random_vectors(3)]
    merged = merge([light, *heavy], [1e-9, 1e26, 1e26], method, granularity)
    expected = merge(heavy, [1.0, 1.0], method, granularity)
    torch.testing.assert_close(merged, expected)


@pytest.mark.parametrize(("method", "granularity"), METHODS)
def test_order_of_arrival_matters_only_by_rounding(
    method: MergeMethod, granularity: Granularity
) -> None:
    vectors, weights = random_vectors(4), [1.0, 7.0, 3.0, 0.25]
    merged = merge(vectors, weights, method, granularity)
    for order in permutations(range(4)):
        torch.testing.assert_close(
            merge([vectors[i] for i in order], [weights[i] for i in order], method, granularity),
            merged,
            rtol=1e-4,
            atol=1e-5,
        )
    assert torch.equal(merge(vectors, weights, method, granularity), merged), "replay is exact"


def test_merged_weight_is_the_sum_of_the_accepted_weights() -> None:
    accumulator = Accumulator(PIECES, MergeMethod.RDA, Granularity.TENSOR)
    for vector, weight in zip(random_vectors(4), [2.0, 0.0, 1e12, 0.125], strict=True):
        accumulator.add(vector, weight)
    assert accumulator.num_contributions == 4
    assert accumulator.total_weight == 2.0 + 0.0 + 1e12 + 0.125


@pytest.mark.parametrize(("method", "granularity"), METHODS)
def test_result_can_be_taken_at_any_time_and_owns_its_memory(
    method: MergeMethod, granularity: Granularity
) -> None:
    """Neither the caller's vectors (reused buffers) nor earlier results alias the sums."""
    accumulator = Accumulator(PIECES, method, granularity)
    vectors = random_vectors(3)
    buffer = torch.empty(NUM_ELEMENTS)
    for count, vector in enumerate(vectors, start=1):
        buffer.copy_(vector)
        accumulator.add(buffer, 1.0)
        assert torch.equal(buffer, vector)
        buffer.fill_(math.nan)
        expected = merge(vectors[:count], [1.0] * count, method, granularity)
        assert torch.equal(accumulator.result(), expected)
        accumulator.result().fill_(math.nan)
