"""Weight of a contribution: tokens^2 / steps, and counters that cannot be true."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.weights import MAX_STEPS, MAX_TOKENS, contribution_weight


@given(st.integers(0, MAX_TOKENS), st.integers(1, MAX_STEPS))
def test_is_the_exact_quotient_rounded_once(num_tokens: int, num_steps: int) -> None:
    exact = Fraction(num_tokens) ** 2 / num_steps
    assert contribution_weight(num_tokens, num_steps) == float(exact)


def test_values_of_the_paper() -> None:
    """Half the batch at the same steps weighs a quarter; half the span at the same batch a half."""
    whole = contribution_weight(22 * 1024, 22)
    assert whole == 1024**2 * 22
    assert contribution_weight(22 * 512, 22) == whole / 4
    assert contribution_weight(11 * 1024, 11) == whole / 2


def test_no_tokens_weigh_nothing() -> None:
    assert contribution_weight(0, 5) == 0.0


@pytest.mark.parametrize(
    ("num_tokens", "num_steps"),
    [
        (10, 0),
        (10, -1),
        (-1, 1),
        (MAX_TOKENS + 1, 1),
        (10, MAX_STEPS + 1),
        (True, 1),
        (10, True),
        (10.0, 1),
        (float("nan"), 1),
        (10, float("inf")),
    ],
)
def test_impossible_counters_are_refused(num_tokens: int, num_steps: int) -> None:
    """A broken or hostile learner cannot buy weight, divide by zero or make it infinite."""
    with pytest.raises(DilocoError) as caught:
        contribution_weight(num_tokens, num_steps)
    assert caught.value.reason is Reason.BAD_COUNTERS
