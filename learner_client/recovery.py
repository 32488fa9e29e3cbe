"""Recovering: the inner state of a peer, before training begins (paper 7.2).

The parameters come by the watch, as for any learner; what is published from then on waits for the
first boundary. So a recovered learner's counters are at 0 for every fragment, and its first
contributions have small weight.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Final

from decoupled_diloco.codecs import Stager
from decoupled_diloco.codecs.base import Payload
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, crosses_half, reach
from decoupled_diloco.v1 import synchronizer_pb2
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import (
    INNER_STATE_CODEC,
    incarnation_to,
    inner_state_limit,
    malformed,
)
from learner_client.core.retry import REJOIN
from learner_client.grants import Grant
from learner_client.inner_state import InnerState, decode_state
from learner_client.link import Link

_LOG = logging.getLogger("learner_client")

MAX_ATTEMPTS: Final = 3
_PATIENCE: Final = 2.0
"""The synchronizer ends what makes no progress; only its own silence lasts longer than this."""

_SESSION_LOST: Final = frozenset(
    {*REJOIN, Reason.UNAVAILABLE, Reason.STARTING, Reason.DRAINING, Reason.NOT_LEADING,
     Reason.FENCED}
)  # fmt: skip
"""The connection or this life is over, not only the attempt."""

_HOPELESS: Final = frozenset({Reason.NO_DONOR, Reason.UNIMPLEMENTED})
"""Asking again at once would get the same answer."""


class Recoverer:
    """Gets the inner state of a peer once, then lets the training begin.

    Never for ever: every attempt is bounded, there are few, and then training begins with the
    published parameters alone.

    Args:
        link: the way to the synchronizer.
        inner_state: where the state goes.
        versions: version held of each fragment.
    """

    def __init__(
        self, link: Link, inner_state: InnerState, versions: Callable[[], dict[int, Version]]
    ) -> None:
        self._link = link
        self._inner_state = inner_state
        self._versions = versions
        self._held = asyncio.Event()
        self._is_over = False
        self._num_attempts = 0

    def may_train(self) -> bool:
        """There is a published copy of every fragment; returns whether training may begin."""
        self._held.set()
        return self._is_over

    async def run(self, grant: Grant) -> None:
        """Recovers, unless that is over already; within one session.

        Raises:
            DilocoError: the session is lost; the next one goes on.
        """
        if self._is_over:
            return
        failure = None
        if not grant.seed:  # who seeds the run is the first: there is nobody to recover from
            await self._held.wait()
            failure = await self._recover(grant)
        self._is_over = True
        who = self._link.identity.learner_id
        if failure is not None:
            _LOG.log(
                logging.INFO if failure.reason in _HOPELESS else logging.WARNING,
                "%s: begins with the published parameters alone: %s",
                who,
                failure,
            )
        if self._held.is_set():
            self._link.exchange.all_held()

    async def _recover(self, grant: Grant) -> DilocoError | None:
        """Returns why it came to nothing; None where the state is restored."""
        failure = DilocoError(Reason.NO_DONOR, "no attempt is left")
        while self._num_attempts < MAX_ATTEMPTS:
            self._link.exchange.waits(
                "recovering",
                "waiting for the inner state of a peer, "
                f"attempt {self._num_attempts + 1} of {MAX_ATTEMPTS}",
            )
            self._num_attempts += 1  # also where the session is lost by it: never for ever
            try:
                donor, payload = await self._receive(grant)
            except DilocoError as error:
                if error.reason in _SESSION_LOST:
                    raise
                failure = error
            else:
                failure_here = await self._restore(payload)
                if failure_here is None:
                    self._say_from(donor, payload)
                    return None
                failure = failure_here
            if failure.reason in _HOPELESS:
                break
            _LOG.info("%s: recovery failed: %s", self._link.identity.learner_id, failure)
        return failure

    def _say_from(self, donor: str, payload: Payload) -> None:
        _LOG.info(
            "%s: has the inner state of %s, %d bytes",
            self._link.identity.learner_id,
            donor,
            len(payload),
        )

    async def _restore(self, payload: Payload) -> DilocoError | None:
        """Whatever a peer sent: a state that cannot be restored is a failed attempt, no more."""
        try:
            await self._link.runtime.offload(
                lambda: self._inner_state.restore(decode_state(payload))
            )
        except DilocoError as error:
            return error
        except Exception as error:
            _LOG.exception("%s: inner state not restored", self._link.identity.learner_id)
            return DilocoError(Reason.INTERNAL, f"{type(error).__name__}: {error}; see the log")
        return None

    async def _receive(self, grant: Grant) -> tuple[str, Payload]:
        """Donor and payload; the payload matches its digest.

        Raises:
            DilocoError: why there is none.
        """
        donor, stager, payload_bytes = "", None, 0
        limit_s = _PATIENCE * grant.settings.push_timeout_s
        requests = self._requests(grant)
        async with contextlib.aclosing(self._link.transport.recover(requests)) as responses:
            while True:
                try:
                    async with self._link.runtime.limit(limit_s):
                        response = await anext(responses, None)
                except TimeoutError:
                    raise DilocoError(
                        Reason.NO_PROGRESS, f"nothing was heard for {limit_s:g} s"
                    ) from None
                if response is None:
                    break
                if response.WhichOneof("kind") == "header":
                    donor, stager = response.header.donor_id, self._stager(response.header)
                    payload_bytes = response.header.encoding.payload_bytes
                elif stager is None:
                    raise malformed("inner state came without a header")
                else:
                    chunk = response.chunk
                    if crosses_half(chunk.offset_bytes, len(chunk.data), payload_bytes):
                        reach(FaultPoint.MID_RECOVERY)
                    stager.add(chunk.offset_bytes, chunk.data)
        if stager is None:
            raise DilocoError(Reason.TRUNCATED, "the recovery ended before it began")
        return donor, stager.finish()

    def _stager(self, header: synchronizer_pb2.RecoverHeader) -> Stager:
        layout = self._link.exchange.layout
        assert layout is not None, "joined"
        encoding = header.encoding
        if encoding.codec != INNER_STATE_CODEC:
            raise DilocoError(
                Reason.CODEC_MISMATCH,
                f"inner state is encoded as {encoding.codec[:40]!r}, not {INNER_STATE_CODEC}",
            )
        return Stager(encoding.payload_bytes, encoding.digest, inner_state_limit(layout))

    async def _requests(
        self, grant: Grant
    ) -> AsyncGenerator[synchronizer_pb2.RecoverRequest, None]:
        clock = self._link.clock()
        versions = self._versions()
        del clock.known_global_steps[:]
        clock.known_global_steps.extend(versions[p].global_step for p in sorted(versions))
        hello = synchronizer_pb2.RecoverHello(
            learner_id=self._link.identity.learner_id,
            incarnation=incarnation_to(grant.incarnation),
            clock=clock,
        )
        yield synchronizer_pb2.RecoverRequest(hello=hello)
