"""An observer: holds the published copy of every fragment and never contributes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import synchronizer_pb2
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import held_to
from learner_client.core.retry import Backoff, is_fatal
from learner_client.leaders import LeaderSearch
from learner_client.updates import FRAGMENT_BROKEN, UpdateStager, apply_update

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published copy of the whole model at one moment.

    Attributes:
        global_step: last committed global step when it was complete.
        versions: version of every fragment, by index.
        vectors: published copies, fp32 on the CPU, by fragment; never changed in place.
    """

    global_step: int
    versions: tuple[Version, ...]
    vectors: tuple[torch.Tensor, ...]


class Observer:
    """Watches a run; every copy that it holds is verified by digest.

    Args:
        search: the way to the synchronizer that leads.
        layout: the layout of the run.
        settings: settings of the run, as served.
        name: for people who look.
    """

    def __init__(
        self, search: LeaderSearch, layout: Layout, settings: RunSettings, *, name: str = "observer"
    ) -> None:
        self._search = search
        self._layout = layout
        self._settings = settings
        self._name = name
        self._num_updates = 0
        self._held: dict[int, tuple[Version, torch.Tensor]] = {}
        self._backoff = Backoff()
        self._away = False

    async def follow(self) -> AsyncIterator[Published]:
        """Yields the published copy whenever everything committed so far is held.

        Reconnects by itself, to another synchronizer where that leads by now. Whoever takes its
        time misses copies in between, never the newest.

        Raises:
            DilocoError: where no waiting heals, such as ``LAYOUT_MISMATCH``.
        """
        while True:
            try:
                await self._search.settle()
                async for published in self._watch():
                    self._came_back()
                    yield published
                error = DilocoError(Reason.UNAVAILABLE, "the synchronizer ended the stream")
            except DilocoError as caught:
                error = caught
            error = self._search.judged(error)
            self._lost(error)
            pause_s = self._backoff.failed(random.random())
            await asyncio.sleep(self._search.pause_s(pause_s))

    def _came_back(self) -> None:
        self._backoff.succeeded()
        if self._away:
            _LOG.info("%s: the synchronizer is back", self._name)
            self._away = False

    def _lost(self, error: DilocoError) -> None:
        """Decides what an error means for the next attempt."""
        if error.reason in FRAGMENT_BROKEN:
            _LOG.error("%s: %s", self._name, error)
            self._held.pop(int(error.details["fragment"]), None)
        elif is_fatal(error):
            raise error
        elif not self._away:
            _LOG.info("%s: waiting for the synchronizer: %s", self._name, error)
            self._away = True

    async def _watch(self) -> AsyncIterator[Published]:
        stager = UpdateStager(self._layout)
        request = synchronizer_pb2.WatchRequest(
            run_id=self._settings.run_id,
            watcher_id=self._name,
            held=held_to({p: version for p, (version, _) in self._held.items()}),
            layout_fingerprint=self._layout.fingerprint,
        )
        async with contextlib.aclosing(self._search.transport.watch(request)) as responses:
            while (response := await self._next(responses)) is not None:
                kind = response.WhichOneof("kind")
                if kind == "header":
                    stager.header(response.header)
                elif kind == "chunk":
                    staged = stager.chunk(response.chunk)
                    if staged is not None:
                        held = self._held.get(staged.fragment)
                        vector = await asyncio.to_thread(apply_update, staged, held)
                        self._held[staged.fragment] = (staged.result, vector)
                        self._num_updates += 1
                elif kind == "caught_up" and len(self._held) == self._layout.num_fragments:
                    yield self._published(response.caught_up.clock.own_step)

    async def _next(
        self, responses: AsyncGenerator[synchronizer_pb2.WatchResponse, None]
    ) -> synchronizer_pb2.WatchResponse | None:
        """The next message; None at the end of the stream.

        Raises:
            DilocoError: NOT_LEADING where none comes since another synchronizer leads.
        """
        loop = asyncio.get_running_loop()
        reading = loop.create_task(anext(responses, None))
        looking = loop.create_task(
            self._search.keep_watch(
                self._settings.lease_timeout_s, lambda: (True, self._num_updates)
            )
        )
        try:
            await asyncio.wait((reading, looking), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                looking.result()
            return reading.result()
        finally:
            reading.cancel()
            looking.cancel()
            await asyncio.gather(reading, looking, return_exceptions=True)

    def _published(self, global_step: int) -> Published:
        held = [self._held[p] for p in range(self._layout.num_fragments)]
        return Published(
            global_step=global_step,
            versions=tuple(version for version, _ in held),
            vectors=tuple(vector for _, vector in held),
        )
