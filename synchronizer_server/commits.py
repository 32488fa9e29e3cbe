"""Merge, persist, publish: the three steps of a round, on the runners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout
from decoupled_diloco.versions import Version
from synchronizer_server.core.effects import RoundSummary
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.runner import Runner
from synchronizer_server.store.base import RoundStore
from synchronizer_server.tensors import Merged, TensorBook
from synchronizer_server.updates import UpdateBook

logger = logging.getLogger(__name__)

RecordMaker = Callable[[int, tuple[Version, ...], RoundSummary | None], RoundRecord]
"""(global step, version vector after it, round) -> its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted:
    """What was made durable.

    Attributes:
        record: the round record.
        fragments: tensors of the fragments that it brings.
    """

    record: RoundRecord
    fragments: Mapping[int, FragmentState]


@dataclass(slots=True)
class Committer:
    """Carries rounds from a full sum to what watchers see.

    Attributes:
        store: durable records and fragments.
        tensors_runner: runs tensor work, in order.
        store_runner: runs the store, in order.
        updates: what watchers get.
        term: term of leadership.
        make_record: builds a round record.
        published: set and replaced at every publication: watchers wait on it.
    """

    store: RoundStore
    tensors_runner: Runner
    store_runner: Runner
    updates: UpdateBook
    term: int
    make_record: RecordMaker
    published: asyncio.Event = field(default_factory=asyncio.Event)
    _tensors: TensorBook | None = None
    _merged: dict[int, Merged] = field(default_factory=dict)
    _seed: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> TensorBook:
        """The tensors of the run.

        Raises:
            DilocoError: STARTING before a learner has brought the layout.
        """
        if self._tensors is None:
            raise DilocoError(Reason.STARTING, "no learner has brought a model yet; try again")
        return self._tensors

    def begin(self, tensors: TensorBook) -> None:
        """The layout is known."""
        self._tensors = tensors

    def start(self, versions: tuple[Version, ...], states: list[FragmentState]) -> None:
        """Begins with restored states."""
        self.tensors.start(states)
        self.updates.start(versions, [s.published for s in states])

    async def merge(self, global_step: int, fragment: int) -> Version:
        """Computes a round's outer step; returns the version that it makes."""
        base = self.updates.version(fragment)
        job = self.tensors_runner.submit(lambda: self.tensors.merge(global_step, fragment, base))
        merged = await job
        self._merged[global_step] = merged
        return merged.update.result

    async def roll_back(self, global_step: int, fragment: int, target: Version) -> Version:
        """Makes the content of a retained version the result of a round; returns its version."""
        copy = self.updates.copy_at(fragment, target)
        assert copy is not None, "retained by core and shell alike"
        job = self.tensors_runner.submit(
            lambda: self.tensors.roll_back(global_step, fragment, copy)
        )
        merged = await job
        self._merged[global_step] = merged
        return merged.update.result

    async def persist(self, summary: RoundSummary) -> Persisted:
        """Makes a merged round durable.

        Raises:
            DilocoError: DISK_FULL or STORAGE_FAILED; it may be tried again.
        """
        merged = self._merged[summary.global_step]
        versions = list(self.updates.versions())
        versions[summary.fragment] = merged.update.result
        record = self.make_record(summary.global_step, tuple(versions), summary)
        tensors = {summary.fragment: merged.state}
        await self.store_runner.submit(lambda: self.store.commit(record, tensors))
        return Persisted(record=record, fragments=tensors)

    async def flush(self) -> None:
        """Forces the newest record out where no other process has it.

        A disk that fails here has kept the record where a crash of the process cannot reach it.
        """
        try:
            await self.store_runner.submit(self.store.flush)
        except DilocoError as error:
            logger.warning("the newest rounds would not survive a power cut: %s", error)

    def publish(self, summary: RoundSummary) -> None:
        """Puts a persisted round before every watcher."""
        merged = self._merged.pop(summary.global_step)
        self.tensors.publish(merged)
        self.updates.publish(merged.update, merged.state.published)
        self.wake_watchers()

    def stage_seed(self, fragment: int, vector: torch.Tensor) -> None:
        """Keeps the first parameters of a fragment until all are there."""
        self._seed[fragment] = vector

    async def persist_seed(self) -> Persisted:
        """Makes the seed durable.

        Raises:
            DilocoError: DISK_FULL or STORAGE_FAILED; it may be tried again.
        """
        vectors = dict(sorted(self._seed.items()))
        states, versions = await self.tensors_runner.submit(lambda: self._seed_states(vectors))
        record = self.make_record(0, versions, None)
        await self.store_runner.submit(lambda: self.store.commit(record, states))
        self.start(versions, list(states.values()))
        return Persisted(record=record, fragments=states)

    def _seed_states(
        self, vectors: dict[int, torch.Tensor]
    ) -> tuple[dict[int, FragmentState], tuple[Version, ...]]:
        states = {i: FragmentState.seeded(v) for i, v in vectors.items()}
        return states, tuple(Version(self.term, 0, s.digest()) for s in states.values())

    def publish_seed(self) -> None:
        """Puts the seed before every watcher."""
        self._seed.clear()
        self.wake_watchers()

    def wake_watchers(self) -> None:
        """Lets every watcher look again."""
        self.published.set()
        self.published = asyncio.Event()


def layout_description(layout: Layout) -> dict[str, object]:
    """The layout as JSON values, for the store."""
    return {
        "strategy": str(layout.strategy),
        "num_fragments": layout.num_fragments,
        "fingerprint": layout.fingerprint,
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "role": str(t.role),
                "aliases": list(t.aliases),
            }
            for t in layout.tensors
        ],
    }
