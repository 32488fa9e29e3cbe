"""Fetches data leases in the background, before they are needed."""

from __future__ import annotations

import asyncio
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2
from decoupled_diloco.versions import Incarnation
from decoupled_diloco.wire import incarnation_to
from learner_client.core.retry import Backoff
from learner_client.grants import Grant
from learner_client.leases import Lease
from learner_client.link import Link

_RETRIED: Final = frozenset({Reason.UNAVAILABLE, Reason.STARTING, Reason.DRAINING})
_FULL_S: Final = 1.0


class Leaser:
    """Keeps one lease more than the one in use.

    Args:
        link: the way to the synchronizer.

    Attributes:
        wanted: set where another lease may be wanted.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._request: tuple[Incarnation, str] | None = None
        self.wanted = asyncio.Event()

    async def run(self, grant: Grant) -> None:
        """Fetches leases until the connection is lost; where shards are fixed, there are none.

        Raises:
            DilocoError: where no retrying helps.
        """
        data = self._link.exchange.data
        while grant.settings.data_mode == "leases":
            self.wanted.clear()
            while data.wants:
                data.offer(await self._fetch(grant))
                self._request = None
            await self.wanted.wait()

    async def _fetch(self, grant: Grant) -> Lease:
        """The next lease; the same one where the answer to an earlier request was lost."""
        runtime, backoff = self._link.runtime, Backoff(most_s=1.0)
        while True:
            try:
                response = await self._link.transport.lease_data(self._message(grant))
            except DilocoError as error:
                if error.reason not in _RETRIED:
                    raise
                self._link.exchange.data.waits(f"the synchronizer, {error.reason}: {error.message}")
                await runtime.sleep(backoff.failed(runtime.rng.random()))
                continue
            if response.stop > response.start:
                return Lease(
                    lease_id=response.lease_id,
                    epoch=response.epoch,
                    start=response.start,
                    stop=response.stop,
                )
            self._link.exchange.data.waits("a report: this learner has too many leases to train on")
            await runtime.sleep(_FULL_S)

    def _message(self, grant: Grant) -> synchronizer_pb2.LeaseDataRequest:
        if self._request is None or self._request[0] != grant.incarnation:
            request_id = f"{self._link.runtime.rng.getrandbits(128):032x}"
            self._request = (grant.incarnation, request_id)
        return synchronizer_pb2.LeaseDataRequest(
            learner_id=self._link.identity.learner_id,
            incarnation=incarnation_to(grant.incarnation),
            request_id=self._request[1],
            clock=self._link.clock(),
        )
