"""Batches of a shard: disjoint, covering, resumable."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.settings import RunSettings
from learner_client.data import LeasedData
from learner_client.leases import Lease
from learner_client.train.corpus import Corpus, CorpusInfo
from learner_client.train.data import (
    LeasedBatches,
    ShardedBatches,
    num_windows,
    num_windows_of_shard,
    require_batches,
)


def corpus_of(num_tokens: int) -> Corpus:
    """A corpus whose token i has the value i, so that a batch shows where it came from."""
    info = CorpusInfo(
        hash="",
        num_tokens=num_tokens,
        num_held_out_tokens=2,
        vocab_size=1 << 20,
        dtype="uint32",
        tokenizer="bytes",
        sources=(),
        num_documents=1,
    )
    tokens = np.arange(num_tokens, dtype=np.uint32)
    return Corpus(info=info, train=tokens, held_out=tokens[:2], folder=Path())


def batches(shard: int = 0, num_tokens: int = 1001, **changes: Any) -> ShardedBatches:
    arguments: dict[str, Any] = {
        "num_shards": 3,
        "batch_size": 4,
        "sequence_length": 10,
        "seed": 7,
        **changes,
    }
    return ShardedBatches(corpus_of(num_tokens), shard=shard, **arguments)


def test_targets_are_the_inputs_one_token_on() -> None:
    inputs, targets = batches().next_batch()
    assert inputs.shape == targets.shape == (4, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert (inputs[:, 0] % 10 == 0).all()


@given(
    num_shards=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    length=st.integers(2, 9),
    extra=st.integers(0, 100),
    seed=st.integers(0, 2**63 - 1),
)
def test_shards_are_disjoint_and_cover_every_window_once_per_epoch(
    num_shards: int, batch_size: int, length: int, extra: int, seed: int
) -> None:
    num_tokens = num_shards * batch_size * length + 1 + extra
    seen: Counter[int] = Counter()
    for shard in range(num_shards):
        own = batches(
            shard,
            num_tokens,
            num_shards=num_shards,
            batch_size=batch_size,
            sequence_length=length,
            seed=seed,
        )
        # as many batches as make whole epochs, batch_size of them
        windows = [w for position in range(own.num_windows) for w in own.windows_at(position)]
        assert set(Counter(windows).values()) == {batch_size}
        assert not seen.keys() & set(windows)
        seen.update(windows)
    assert set(seen) == set(range((num_tokens - 1) // length))


@given(st.integers(0, 500), st.integers(1, 50), st.integers(1, 6))
def test_windows_of_a_shard_are_counted_as_they_are_dealt(
    num_tokens: int, length: int, num_shards: int
) -> None:
    dealt = Counter(w % num_shards for w in range(max(num_tokens - 1, 0) // length))
    for shard in range(num_shards):
        assert (
            num_windows_of_shard(
                num_tokens, sequence_length=length, shard=shard, num_shards=num_shards
            )
            == dealt[shard]
        )


def test_epochs_differ_and_seeds_differ() -> None:
    own = batches(num_shards=1, batch_size=10, num_tokens=1001)
    epochs = [[own.windows_at(10 * epoch + i) for i in range(10)] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert batches(seed=8).windows_at(0) != batches(seed=7).windows_at(0)


def test_resuming_equals_never_stopping() -> None:
    uninterrupted = batches()
    expected = [uninterrupted.next_batch()[0] for _ in range(40)]
    first = batches()
    for _ in range(17):
        first.next_batch()
    state = json.loads(json.dumps(first.state_dict()))
    second = batches()
    second.load_state_dict(state)
    resumed = [second.next_batch()[0] for _ in range(23)]
    assert all(torch.equal(a, b) for a, b in zip(expected[17:], resumed, strict=True))
    third = batches()
    third.position = 39
    assert torch.equal(third.next_batch()[0], expected[39])
    assert third.epoch == pytest.approx(40 * 4 / 34)


@pytest.mark.parametrize(
    "change",
    [
        {"shard": 1},
        {"batch_size": 5},
        {"sequence_length": 9},
        {"seed": 8},
        {"num_shards": 4},
        {"num_tokens": 1101},
    ],
)
def test_a_position_of_another_geometry_is_refused(change: dict[str, int]) -> None:
    state = batches(**change).state_dict()
    with pytest.raises(UsageError, match="resume with the settings") as caught:
        batches().load_state_dict(state)
    assert caught.value.reason == Reason.CONFIG_CONFLICT


@pytest.mark.parametrize("position", [-1, 1.5, None, "3"])
def test_a_position_that_is_no_count_is_refused(position: Any) -> None:
    with pytest.raises(UsageError) as caught:
        batches().load_state_dict({**batches().state_dict(), "position": position})
    assert caught.value.reason == Reason.CONFIG_INVALID


def test_a_shard_without_a_full_batch_is_refused_with_the_numbers() -> None:
    enough = 3 * 4 * 10 + 1
    require_batches(enough, sequence_length=10, batch_size=4, num_shards=3)
    with pytest.raises(UsageError, match=f"need {enough} tokens") as caught:
        batches(num_tokens=enough - 1)
    assert caught.value.reason == Reason.DATA_EMPTY


def test_a_shard_that_does_not_exist_is_refused() -> None:
    for shard in (-1, 3):
        with pytest.raises(UsageError, match="shards 0 to 2") as caught:
            batches(shard)
        assert caught.value.reason == Reason.CONFIG_INVALID


def leased(num_tokens: int = 101, data_length: int = 10) -> LeasedBatches:
    """Batches of 5 sequences of 10 tokens, with two passes over the data on lease."""
    data = LeasedData(is_over=lambda: False, failure=lambda: None, on_wait=lambda _: None)
    data.begin(RunSettings(data_mode="leases", data_length=data_length))
    for epoch in range(2):
        data.offer(Lease(lease_id=epoch + 1, epoch=epoch, start=0, stop=data_length))
    return LeasedBatches(
        corpus_of(num_tokens), data, data_length=data_length, batch_size=5, sequence_length=10,
        seed=3,
    )  # fmt: skip


def test_every_leased_pass_has_every_window_once_in_an_order_of_its_own() -> None:
    batches = leased()
    passes = []
    for _ in range(2):
        starts: list[int] = []
        for _ in range(2):
            batch = batches.next_batch(lambda: False)
            assert batch is not None
            assert torch.equal(batch[1], batch[0] + 1)
            starts += batch[0][:, 0].tolist()
        passes.append(starts)
    assert [sorted(x) for x in passes] == [list(range(0, 100, 10))] * 2
    assert passes[0] != passes[1]
    assert batches.next_batch(lambda: True) is None, "asked to stop while a lease is waited for"


def test_a_pass_that_is_not_the_corpus_is_refused_with_its_length() -> None:
    assert num_windows(101, 10) == 10
    with pytest.raises(UsageError, match="--data-length 10") as caught:
        leased(data_length=9)
    assert caught.value.reason is Reason.CONFIG_CONFLICT
