"""Batches of a shard: deterministic, resumable, never of another shard's tokens.

With leased data there are no shards: ranges of all windows are handed out, and every epoch
shuffles all of them.

The training tokens are cut into windows of ``sequence_length`` (each with the one token more
that is its last target). Window w belongs to shard ``w mod num_shards`` for ever: epochs
shuffle a shard's own windows, and a learner that rejoins keeps its shard. Batches run on over
the end of an epoch, so every batch is full and every window comes once per epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoupled_diloco.errors import Reason, UsageError
from learner_client.data import LeasedData
from learner_client.train.corpus import Corpus, Tokens

_GEOMETRY: Final = ("shard", "num_shards", "batch_size", "sequence_length", "seed", "num_windows")


def num_windows(num_tokens: int, sequence_length: int) -> int:
    """Returns how many windows there are in ``num_tokens`` training tokens."""
    return max(num_tokens - 1, 0) // sequence_length


def num_windows_of_shard(
    num_tokens: int, *, sequence_length: int, shard: int, num_shards: int
) -> int:
    """Returns how many windows of ``num_tokens`` training tokens belong to a shard."""
    num_all = num_windows(num_tokens, sequence_length)
    return max(num_all - shard + num_shards - 1, 0) // num_shards


def require_batches(
    num_tokens: int, *, sequence_length: int, batch_size: int, num_shards: int
) -> None:
    """Refuses a corpus of which some shard has not a single full batch.

    Args:
        num_tokens: training tokens of the corpus.
        sequence_length: tokens per sequence.
        batch_size: sequences per inner step.
        num_shards: planned learners.

    Raises:
        UsageError: DATA_EMPTY.
    """
    smallest = num_windows_of_shard(
        num_tokens, sequence_length=sequence_length, shard=num_shards - 1, num_shards=num_shards
    )
    if smallest < batch_size:
        needed = num_shards * batch_size * sequence_length + 1
        raise UsageError(
            Reason.DATA_EMPTY,
            f"the corpus is too short: {num_tokens} training tokens give a shard {smallest} "
            f"sequences of {sequence_length}, one batch takes {batch_size}; {num_shards} learners "
            f"need {needed} tokens: give more text, or fewer learners, or a smaller batch_size "
            "or sequence_length",
            num_tokens=num_tokens,
        )


class ShardedBatches:
    """The endless batches of one shard.

    Args:
        corpus: the run's corpus.
        shard: 0 to ``num_shards - 1``.
        num_shards: planned learners of the run.
        batch_size: sequences per batch, B.
        sequence_length: tokens per sequence, T.
        seed: of the shuffling; with the shard and the epoch it fixes the order.

    Attributes:
        position: number of batches handed out so far; may be set, to go on from there.

    Raises:
        UsageError: CONFIG_INVALID for a shard that does not exist, DATA_EMPTY when some shard
            has not a single full batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        shard: int,
        num_shards: int,
        batch_size: int,
        sequence_length: int,
        seed: int,
    ) -> None:
        if not 0 <= shard < num_shards:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"shard {shard} does not exist: the run has shards 0 to {num_shards - 1}",
                shard=shard,
            )
        require_batches(
            len(corpus.train),
            sequence_length=sequence_length,
            batch_size=batch_size,
            num_shards=num_shards,
        )
        self.position = 0
        self._tokens = corpus.train
        self._shard = shard
        self._num_shards = num_shards
        self._batch_size = batch_size
        self._sequence_length = sequence_length
        self._seed = seed
        self._num_windows = num_windows_of_shard(
            len(corpus.train), sequence_length=sequence_length, shard=shard, num_shards=num_shards
        )
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    @property
    def num_windows(self) -> int:
        """Windows of this shard: sequences per epoch."""
        return self._num_windows

    @property
    def epoch(self) -> float:
        """Epochs handed out so far, with the fraction of the present one."""
        return self.position * self._batch_size / self._num_windows

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Returns the next batch: inputs and targets, int64 ``[B, T]``, targets one token on."""
        windows = self.windows_at(self.position)
        self.position += 1
        return _batch_of(self._tokens, windows, self._sequence_length)

    def windows_at(self, position: int) -> list[int]:
        """Returns the corpus-wide numbers of the windows in the batch at ``position``."""
        first = position * self._batch_size
        own = [
            int(self._epoch_order(index // self._num_windows)[index % self._num_windows])
            for index in range(first, first + self._batch_size)
        ]
        return [self._shard + self._num_shards * window for window in own]

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, self._shard, epoch]))
            self._order = (epoch, generator.permutation(self._num_windows))
        return self._order[1]

    def state_dict(self) -> dict[str, int]:
        """Returns the position, and the geometry in which it means something, as plain ints."""
        return {"position": self.position, **self._geometry()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where ``state`` was taken.

        Raises:
            UsageError: CONFIG_CONFLICT when it was taken with another shard, batch size,
                sequence length, seed or corpus size; CONFIG_INVALID for a position that is no
                count.
        """
        for key, value in self._geometry().items():
            if state.get(key) != value:
                raise UsageError(
                    Reason.CONFIG_CONFLICT,
                    f"the saved data position is of {key} {state.get(key)}, this run has {value}; "
                    "resume with the settings of the run that saved it",
                    key=key,
                )
        position = state.get("position")
        if type(position) is not int or position < 0:
            raise UsageError(
                Reason.CONFIG_INVALID, f"saved data position {position!r} is not a batch count"
            )
        self.position = position

    def _geometry(self) -> dict[str, int]:
        return {key: getattr(self, f"_{key}") for key in _GEOMETRY}


class LeasedBatches:
    """Batches of whatever windows this learner has on lease.

    Args:
        corpus: the run's corpus.
        data: leases of this learner.
        data_length: samples of one pass, as served.
        batch_size: sequences per batch, B.
        sequence_length: tokens per sequence, T.
        seed: of the shuffling; with the epoch it fixes the order of all windows.

    Raises:
        UsageError: CONFIG_CONFLICT where a pass is not the windows of this corpus.
    """

    def __init__(
        self,
        corpus: Corpus,
        data: LeasedData,
        *,
        data_length: int,
        batch_size: int,
        sequence_length: int,
        seed: int,
    ) -> None:
        num_all = num_windows(len(corpus.train), sequence_length)
        if data_length != num_all:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"data_length is {data_length}, but the corpus has {num_all} sequences of "
                f"{sequence_length} tokens; start the synchronizer with --data-length {num_all}",
            )
        self._tokens = corpus.train
        self._data = data
        self._batch_size = batch_size
        self._sequence_length = sequence_length
        self._seed = seed

    def next_batch(self, give_up: Callable[[], bool]) -> tuple[Tensor, Tensor] | None:
        """Returns the next batch as ``ShardedBatches.next_batch``; None where there is none.

        Args:
            give_up: looked at while a lease is waited for.
        """
        samples = self._data.batch(self._batch_size, shuffle_seed=self._seed, give_up=give_up)
        if samples is None:
            return None
        return _batch_of(self._tokens, [index for _, index in samples], self._sequence_length)


def _batch_of(tokens: Tokens, windows: list[int], length: int) -> tuple[Tensor, Tensor]:
    batch = np.stack([tokens[w * length : w * length + length + 1] for w in windows])
    found = torch.from_numpy(batch.astype(np.int64))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()
