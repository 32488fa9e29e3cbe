"""Learner and background work against a scripted synchronizer, over real protobuf messages."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch
from scripted_synchronizer import ScriptedSynchronizer, sha, until
from torch import nn

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import synchronizer_pb2
from learner_client import Learner, Runtime, State
from learner_client.transport import InMemoryTransport

NAME = "learner-0"


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(16, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 16)
    ).to(dtype)


def make_settings(**changes) -> RunSettings:
    defaults = {"num_fragments": 4, "overlap": 1, "sync_interval": 4}
    return RunSettings(**(defaults | changes))


def make_learner(service, model, **changes) -> Learner:
    defaults = {
        "learner_id": NAME,
        "transport": lambda: InMemoryTransport(service, service),
        "runtime": Runtime.scripted(1),
        "join_timeout_s": 20.0,
    }
    return Learner(model, **(defaults | changes))


def train(model: nn.Module, amount: float = 0.25) -> None:
    """An inner step that is exact in every dtype here."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)


def local_vector(learner: Learner, fragment: int) -> torch.Tensor:
    layout = learner._layout()
    out = torch.empty(layout.fragments[fragment].num_elements)
    learner._parameters.read_fragment(layout.fragments[fragment], out)
    return out


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
async def test_training_goes_on_while_the_synchronizer_is_away_and_it_is_said_once(caplog):
    caplog.set_level(logging.INFO, logger="learner_client")
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        learner.step(num_tokens=1)
        await until(lambda: len(service.steps) == 1)
        service.go_away()
        await until(lambda: not learner.status.online)
        caplog.clear()
        for _ in range(5):
            train(model)
            learner.step(num_tokens=3, loss=2.0)
            await asyncio.sleep(0)
        assert learner.local_step == 6
        assert learner.status.state is State.TRAINING
        assert not caplog.records, "being away is said once"
        service.come_back()
        await until(lambda: learner.status.online and len(service.steps) == 2)
        assert sum("online" in record.message for record in caplog.records) == 1
        merged = service.steps[1]
        assert (merged.num_steps, merged.num_tokens, merged.loss) == (5, 15, 2.0)
        assert merged.clock.own_step == 6
        assert len(service.joins) == 1, "the incarnation is kept, so that no successor is fenced"
        assert all(len(watch.held) == 4 for watch in service.watches[1:]), "nothing comes twice"


@pytest.mark.asyncio
async def test_after_a_restart_of_the_synchronizer_the_same_process_joins_again_and_contributes():
    service = ScriptedSynchronizer(make_settings(codec_up="fp32"))
    model = make_model()
    async with make_learner(service, model) as learner:
        train(model)
        learner.step(num_tokens=1)
        base = service.published[1][1]
        service.restart()
        await until(lambda: len(service.joins) == 2 and learner.status.online)
        first, again = service.joins
        assert again.request_id == first.request_id
        assert (again.previous_incarnation.term, again.previous_incarnation.number) == (1, 1)
        assert [item.fragment for item in again.held] == [0, 1, 2, 3]
        assert again.clock.own_step == 1
        assert again.claim.term == 1
        await until(lambda: len(service.watches) == 2)
        assert len(service.watches[1].held) == 4, "nothing comes twice"
        learner.step(num_tokens=1)
        expected = base - local_vector(learner, 1)
        await until(lambda: service._down)
        service.pull(NAME, 1, 1)
        await until(lambda: service.pushes)
        assert torch.equal(service.pushes[0].vector, expected)
        assert service.pushes[0].header.incarnation.term == 2
        assert service.pushes[0].header.num_steps == 2
        assert learner.local_step == 2


@pytest.mark.asyncio
async def test_what_was_missed_while_away_comes_with_the_watch():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()
    async with make_learner(service, model) as learner:
        service.go_away()
        await until(lambda: not learner.status.online)
        published = service.publish(3, 3, torch.ones(service.published[3][1].numel()))
        service.come_back()
        await until(lambda: learner.status.num_updates == 5)
        learner.step(num_tokens=1)
        assert torch.equal(local_vector(learner, 3), published)
        assert learner.global_step == 3


@pytest.mark.asyncio
async def test_fenced_is_raised_at_the_next_boundary_and_nothing_is_said_to_the_successor():
    service = ScriptedSynchronizer(make_settings())
    model = make_model()

    async def loop() -> None:
        async with make_learner(service, model) as learner:
            service.refuse_join = DilocoError(Reason.FENCED, "another process joined as learner-0")
            train(model)
            learner.step(num_tokens=1)
            service.answer_pushes_with = Reason.UNKNOWN_LEARNER
            service.pull(NAME, 1, 1)
            await until(lambda: learner.status.state is State.FENCED)
            learner.step(num_tokens=1)

    with pytest.raises(DilocoError) as caught:
        await loop()
    assert caught.value.reason is Reason.FENCED
    assert not service.leaves


