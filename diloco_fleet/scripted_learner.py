"""One learner of a scripted fleet, and what the fleet is."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from decoupled_diloco.settings import RunSettings
from diloco_fleet.scripted_world import Address, Line, virtual_loop
from learner_client import Change, Learner, OptimizerState, Runtime
from learner_client.snapshots import SnapshotDirectory
from learner_client.train.model import ModelConfig, Transformer, build_model, token_loss
from learner_client.training_state import SavedLearner, TrainingState, load_training_state

SMALL_MODEL: Final = ModelConfig(
    vocab_size=32,
    sequence_length=16,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    intermediate_size=32,
)
"""About 6000 parameters: an inner step takes milliseconds."""
_SETTINGS: Final = RunSettings(num_fragments=6, sync_interval=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """What a scripted fleet is, beside its schedule.

    Attributes:
        seed: models, data, jitter and ids of requests come from it.
        settings: settings of the run; ``num_learners`` says how many there may be.
        model: shape of the model.
        batch_sizes: sequences per inner step of each learner, in turn.
        learning_rate: of the inner AdamW.
        recover: what learners begin with, as for ``Learner``; with ``peer`` a learner that joins is
            there once a peer has made its next step.
        snapshots: directory of the learners' parts of snapshots; without it they take no part.
    """

    seed: int = 0
    settings: RunSettings = _SETTINGS
    model: ModelConfig = SMALL_MODEL
    batch_sizes: tuple[int, ...] = (4,)
    learning_rate: float = 3e-3
    recover: str = "params"
    snapshots: Path | None = None


def token_batch(spec: FleetSpec, shard: int, local_step: int) -> torch.Tensor:
    """The batch of one inner step: int64 ``[B, T + 1]``, a noisy walk over the vocabulary.

    Depends on seed, shard and local step alone, so that a learner that comes back goes on with
    its data where it was.
    """
    size = spec.batch_sizes[shard % len(spec.batch_sizes)]
    return _walk(spec, f"batch {spec.seed} {shard} {local_step}", size)


def _walk(spec: FleetSpec, name: str, size: int) -> torch.Tensor:
    length, vocab_size = spec.model.sequence_length, spec.model.vocab_size
    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(60))
    start = torch.randint(vocab_size, (size, 1), generator=generator)
    strides = torch.randint(1, 3, (size, length), generator=generator)
    return torch.cat((start, start + strides.cumsum(1)), dim=1) % vocab_size


def leased_batch(spec: FleetSpec, samples: Iterable[tuple[int, int]]) -> torch.Tensor:
    """The batch of leased samples: int64 ``[B, T + 1]``; one sample is the same in every epoch."""
    rows = [_walk(spec, f"sample {spec.seed} {index}", 1) for _, index in samples]
    return torch.cat(rows)


class ScriptedLearner:
    """One life of a learner: model, optimizer, and the real ``Learner`` round them.

    Args:
        spec: the fleet.
        index: index of the learner, and part of its id.
        life: which of the processes of this learner it is, from 1.
        address: where the synchronizer is.

    Attributes:
        samples: leased samples as (epoch, index), by the local step that trained on them.
    """

    def __init__(self, spec: FleetSpec, index: int, life: int, address: Address) -> None:
        self._spec = spec
        self.learner_id = f"learner-{index}"
        self._stack = contextlib.AsyncExitStack()
        self.line = Line(address)
        self.losses: list[float] = []
        self.changes: list[str] = []
        self.samples: list[tuple[int, list[tuple[int, int]]]] = []
        self.model: Transformer = build_model(spec.model, seed=spec.seed + index)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self.inner_state = OptimizerState(self.model, self._optimizer)
        self.learner = Learner(
            self.model,
            inner_state=self.inner_state,
            recover=spec.recover,
            learner_id=self.learner_id,
            run_id=spec.settings.run_id,
            on_change=self._changed,
            transport=lambda: self.line,
            # Timers are virtual: heartbeats, back-off and time-outs run as in production.
            runtime=Runtime(
                sleep=asyncio.sleep,
                rng=random.Random(f"learner {spec.seed} {index} {life}"),
                has_threads=False,
            ),
            snapshots=SnapshotDirectory(spec.snapshots) if spec.snapshots else None,
            training_state=self._capture if spec.snapshots else None,
        )

    def _capture(self, learner: SavedLearner) -> TrainingState:
        return TrainingState.capture(self.model, self.inner_state, learner, {})

    def _changed(self, change: Change) -> None:
        mode = "online" if change.online else "offline"
        now = virtual_loop().time()
        self.changes.append(f"{now!r} {change.state} {mode} {change.reason}".rstrip())

    async def join(self, part: Path | None = None) -> None:
        """Joins and gets the published parameters; goes on from a part of a snapshot, if given."""
        if part is not None:
            load_training_state(part).restore(self.model, self.inner_state, self.learner)
        await self._stack.enter_async_context(self.learner)

    def step(self) -> None:
        """One inner step, and its boundary; none where leased data has not come."""
        batch = self._next_batch()
        if batch is None:
            return
        loss = token_loss(self.model, batch[:, :-1], batch[:, 1:])
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.losses.append(loss.item())
        self.learner.step(num_tokens=batch[:, 1:].numel(), loss=self.losses[-1])

    def _next_batch(self) -> torch.Tensor | None:
        spec, learner = self._spec, self.learner
        if spec.settings.data_mode == "shards":
            return token_batch(spec, learner.shard, learner.local_step)
        size = spec.batch_sizes[learner.shard % len(spec.batch_sizes)]
        samples = learner.data.take(size, shuffle_seed=spec.seed)
        if samples is None:
            return None
        self.samples.append((learner.local_step + 1, samples))
        return leased_batch(spec, samples)

    async def leave(self) -> None:
        """Says goodbye."""
        await self._stack.aclose()

    async def kill(self) -> None:
        """Is gone: its connections break, and it never says a word again."""
        await self.line.cut()
        await self._stack.aclose()
