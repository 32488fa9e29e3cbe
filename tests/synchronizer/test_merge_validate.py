"""Checks of a decoded outer gradient, and the norms they rest on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.merge.norms import row_norms, vector_norm
from synchronizer_server.merge.validate import MAX_NORM, check_outer_gradient


def refused(vector: torch.Tensor, num_elements: int, norm_bound: float | None = None) -> Reason:
    before = vector.clone()
    with pytest.raises(DilocoError) as caught:
        check_outer_gradient(vector, num_elements=num_elements, norm_bound=norm_bound)
    assert torch.equal(vector.nan_to_num(), before.nan_to_num())
    return caught.value.reason


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.one_of(st.integers(1, 50), st.sampled_from([4095, 4096, 8191, 8192, 8193, 20_000])),
    st.sampled_from([1.0, 1e-3, 1e-18, 1e-30, 1e-42, 1e18, 1e30]),
    st.integers(0, 2**31),
)
def test_row_norms_equal_the_sums_in_float64(
    rows: int, columns: int, scale: float, seed: int
) -> None:
    """Accurate at any length and scale, where squares in fp32 would overflow or vanish."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator) * scale
    expected = [math.sqrt(math.fsum(float(x) ** 2 for x in row)) for row in matrix]
    assert row_norms(matrix).tolist() == pytest.approx(expected, rel=1e-6, abs=0)


def test_norm_of_a_long_vector_is_accurate() -> None:
    """One fp32 sum over so many equal squares would be off by far more."""
    assert vector_norm(torch.full((3_000_001,), 0.1)) == pytest.approx(
        float(torch.tensor(0.1)) * math.sqrt(3_000_001), rel=1e-6
    )


def test_only_doubtful_rows_are_summed_again() -> None:
    """Zero, tiny, huge and ordinary rows beside one another each get their own norm."""
    matrix = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3e-30, 4e-30], [3e30, 4e30], [math.inf, 1.0]])
    assert row_norms(matrix).tolist() == pytest.approx([0, 5, 5e-30, 5e30, math.inf], rel=1e-6)


def test_returns_the_norm_of_a_good_vector() -> None:
    vector = torch.tensor([3.0, -4.0])
    assert check_outer_gradient(vector, num_elements=2) == 5.0
    assert check_outer_gradient(vector, num_elements=2, norm_bound=5.0) == 5.0
    assert check_outer_gradient(torch.zeros(3), num_elements=3, norm_bound=1.0) == 0.0


def test_wrong_shape_or_dtype_is_malformed() -> None:
    assert refused(torch.zeros(3), 4) is Reason.MALFORMED
    assert refused(torch.zeros(2, 2), 4) is Reason.MALFORMED
    assert refused(torch.zeros(4, dtype=torch.float64), 4) is Reason.MALFORMED
    assert refused(torch.zeros(4, dtype=torch.bfloat16), 4) is Reason.MALFORMED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 4096, 9999])
def test_a_single_non_finite_value_is_found(value: float, position: int) -> None:
    """Anywhere in the vector, in a full block of the norm or in its tail."""
    vector = torch.ones(10_000)
    vector[position] = value
    assert refused(vector, 10_000, norm_bound=1e9) is Reason.NON_FINITE


def test_norm_above_the_bound_is_refused() -> None:
    assert refused(torch.tensor([3.0, 4.0]), 2, norm_bound=4.99) is Reason.NORM_BOUND


def test_without_a_bound_overflowing_norms_are_still_refused() -> None:
    assert refused(torch.tensor([2 * MAX_NORM]), 1) is Reason.NORM_BOUND
    assert refused(torch.tensor([2 * MAX_NORM]), 1, norm_bound=math.inf) is Reason.NORM_BOUND