@pytest.mark.asyncio
async def test_a_refused_join_is_raised_as_the_synchronizer_says_it():
    service = ScriptedSynchronizer(make_settings())
    service.refuse_join = DilocoError(Reason.LAYOUT_MISMATCH, "tensor 'x' has shape 1", tensor="x")
    with pytest.raises(DilocoError, match="tensor 'x' has shape 1") as caught:
        async with make_learner(service, make_model()):
            pass
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert caught.value.details["tensor"] == "x"


@pytest.mark.asyncio
async def test_another_layout_than_the_runs_is_refused():
    service = ScriptedSynchronizer(make_settings())
    async with make_learner(service, make_model()):
        pass
    with pytest.raises(DilocoError, match="fingerprint") as caught:
        async with make_learner(service, nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))):
            pass
    assert caught.value.reason is Reason.LAYOUT_MISMATCH


@pytest.mark.asyncio
async def test_joining_waits_for_a_synchronizer_that_starts_later_and_gives_up_with_a_reason():
    service = ScriptedSynchronizer(make_settings(), is_away=True)
    with pytest.raises(DilocoError, match="away") as caught:
        async with make_learner(service, make_model(), join_timeout_s=0.05):
            pass
    assert caught.value.reason is Reason.UNAVAILABLE
    late = make_learner(service, make_model())
    entering = asyncio.create_task(late.__aenter__())
    await until(lambda: late.status.reason == "UNAVAILABLE")
    service.come_back()
    await entering
    assert late.status.state is State.TRAINING
    await late.aclose()


@pytest.mark.asyncio
async def test_drain_and_stop_are_seen_by_the_loop():
    service = ScriptedSynchronizer(make_settings())
    async with make_learner(service, make_model()) as learner:
        await until(lambda: NAME in service._down)
        assert not learner.draining
        service.say(NAME, drain=synchronizer_pb2.Drain(reason="maintenance"))
        await until(lambda: learner.draining)
        assert not learner.finished
        service.say(NAME, stop=synchronizer_pb2.Stop(global_step=8, reason="all steps are done"))
        await until(lambda: learner.finished)
        learner.step(num_tokens=1)
    assert learner.finished, "leaving does not undo it"


@pytest.mark.asyncio
async def test_the_last_global_step_finishes_the_loop_by_itself():
    service = ScriptedSynchronizer(make_settings(total_global_steps=2))
    async with make_learner(service, make_model()) as learner:
        service.publish(2, 2, torch.ones(service.published[2][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        assert not learner.finished
        learner.step(num_tokens=1)
        assert learner.finished


@pytest.mark.asyncio
async def test_reports_say_versions_steps_and_durations():
    service = ScriptedSynchronizer(make_settings())
    async with make_learner(service, make_model()) as learner:
        service.publish(1, 1, torch.ones(service.published[1][1].numel()))
        await until(lambda: learner.status.num_updates == 5)
        learner.step(num_tokens=9, loss=1.5)
        await until(lambda: service.steps)
        step = service.steps[0]
        assert list(step.clock.known_global_steps) == [0, 1, 0, 0]
        assert (step.clock.sender, step.clock.own_step, step.clock.term) == (NAME, 1, 1)
        assert (step.num_steps, step.num_tokens, step.loss) == (1, 9, 1.5)
        assert step.step_seconds >= step.overhead_seconds > 0
        overhead = learner.overhead
        assert overhead.num_steps == 1
        assert 0 < overhead.median_s <= overhead.p99_s
        assert 0 < overhead.share <= 1


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
    assert all(isinstance(value, torch.Tensor) for value in state.values())

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


def test_in_a_thread_of_its_own_step_never_waits_and_exceptions_of_the_loop_propagate():
    service = ScriptedSynchronizer(make_settings(heartbeat_interval_s=0.02))
    model = make_model()

    def loop() -> None:
        with make_learner(service, model, runtime=None) as learner:
            for _ in range(20):
                train(model)
                learner.step(num_tokens=1)
            asyncio.run(until(lambda: sum(s.num_steps for s in service.steps) == 20))
            asyncio.run(until(lambda: service.heartbeats > 0))
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        loop()
    assert service.leaves[0].reason == "the training loop raised ZeroDivisionError"


def test_misuse_is_told():
    service = ScriptedSynchronizer(make_settings())
    with pytest.raises(UsageError, match="learner_id is empty"):
        make_learner(service, make_model(), learner_id="")
    with pytest.raises(UsageError, match="address, or a transport"):
        make_learner(service, make_model(), transport=None)
    with pytest.raises(UsageError, match="inside 'with learner:'"):
        make_learner(service, make_model()).step(num_tokens=1)


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
