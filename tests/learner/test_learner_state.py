"""Saving, loading, and misuse."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from learner_kit import NAME, local_vector, make_learner, make_model, make_settings, train
from scripted_synchronizer import ScriptedSynchronizer, until

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.v1 import synchronizer_pb2


@pytest.mark.asyncio
async def test_a_saved_state_goes_on_with_its_local_progress_where_the_base_is_still_current():
    service = ScriptedSynchronizer(make_settings(codec_up="fp32"))
    model = make_model()
    async with make_learner(service, model) as learner:
        for _ in range(2):
            train(model)
            learner.step(num_tokens=5)
        state, weights = learner.state_dict(), model.state_dict()
        local = [local_vector(learner, p).clone() for p in range(4)]
        old = {p: vector for p, (_, vector) in service.published.items()}
    state = safetensors.torch.load(safetensors.torch.save(state))

    moved = service.publish(2, 2, torch.ones(service.published[2][1].numel()))
    reborn = make_model(9)
    reborn.load_state_dict(weights)
    learner = make_learner(service, reborn)
    learner.load_state_dict(state)
    async with learner:
        assert learner.local_step == 2
        assert torch.equal(local_vector(learner, 2), moved)
        assert torch.equal(local_vector(learner, 1), local[1])
        train(reborn)
        learner.step(num_tokens=5)
        expected = old[1] - local_vector(learner, 1)
        service.pull(NAME, 5, 1)
        service.say(NAME, schedule=synchronizer_pb2.Schedule(global_step=2, due_fragments=[1, 2]))
        await until(lambda: service.declined or service.pushes)
        train(reborn, 0.0)
        learner.step(num_tokens=5)
        service.pull(NAME, 9, 1)
        await until(lambda: service.pushes)
        pushed = service.pushes[0]
        assert torch.equal(pushed.vector, expected)
        assert (pushed.header.num_steps, pushed.header.num_tokens) == (4, 20)
        with pytest.raises(UsageError, match="before entering"):
            learner.load_state_dict(state)


@pytest.mark.asyncio
async def test_the_published_copy_replaces_local_progress_for_whoever_saves_the_model():
    """After the loop every learner's model differs; what is saved must be what all share."""
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        for _ in range(2):
            train(model)
            learner.step(num_tokens=5)
        moved = service.publish(2, 2, torch.ones(service.published[2][1].numel()))
        await until(lambda: learner.status.num_updates > 4)
        assert learner.adopt_published() == 2
        assert torch.equal(local_vector(learner, 2), moved)
        for fragment, (_, vector) in service.published.items():
            assert torch.equal(local_vector(learner, fragment), vector)


@pytest.mark.asyncio
async def test_a_state_of_another_layout_is_refused():
    service = ScriptedSynchronizer(make_settings())
    async with make_learner(service, make_model()) as learner:
        state = learner.state_dict()
    other = ScriptedSynchronizer(make_settings(strategy="tensor", num_fragments=3))
    learner = make_learner(other, make_model())
    learner.load_state_dict(state)
    with pytest.raises(DilocoError, match="saved state") as caught:
        await learner.__aenter__()
    assert caught.value.reason is Reason.LAYOUT_MISMATCH


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop("published.1"),
        lambda s: s.update(format=torch.tensor([7])),
        lambda s: s.update(counters=torch.tensor([1, 2])),
        lambda s: s.update({"published.0": s["published.0"].to(torch.float64)}),
        lambda s: s.update(fingerprint=torch.zeros(3, dtype=torch.uint8)),
    ],
)
@pytest.mark.asyncio
async def test_a_spoiled_state_is_refused_whole(spoil):
    service = ScriptedSynchronizer(make_settings())
    async with make_learner(service, make_model()) as learner:
        state = learner.state_dict()
    spoil(state)
    with pytest.raises(UsageError, match="no saved state") as caught:
        make_learner(service, make_model()).load_state_dict(state)
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_misuse_is_told():
    for name in ("global_step", "local_step", "shard", "settings", "incarnation", "finished"):
        with pytest.raises(UsageError, match="has not joined"):
            getattr(make_learner(ScriptedSynchronizer(make_settings()), make_model()), name)
    service = ScriptedSynchronizer(make_settings())
    with pytest.raises(UsageError, match="learner_id is empty"):
        make_learner(service, make_model(), learner_id="")
    with pytest.raises(UsageError, match="address, or a transport"):
        make_learner(service, make_model(), transport=None)
    with pytest.raises(UsageError, match="inside 'with learner:'"):
        make_learner(service, make_model()).step(num_tokens=1)
