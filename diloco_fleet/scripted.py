"""A whole fleet in one process, one event loop and virtual time, driven by a schedule.

Synchronizer, learners, models and optimizer are the ones that ship; only what lies between them is
replaced: the in-memory transport for the network, the inline runner for threads, the in-memory
store and membership for disk and Redis, virtual time for the clock: schedule and seed decide all.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.settings import RunSettings
from diloco_fleet.scripted_data import (
    Action,
    Advance,
    FleetResult,
    GoBack,
    Join,
    Kill,
    LearnerResult,
    Leave,
    Resume,
    StartSynchronizer,
    Step,
    StopSynchronizer,
    TakeSnapshot,
    collect,
)
from diloco_fleet.scripted_world import (
    Address,
    KeepingStore,
    Line,
    SynchronizerLife,
    run_in_virtual_time,
    virtual_loop,
)
from learner_client import Change, Learner, Runtime
from learner_client.inner_state import OptimizerState
from learner_client.snapshots import SnapshotDirectory
from learner_client.train.model import ModelConfig, Transformer, build_model, token_loss
from learner_client.training_state import SavedLearner, TrainingState, load_training_state
from synchronizer_server.core import events as ev
from synchronizer_server.going_back import LATEST, choose, go_back

_DRAIN_S: Final = 10.0
_COME_BACK_S: Final = 60

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
        snapshots: directory of the learners' parts of snapshots; without it they take no part.
    """

    seed: int = 0
    settings: RunSettings = _SETTINGS
    model: ModelConfig = SMALL_MODEL
    batch_sizes: tuple[int, ...] = (4,)
    learning_rate: float = 3e-3
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
        self._inner = OptimizerState(self.model, self._optimizer)
        self.learner = Learner(
            self.model,
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
        return TrainingState.capture(self.model, self._inner, learner, {})

    def _changed(self, change: Change) -> None:
        mode = "online" if change.online else "offline"
        now = virtual_loop().time()
        self.changes.append(f"{now!r} {change.state} {mode} {change.reason}".rstrip())

    async def join(self, part: Path | None = None) -> None:
        """Joins and gets the published parameters; goes on from a part of a snapshot, if given."""
        if part is not None:
            load_training_state(part).restore(self.model, self._inner, self.learner)
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


class ScriptedFleet:
    """A fleet that does what it is told; see ``scripted_fleet`` and ``run_fleet``.

    Args:
        spec: what the fleet is.

    Attributes:
        store: what survives the synchronizer.
        learners: learners that are there, by index.
        synchronizer: the synchronizer, while there is one.
    """

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.store = KeepingStore()
        self.learners: dict[int, ScriptedLearner] = {}
        self._address = Address()
        self._lines: list[Line] = []
        self._lives: list[SynchronizerLife] = []
        self._past: list[LearnerResult] = []
        self._num_lives: dict[int, int] = {}

    @property
    def synchronizer(self) -> SynchronizerLife | None:
        """The synchronizer, while there is one."""
        return self._address.life

    async def apply(self, action: Action) -> None:
        """Does one thing and settles: returns when nothing is left to do at this moment.

        Raises:
            UsageError: CONFIG_INVALID where that cannot be done now.
            DilocoError: what ended a learner or the synchronizer.
        """
        match action:
            case Join():
                await self._join(action.learner)
            case Step():
                self._at(action.learner).step()
            case Leave():
                await self._end(action.learner, silently=False)
            case Kill():
                await self._end(action.learner, silently=True)
            case Advance():
                await virtual_loop().advance(action.seconds)
            case StopSynchronizer():
                await self._stop(drain=action.drain)
            case StartSynchronizer():
                await self._start()
            case TakeSnapshot():
                self._running().engine.handle(ev.SnapshotWanted())
            case GoBack():
                go_back(self.store, LATEST)
            case Resume():
                await self._join(action.learner, self._part(action.learner))
        await virtual_loop().settle()
        life = self._address.life
        if life is not None and life.engine.failure is not None:
            raise life.engine.failure

    async def finish(self) -> FleetResult:
        """Drains the synchronizer, applies what it published, and says what there is.

        Learners that were cut off get time to come back. Every learner takes one more inner step,
        at whose boundary the last updates land.
        """
        life = self._running()
        for _ in range(_COME_BACK_S):
            if all(x.learner.status.online for x in self.learners.values()):
                break
            await virtual_loop().advance(1.0)
        await life.drain(_DRAIN_S)
        await virtual_loop().settle()
        for scripted in self.learners.values():
            scripted.step()
        await virtual_loop().settle()
        lives = [self._read(index) for index in sorted(self.learners)]
        return collect(
            self.store.records,
            [*self._past, *lives],
            [x.engine.ledger for x in self._lives],
            life.engine,
        )

    async def close(self) -> None:
        """Ends everything."""
        for index in list(self.learners):
            await self.learners.pop(index).leave()
        if self._address.life is not None:
            await self._stop(drain=False)

    # -- synchronizer ----------------------------------------------------------------------

    async def _start(self) -> None:
        if self._address.life is not None:
            raise _impossible("the synchronizer runs already")
        life = await SynchronizerLife.start(self.spec.settings, self.store, virtual_loop().time)
        self._lives.append(life)
        self._address.life = life

    async def _stop(self, *, drain: bool) -> None:
        life = self._running()
        if drain:
            await life.drain(_DRAIN_S)
            await life.close()
        else:
            life.sever()
        self._address.life = None
        await asyncio.gather(*(line.drop() for line in self._lines))
        await life.close()

    def _running(self) -> SynchronizerLife:
        if self._address.life is None:
            raise _impossible("there is no synchronizer; start it first")
        return self._address.life

    # -- learners --------------------------------------------------------------------------

    def _at(self, index: int) -> ScriptedLearner:
        if index not in self.learners:
            raise _impossible(f"learner {index} is not there; let it join first")
        return self.learners[index]

    def _part(self, index: int) -> Path:
        assert self.spec.snapshots is not None, "there is a directory for snapshots"
        parts, newest = (
            SnapshotDirectory(self.spec.snapshots),
            choose(self.store.snapshots(), LATEST),
        )
        return parts.part(newest.name, f"learner-{index}")

    async def _join(self, index: int, part: Path | None = None) -> None:
        self._running()
        if index in self.learners:
            raise _impossible(f"learner {index} is there already; kill it first")
        life = self._num_lives[index] = self._num_lives.get(index, 0) + 1
        scripted = ScriptedLearner(self.spec, index, life, self._address)
        self._lines.append(scripted.line)
        await scripted.join(part)
        self.learners[index] = scripted

    async def _end(self, index: int, *, silently: bool) -> None:
        scripted = self._at(index)
        self._past.append(self._read(index, ended=True))
        del self.learners[index]
        await (scripted.kill() if silently else scripted.leave())
        self._lines.remove(scripted.line)

    def _read(self, index: int, *, ended: bool = False) -> LearnerResult:
        scripted = self.learners[index]
        return LearnerResult.read(
            scripted.learner,
            scripted.model,
            learner_id=scripted.learner_id,
            is_present=not ended,
            losses=tuple(scripted.losses),
            changes=tuple(scripted.changes),
        )


@contextlib.asynccontextmanager
async def scripted_fleet(spec: FleetSpec) -> AsyncIterator[ScriptedFleet]:
    """A fleet with its synchronizer started, in a virtual loop; ended on leaving."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads have no fixed order
    fleet = ScriptedFleet(spec)
    try:
        await fleet.apply(StartSynchronizer())
        yield fleet
    finally:
        await fleet.close()
        torch.set_num_threads(num_threads)


def run_fleet(spec: FleetSpec, schedule: Iterable[Action]) -> FleetResult:
    """Plays a schedule from beginning to end.

    Raises:
        UsageError: CONFIG_INVALID for a schedule that cannot be, with the number of the action.
        DilocoError: what ended a learner or the synchronizer.
    """

    async def main() -> FleetResult:
        async with scripted_fleet(spec) as fleet:
            for number, action in enumerate(schedule, start=1):
                try:
                    await fleet.apply(action)
                except UsageError as error:
                    raise UsageError(
                        error.reason, f"action {number} of the schedule: {error.message}"
                    ) from error
            return await fleet.finish()

    return run_in_virtual_time(main())


def _impossible(why: str) -> UsageError:
    return UsageError(Reason.CONFIG_INVALID, why)
