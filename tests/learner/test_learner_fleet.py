"""What goes up and what comes down, against a scripted synchronizer, in real messages."""

from __future__ import annotations

import asyncio

import pytest
import torch
from learner_kit import NAME, local_vector, make_learner, make_model, make_settings, train
from scripted_synchronizer import ScriptedSynchronizer, sha, until

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.errors import DilocoError, Reason
from learner_client import State


@pytest.mark.asyncio
async def test_the_first_learner_seeds_and_another_gets_the_same_parameters():
    service = ScriptedSynchronizer(make_settings())
    first, second = make_model(1), make_model(2)
    before = [p.detach().clone() for p in first.parameters()]
    async with make_learner(service, first) as a:
        assert a.status.state is State.TRAINING
        assert a.status.online
        async with make_learner(service, second, learner_id="learner-1"):
            for mine, other, seed in zip(
                first.parameters(), second.parameters(), before, strict=True
            ):
                assert torch.equal(mine, seed)
                assert torch.equal(other, seed)
    assert [leave.learner_id for leave in service.leaves] == ["learner-1", NAME]


@pytest.mark.asyncio
async def test_an_update_lands_at_the_boundary_bit_for_bit_and_resets_only_its_fragment():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        train(model)
        learner.step(num_tokens=10)
        published = service.publish(1, 1, torch.randn(service.published[1][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        untouched = local_vector(learner, 1)
        assert not torch.equal(untouched, published), "nothing changes between boundaries"
        other = local_vector(learner, 2)
        learner.step(num_tokens=10)
        assert torch.equal(local_vector(learner, 1), published)
        assert torch.equal(local_vector(learner, 2), other)
        assert learner.global_step == 1
        counters = learner._exchange.core.counters
        assert [counters.of(p).num_steps for p in range(4)] == [2, 0, 2, 2]
        assert counters.of(2).num_tokens == 20


@pytest.mark.asyncio
async def test_updates_of_one_fragment_apply_in_order_and_the_last_one_stays():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        size = service.published[2][1].numel()
        service.publish(2, 2, torch.full((size,), 1.0))
        last = service.publish(2, 6, torch.full((size,), -0.5))
        await until(lambda: learner.status.num_updates == 6)
        learner.step(num_tokens=1)
        assert torch.equal(local_vector(learner, 2), last)
        assert learner.global_step == 6


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "bf16+zstd"])
async def test_a_push_carries_base_minus_local_in_the_codec_with_its_counters(dtype, codec):
    service = ScriptedSynchronizer(make_settings(codec_up=codec))
    model = make_model(dtype=dtype)
    async with make_learner(service, model) as learner:
        base = local_vector(learner, 1).clone()
        for _ in range(3):
            train(model)
            learner.step(num_tokens=7)
        expected = get_codec(codec).encode(base - local_vector(learner, 1))
        service.pull(NAME, 1, 1)
        await until(lambda: service.pushes)
        pushed = service.pushes[0]
        assert get_codec(codec).encode(pushed.vector) == expected
        header = pushed.header
        assert (header.num_steps, header.num_tokens, header.local_step) == (3, 21, 3)
        assert header.base.digest == service.published[1][0].digest
        assert header.encoding.codec == codec
        await until(lambda: learner.status.pushes.get("ACCEPTED") == 1)
        assert learner._exchange.core.counters.of(1).num_steps == 0, "accepted: counters restart"
        assert learner._exchange.core.counters.of(2).num_steps == 3


@pytest.mark.asyncio
async def test_the_copy_that_is_pushed_is_of_the_boundary_not_of_the_moment():
    service = ScriptedSynchronizer(make_settings(codec_up="fp32"))
    model = make_model()
    async with make_learner(service, model) as learner:
        base = local_vector(learner, 1).clone()
        train(model)
        learner.step(num_tokens=1)
        expected = base - local_vector(learner, 1)
        train(model, 5.0)
        service.pull(NAME, 1, 1)
        await until(lambda: service.pushes)
        assert torch.equal(service.pushes[0].vector, expected)


@pytest.mark.asyncio
async def test_a_received_update_is_no_base_before_it_is_applied():
    service = ScriptedSynchronizer(make_settings(codec_up="fp32"))
    model = make_model()
    async with make_learner(service, model) as learner:
        first = service.published[1][0]
        train(model)
        learner.step(num_tokens=1)
        service.publish(1, 1, torch.ones(service.published[1][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        service.pull(NAME, 5, 1)
        await until(lambda: service.pushes)
        assert service.pushes[0].header.base.digest == first.digest


@pytest.mark.asyncio
async def test_pulls_that_cannot_be_met_are_declined_with_the_reason():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        await until(lambda: NAME in service._down)
        service.pull(NAME, 1, 1)
        service.pull(NAME, 1, 77)
        service.pull(NAME, 1, 1, group=3)
        await until(lambda: len(service.declined) == 3)
        assert [d.reason for d in service.declined] == [
            "NOT_READY", "UNKNOWN_FRAGMENT", "UNKNOWN_FRAGMENT",
        ]  # fmt: skip
        learner.step(num_tokens=1)
        service.publish(1, 1, torch.ones(service.published[1][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        learner.step(num_tokens=1)
        service.pull(NAME, 5, 1)
        await until(lambda: len(service.declined) == 4)
        assert service.declined[3].reason == "NOT_READY", "no step since the update"
        assert not service.pushes


@pytest.mark.asyncio
@pytest.mark.parametrize("spoil", ["result", "base"])
async def test_an_update_with_a_wrong_digest_leaves_no_trace_and_the_fragment_comes_whole(
    spoil, caplog
):
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        before = local_vector(learner, 1).clone()
        published = service.publish(1, 1, torch.ones(before.numel()), spoil=spoil)
        await until(lambda: len(service.watches) == 2)
        held = {item.fragment for item in service.watches[1].held}
        assert held == {0, 2, 3}, "the broken fragment is asked for in full"
        await until(lambda: learner.status.num_updates == 5)
        assert torch.equal(local_vector(learner, 1), before)
        learner.step(num_tokens=1)
        assert torch.equal(local_vector(learner, 1), published)
        assert learner.status.num_digest_mismatches == (spoil == "result")
    word = "DIGEST_MISMATCH" if spoil == "result" else "BASE_MISMATCH"
    assert word in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("spoil", ["fragment", "payload", "elements"])
async def test_nonsense_on_the_watch_stream_is_refused_and_the_watch_starts_again(spoil):
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        published = service.publish(1, 1, torch.ones(service.published[1][1].numel()), spoil=spoil)
        await until(lambda: learner.status.num_updates == 5)
        assert len(service.watches) == 2
        assert len(service.joins) == 1, "the connection was kept"
        learner.step(num_tokens=1)
        assert torch.equal(local_vector(learner, 1), published)


@pytest.mark.asyncio
async def test_a_broken_push_resumes_where_it_was_staged_under_the_same_key(monkeypatch):
    monkeypatch.setattr("decoupled_diloco.codecs.chunks.CHUNK_BYTES", 64)
    service = ScriptedSynchronizer(make_settings(codec_up="fp32"))
    model = make_model()
    async with make_learner(service, model) as learner:
        base = local_vector(learner, 1).clone()
        train(model)
        learner.step(num_tokens=1)
        service.push_offsets.clear()
        service.cut_push_at = 128
        service.pull(NAME, 1, 1)
        await until(lambda: service.pushes)
        assert torch.equal(service.pushes[0].vector, base - local_vector(learner, 1))
        assert service.push_offsets == [0, 0, 128]


@pytest.mark.asyncio
async def test_a_refused_push_keeps_the_counters_and_is_counted():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        train(model)
        learner.step(num_tokens=1)
        service.answer_pushes_with = Reason.NORM_BOUND
        service.pull(NAME, 1, 1)
        await until(lambda: learner.status.pushes.get("NORM_BOUND") == 1)
        assert learner._exchange.core.counters.of(1).num_steps == 1


@pytest.mark.asyncio
async def test_two_scripted_fleets_with_one_seed_send_the_same_bits():
    async def fleet() -> list[bytes]:
        service = ScriptedSynchronizer(make_settings())
        model = make_model()
        sent = []
        async with make_learner(service, model) as learner:
            for t in range(1, 9):
                train(model, 0.1 * t)
                learner.step(num_tokens=t)
                service.pull(NAME, t, t % 4)
                await until(lambda t=t: len(service.pushes) == t)
                service.publish(t % 4, t, -service.pushes[-1].vector)
                await until(lambda t=t: learner.status.num_updates == 4 + t)
            sent = [sha(pushed.vector) for pushed in service.pushes]
        return sent + [version.digest for version, _ in service.published.values()]

    assert await fleet() == await fleet()


@pytest.mark.asyncio
async def test_an_error_of_the_watch_rpc_that_names_no_fragment_ends_nothing():
    service = ScriptedSynchronizer(make_settings())
    service.refuse_watch = DilocoError(Reason.BASE_MISMATCH, "whatever")
    entering = asyncio.create_task(make_learner(service, make_model()).__aenter__())
    await until(lambda: service.refuse_watch is None)
    learner = await entering
    assert learner.status.online
    await learner.aclose()
