"""Giving inner state to a peer that recovers: copied between two steps, sent in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from decoupled_diloco.codecs import iter_chunks, payload_digest
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, crosses_half, reach
from decoupled_diloco.v1 import synchronizer_pb2, types_pb2
from decoupled_diloco.wire import INNER_STATE_CODEC, incarnation_to
from learner_client.core.learner_core import LearnerCore
from learner_client.grants import Grant
from learner_client.inner_state import InnerState, encode_state
from learner_client.link import Link

_LOG = logging.getLogger("learner_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCopy:
    """A copy of the inner state.

    Attributes:
        state: as ``InnerState.capture`` returned it.
        local_step: local step at which it was made.
        applied: global step of the version applied of each fragment then.
    """

    state: dict[str, torch.Tensor]
    local_step: int
    applied: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    known: tuple[int, ...]
    copy: Future[InnerCopy] = field(default_factory=Future)


class CopyDesk:
    """Where the background asks for a copy and the training thread makes it; neither waits.

    Args:
        inner_state: what is copied; None where there is nothing to give.
    """

    def __init__(self, inner_state: InnerState | None) -> None:
        self._inner_state = inner_state
        self._lock = threading.Lock()
        self._request: _Request | None = None

    @property
    def can_give(self) -> bool:
        """Whether there is an inner state."""
        return self._inner_state is not None

    def ask(self, known: tuple[int, ...]) -> Future[InnerCopy]:
        """Asks for a copy once these versions are applied; replaces what was asked before."""
        request = _Request(known=known)
        with self._lock:
            before, self._request = self._request, request
        if before is not None:
            before.copy.cancel()
        return request.copy

    def serve(self, core: LearnerCore) -> None:
        """Makes the copy that is asked for, if its time has come. On the training thread.

        A copy that fails is the recipient's loss: training goes on.
        """
        request = self._request
        if request is None or self._inner_state is None:
            return
        applied = core.known_global_steps
        if len(applied) != len(request.known) or any(
            a < k for a, k in zip(applied, request.known, strict=True)
        ):
            return
        with self._lock:
            if self._request is request:
                self._request = None
        if not request.copy.set_running_or_notify_cancel():
            return
        try:
            state = self._inner_state.capture()
        except Exception as error:
            request.copy.set_exception(error)
        else:
            request.copy.set_result(
                InnerCopy(state=state, local_step=core.local_step, applied=applied)
            )


class Donor:
    """Gives when asked, to one at a time.

    Args:
        link: the way to the synchronizer.
        desk: where copies are asked for.
    """

    def __init__(self, link: Link, desk: CopyDesk) -> None:
        self._link = link
        self._desk = desk
        self._task: asyncio.Task[None] | None = None

    def asked(self, donate: synchronizer_pb2.Donate, grant: Grant) -> None:
        """A recovery asks for the inner state; the one before, if any, is over by that."""
        self.give_up()
        self._task = asyncio.get_running_loop().create_task(self._give(donate, grant))

    def give_up(self) -> None:
        """Sends nothing more of what is under way."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def aclose(self) -> None:
        """Ends what is under way."""
        task = self._task
        self.give_up()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _give(self, donate: synchronizer_pb2.Donate, grant: Grant) -> None:
        who = self._link.identity.learner_id
        hello = synchronizer_pb2.RecoverHello(
            learner_id=who,
            incarnation=incarnation_to(grant.incarnation),
            donor=True,
            recovery_id=donate.recovery_id,
        )
        payload = b""
        try:
            if self._desk.can_give:
                payload = await self._copy(donate, hello)
            await self._send(hello, payload)
        except DilocoError as error:
            _LOG.info("%s: gave no inner state to a peer: %s", who, error)
        except Exception:
            _LOG.exception("%s: the inner state could not be copied", who)
            with contextlib.suppress(DilocoError):
                await self._send(hello, b"")
        else:
            _LOG.info("%s: gave %d bytes of inner state to a peer", who, len(payload))

    async def _copy(
        self, donate: synchronizer_pb2.Donate, hello: synchronizer_pb2.RecoverHello
    ) -> bytes:
        """Waits for the copy and encodes it; ``hello`` says what it is."""
        copied = await asyncio.wrap_future(self._desk.ask(tuple(donate.known_global_steps)))

        def encode() -> tuple[bytes, bytes]:
            payload = encode_state(copied.state)
            return payload, payload_digest(payload)

        payload, digest = await self._link.runtime.offload(encode)
        clock = self._link.clock()
        del clock.known_global_steps[:]
        clock.known_global_steps.extend(copied.applied)
        clock.own_step = copied.local_step
        hello.clock.CopyFrom(clock)
        hello.encoding.CopyFrom(
            types_pb2.Encoding(codec=INNER_STATE_CODEC, payload_bytes=len(payload), digest=digest)
        )
        return payload

    async def _send(self, hello: synchronizer_pb2.RecoverHello, payload: bytes) -> None:
        """Sends hello and payload; a hello without a payload declines."""
        requests = _requests(hello, payload)
        async with contextlib.aclosing(self._link.transport.recover(requests)) as responses:
            async for _ in responses:
                raise DilocoError(Reason.MALFORMED, "a donor was sent inner state")


async def _requests(
    hello: synchronizer_pb2.RecoverHello, payload: bytes
) -> AsyncGenerator[synchronizer_pb2.RecoverRequest, None]:
    yield synchronizer_pb2.RecoverRequest(hello=hello)
    offset = 0
    for data in iter_chunks(payload):
        if crosses_half(offset, len(data), len(payload)):
            reach(FaultPoint.MID_RECOVERY)
        chunk = types_pb2.Chunk(offset_bytes=offset, data=bytes(data))
        yield synchronizer_pb2.RecoverRequest(chunk=chunk)
        offset += len(data)
