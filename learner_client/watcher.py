"""The watch: keeps the published copy that this learner holds up to date (design section 5)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Final

import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import held_to, incarnation_to
from learner_client.core.retry import Backoff
from learner_client.grants import Grant, Update
from learner_client.link import Link
from learner_client.updates import FRAGMENT_BROKEN, StagedUpdate, UpdateStager, apply_update

_LOG = logging.getLogger("learner_client")

_STREAM_BROKEN: Final = frozenset(
    {
        Reason.MALFORMED,
        Reason.TRUNCATED,
        Reason.OVERSIZED,
        Reason.CORRUPT,
        Reason.CODEC_MISMATCH,
        Reason.OFFSET_MISMATCH,
        Reason.UNKNOWN_FRAGMENT,
        Reason.CONFIG_INVALID,
    }
)
"""What was received makes no sense: watch again from what is held."""

Held = dict[int, tuple[Version, torch.Tensor]]


class Watcher:
    """Holds the newest published copy of every fragment; what is held was always verified.

    Args:
        link: the way to the synchronizer.
        held: published copies from a saved state; they count only once it is known which of them
            are still current.
    """

    def __init__(self, link: Link, held: Mapping[int, tuple[Version, torch.Tensor]]) -> None:
        self._link = link
        self._held: Held = dict(held)
        self._is_current = not held
        self._backoff = Backoff()

    @property
    def versions(self) -> dict[int, Version]:
        """Version held of each fragment."""
        return {p: version for p, (version, _) in self._held.items()}

    def vector(self, fragment: int) -> torch.Tensor | None:
        """Published copy held of a fragment."""
        held = self._held.get(fragment)
        return None if held is None else held[1]

    async def run(self, grant: Grant) -> None:
        """Watches until the connection is lost.

        Raises:
            DilocoError: what ended the stream, where watching again would not help.
        """
        while True:
            try:
                await self._stream(grant)
            except DilocoError as error:
                self._recover_from(error)
                await self._link.runtime.sleep(
                    self._backoff.failed(self._link.runtime.rng.random())
                )

    def _recover_from(self, error: DilocoError) -> None:
        """Makes the next attempt better, or raises."""
        who = self._link.identity.learner_id
        fragment = error.details.get("fragment", "")
        if error.reason in FRAGMENT_BROKEN and fragment.isdecimal():
            self._held.pop(int(fragment), None)
            if error.reason is Reason.DIGEST_MISMATCH:
                self._link.exchange.tally.num_digest_mismatches += 1
                _LOG.error("%s: %s", who, error)
            else:
                _LOG.warning("%s: %s", who, error)
        elif error.reason in _STREAM_BROKEN:
            _LOG.warning("%s: the stream of updates is broken, watching again: %s", who, error)
        else:
            raise error

    async def _stream(self, grant: Grant) -> None:
        link = self._link
        layout = link.exchange.layout
        assert layout is not None, "joined"
        stager = UpdateStager(layout)
        request = synchronizer_pb2.WatchRequest(
            run_id=grant.settings.run_id,
            watcher_id=link.identity.learner_id,
            incarnation=incarnation_to(grant.incarnation),
            held=held_to(self.versions),
            layout_fingerprint=layout.fingerprint,
            clock=link.clock(),
        )
        self._say_what_is_missing(layout.num_fragments)
        async with contextlib.aclosing(link.transport.watch(request)) as responses:
            async for response in responses:
                link.exchange.connected()
                kind = response.WhichOneof("kind")
                if kind == "header":
                    # Before the update itself: it may be the marker of a cut below it.
                    link.exchange.snapshots.heard(response.header.clock)
                    stager.header(response.header)
                elif kind == "chunk":
                    staged = stager.chunk(response.chunk)
                    if staged is not None:
                        await self._take(staged, layout.num_fragments)
                elif kind == "caught_up":
                    link.exchange.snapshots.heard(response.caught_up.clock)
                    self._is_current = True
                    self._check_complete(layout.num_fragments)
        raise DilocoError(Reason.UNAVAILABLE, "the synchronizer ended the stream of updates")

    async def _take(self, staged: StagedUpdate, num_fragments: int) -> None:
        exchange = self._link.exchange
        held = self._held.get(staged.fragment)
        vector = await self._link.runtime.offload(lambda: apply_update(staged, held))
        self._held[staged.fragment] = (staged.result, vector)
        exchange.tally.bytes_down += len(staged.payload)
        exchange.offer(Update(fragment=staged.fragment, version=staged.result, vector=vector))
        self._backoff.succeeded()
        self._check_complete(num_fragments)

    def _check_complete(self, num_fragments: int) -> None:
        if self._is_current and len(self._held) == num_fragments:
            self._link.exchange.all_held()

    def _say_what_is_missing(self, num_fragments: int) -> None:
        if len(self._held) < num_fragments and not self._link.exchange.synced.done():
            self._link.exchange.waits(
                "first_parameters", "waiting for the published parameters of the run"
            )
