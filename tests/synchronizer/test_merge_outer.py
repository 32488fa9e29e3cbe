"""The outer optimizer against torch.optim.SGD and against the formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.errors import Reason, UsageError
from synchronizer_server.merge.outer import OuterSettings, outer_step


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.01, 2.0),
    st.sampled_from([0.0, 0.4, 0.9, 0.99]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_follows_torch_sgd(lr: float, momentum: float, nesterov: bool, seed: int) -> None:
    """Ten steps with given gradients end where torch's own optimizer ends."""
    generator = torch.Generator().manual_seed(seed)
    ours = torch.randn(33, generator=generator)
    buffer = torch.zeros(33)
    theirs = torch.nn.Parameter(ours.clone())
    sgd = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    outer = OuterSettings(learning_rate=lr, momentum=momentum, nesterov=nesterov)
    for _ in range(10):
        gradient = torch.randn(33, generator=generator)
        theirs.grad = gradient.clone()
        sgd.step()
        ours, buffer = outer_step(ours, buffer, gradient, outer)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.01, 2.0),
    st.sampled_from([0.0, 0.4, 0.9]),
    st.booleans(),
    st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3),
)
def test_is_the_formula(lr: float, mu: float, nesterov: bool, values: list[float]) -> None:
    x, b, d = values
    outer = OuterSettings(learning_rate=lr, momentum=mu, nesterov=nesterov)
    arguments = [torch.tensor([value]) for value in values]
    new_x, new_b = outer_step(arguments[0], arguments[1], arguments[2], outer)
    b = mu * b + d
    x -= lr * (d + mu * b if nesterov else b)
    assert new_b.item() == pytest.approx(b, rel=1e-5, abs=1e-5)
    assert new_x.item() == pytest.approx(x, rel=1e-5, abs=1e-5)
    assert [tensor.item() for tensor in arguments] == values, "arguments are left as they are"


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, True), (0.9, True), (0.9, False)])
def test_results_share_no_memory_with_arguments(momentum: float, nesterov: bool) -> None:
    """The state before must survive whatever is done to the state after."""
    arguments = torch.ones(2), torch.ones(2), torch.ones(2)
    outer = OuterSettings(learning_rate=1.0, momentum=momentum, nesterov=nesterov)
    for result in outer_step(*arguments, outer):
        result.fill_(99.0)
    assert all(torch.equal(tensor, torch.ones(2)) for tensor in arguments)


def test_rate_one_without_momentum_takes_the_mean_of_the_learners() -> None:
    """x - (x - local) = local: the step that the average of the parameters would be."""
    base, local = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])
    outer = OuterSettings(learning_rate=1.0, momentum=0.0, nesterov=True)
    assert torch.equal(outer_step(base, torch.zeros(2), base - local, outer)[0], local)


@pytest.mark.parametrize(
    ("learning_rate", "momentum"),
    [
        (0.0, 0.5),
        (-1.0, 0.5),
        (math.nan, 0.5),
        (math.inf, 0.5),
        (1.0, 1.0),
        (1.0, -0.1),
        (1.0, math.nan),
    ],
)
def test_impossible_settings_are_refused(learning_rate: float, momentum: float) -> None:
    with pytest.raises(UsageError) as caught:
        OuterSettings(learning_rate=learning_rate, momentum=momentum, nesterov=True)
    assert caught.value.reason is Reason.CONFIG_INVALID
