"""Published copy, residual and momentum of a fragment, and the update that moves them."""

from __future__ import annotations

import math

import pytest
import torch

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.merge.fragment_state import FragmentState, advance, apply_update, rebase
from synchronizer_server.merge.outer import OuterSettings, outer_step

BF16 = get_codec("bf16")
OUTER = OuterSettings(learning_rate=0.8, momentum=0.4, nesterov=True)


def randn(num_elements: int, seed: int) -> torch.Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


def copies(state: FragmentState) -> list[torch.Tensor]:
    return [state.published.clone(), state.residual.clone(), state.momentum.clone()]


@pytest.mark.parametrize("codec_name", ["bf16", "fp32"])
def test_learners_hold_the_published_copy_bit_for_bit(codec_name: str) -> None:
    """Over 50 updates, with one plain add at the learner; also for one that starts midway."""
    codec = get_codec(codec_name)
    state = FragmentState.seeded(randn(501, seed=0))
    learner, late_learner = state.published.clone(), None
    for t in range(50):
        merged = randn(501, seed=t + 1) * 10.0 ** ((t % 9) - 7)
        state, payload = advance(state, merged, OUTER, codec)
        learner = learner + codec.decode(bytes(payload), 501)
        if late_learner is not None:
            late_learner = apply_update(late_learner, payload, codec)
        elif t == 20:
            late_learner = state.published.clone()
        assert torch.equal(learner.view(torch.int32), state.published.view(torch.int32))
    assert late_learner is not None
    assert torch.equal(late_learner.view(torch.int32), state.published.view(torch.int32))


def test_residual_carries_what_the_codec_lost() -> None:
    """Published + residual follows the fp32 trajectory without a codec; what is published stays
    within one rounding of an update, where forgetting the residual would drift away."""
    state = FragmentState.seeded(randn(301, seed=0))
    exact, momentum = state.published.clone(), state.momentum.clone()
    forgetful = state.published.clone()
    for t in range(200):
        merged = randn(301, seed=7) * 0.01 + randn(301, seed=t + 1) * 0.001
        exact, momentum = outer_step(exact, momentum, merged, OUTER)
        forgetful = apply_update(forgetful, BF16.encode(-OUTER.learning_rate * merged), BF16)
        state, _ = advance(state, merged, OUTER, BF16)
        torch.testing.assert_close(state.published + state.residual, exact, rtol=1e-5, atol=1e-4)
        assert torch.equal(state.momentum, momentum)
    assert (state.published - exact).abs().max() < 3e-4
    assert state.residual.abs().max() < 3e-4


def test_small_updates_are_not_lost_to_the_codec() -> None:
    """A step far below the codec's resolution of the last one still arrives, within few rounds."""
    state = FragmentState.seeded(torch.zeros(1))
    plain = OuterSettings(learning_rate=1.0, momentum=0.0, nesterov=False)
    state, _ = advance(state, torch.tensor([-1.001]), plain, BF16)
    assert state.published.item() != pytest.approx(1.001, abs=1e-4)
    state, _ = advance(state, torch.tensor([0.0]), plain, BF16)
    assert state.published.item() == pytest.approx(1.001, abs=1e-5)


def test_a_commit_that_fails_leaves_the_state_as_it_was() -> None:
    """Nothing of the old state, nor the merged outer gradient, is changed by advance."""
    state, _ = advance(FragmentState.seeded(randn(40, seed=0)), randn(40, seed=1), OUTER, BF16)
    before, merged = copies(state), randn(40, seed=2)
    advanced, payload = advance(state, merged, OUTER, BF16)
    for tensor in (advanced.published, advanced.residual, advanced.momentum):
        tensor.fill_(math.nan)
    assert all(map(torch.equal, before, copies(state)))
    assert torch.equal(merged, randn(40, seed=2))
    assert bytes(advance(state, merged, OUTER, BF16)[1]) == bytes(payload), "and is repeatable"


def test_seeded_state_owns_its_memory() -> None:
    parameters = torch.ones(3)
    state = FragmentState.seeded(parameters)
    parameters.fill_(9.0)
    assert torch.equal(state.published, torch.ones(3))
    assert not state.residual.any()
    assert not state.momentum.any()


def test_denormals_are_kept() -> None:
    """Flushing them to zero on one side alone would part the copies."""
    tiny = torch.tensor([1e-40, -1e-44, 2e-39])
    plain = OuterSettings(learning_rate=1.0, momentum=0.0, nesterov=False)
    state, payload = advance(FragmentState.seeded(torch.zeros(3)), -tiny, plain, BF16)
    assert (state.published != 0).tolist() == [True, False, True]
    assert torch.equal(state.published + state.residual, tiny)
    assert torch.equal(apply_update(torch.zeros(3), payload, BF16), state.published)


@pytest.mark.parametrize("step", [3e38, math.inf, math.nan])
def test_a_step_to_infinity_is_refused(step: float) -> None:
    """The copy that learners hold is never poisoned, and the state before still serves."""
    state = FragmentState.seeded(torch.tensor([1.0, -3e38]))
    before = copies(state)
    with pytest.raises(DilocoError) as caught:
        advance(state, torch.tensor([0.0, step]), OUTER, BF16)
    assert caught.value.reason is Reason.NON_FINITE
    assert all(map(torch.equal, before, copies(state)))


def test_rebase_moves_an_outer_gradient_to_a_newer_base() -> None:
    """v = base - local becomes now - local, as if the learner had applied the update."""
    base, now, local = randn(30, seed=1), randn(30, seed=2), randn(30, seed=3)
    vector = base - local
    rebased = rebase(vector, published_now=now, published_base=base)
    torch.testing.assert_close(rebased, now - local)
    assert torch.equal(vector, base - local)
    assert torch.equal(rebase(vector, published_now=base, published_base=base), vector)
