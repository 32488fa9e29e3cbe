"""Answers pulls: at once, from the newest copy, in the background (design section 4, step 4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import torch

from decoupled_diloco.codecs import Payload
from decoupled_diloco.errors import DilocoError, Reason, reason_of
from decoupled_diloco.v1 import synchronizer_pb2, types_pb2
from learner_client.captures import PushWork
from learner_client.core.learner_core import AnswerDecline, PullRequest
from learner_client.core.retry import REJOIN, Backoff
from learner_client.grants import Grant
from learner_client.link import Link
from learner_client.pushes import encode, outer_gradient, push_header, seed_header, send

_LOG = logging.getLogger("learner_client")

_MAX_ATTEMPTS: Final = 20
_RETRIED: Final = frozenset(
    {
        Reason.UNAVAILABLE,
        Reason.STARTING,
        Reason.CORRUPT,
        Reason.TRUNCATED,
        Reason.OFFSET_MISMATCH,
        Reason.OUT_OF_MEMORY_BUDGET,
    }
)
_LEAVES: Final = frozenset({Reason.FENCED, Reason.NOT_LEADING})
_WORDS: Final = {
    synchronizer_pb2.PUSH_OUTCOME_ACCEPTED: "accepted",
    synchronizer_pb2.PUSH_OUTCOME_DROPPED: "dropped",
    synchronizer_pb2.PUSH_OUTCOME_REFUSED: "refused",
}


class Pusher:
    """Runs the pushes of one learner.

    Args:
        link: the way to the synchronizer.
        on_unknown: called where the synchronizer does not know this incarnation.
    """

    def __init__(self, link: Link, on_unknown: Callable[[DilocoError], None]) -> None:
        self._link = link
        self._on_unknown = on_unknown
        self._tasks: dict[asyncio.Task[None], Grant] = {}

    def pulled(self, pull: PullRequest, grant: Grant) -> Reason | None:
        """Answers a pull: starts a push, or returns why not.

        Declined also where as many pushes are under way as there may be rounds, and some more: a
        synchronizer cannot make a learner hold any number of payloads.
        """
        if len(self._tasks) >= 2 * grant.settings.overlap + 2:
            return Reason.OUT_OF_MEMORY_BUDGET
        work = self._link.exchange.pull(pull)
        if isinstance(work, AnswerDecline):
            return work.reason
        task = asyncio.get_running_loop().create_task(self._push(work, grant))
        self._tasks[task] = grant
        task.add_done_callback(self._finished)
        return None

    def keep_only(self, grant: Grant) -> None:
        """Gives up the pushes of an earlier incarnation; nobody would take them."""
        for task, started in self._tasks.items():
            if started.incarnation != grant.incarnation or started.term != grant.term:
                task.cancel()

    async def aclose(self) -> None:
        """Gives up all pushes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def seed(self, fragment: int, vector: torch.Tensor, grant: Grant) -> bool:
        """Pushes the first parameters of a fragment (fp32, CPU), lossless.

        Returns:
            False where the seed is no longer asked of this learner: what is published counts.

        Raises:
            DilocoError: where they were not taken.
        """
        link = self._link
        encoding, payload = await link.runtime.offload(lambda: encode(vector, "fp32"))
        header = seed_header(
            fragment,
            learner_id=link.identity.learner_id,
            incarnation=grant.incarnation,
            term=grant.term,
            encoding=encoding,
            clock=link.clock(),
        )
        response = await self.deliver(header, payload)
        if response.outcome == synchronizer_pb2.PUSH_OUTCOME_ACCEPTED:
            return True
        reason = reason_of(response.reason)
        if reason is Reason.DUPLICATE:
            return True
        if reason in (Reason.NOT_ASKED, Reason.ALREADY_MERGED):
            return False
        raise DilocoError(reason, response.message, fragment=fragment)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("%s: a push failed", self._link.identity.learner_id, exc_info=error)

    async def _push(self, work: PushWork, grant: Grant) -> None:
        link, stamp = self._link, work.answer.stamp
        try:
            encoding, payload = await link.runtime.offload(lambda: self._encode(work, grant))
        finally:
            link.exchange.release(work.capture)
        header = push_header(
            work,
            learner_id=link.identity.learner_id,
            incarnation=grant.incarnation,
            encoding=encoding,
            clock=link.clock(),
        )
        try:
            async with link.runtime.limit(grant.settings.push_timeout_s):
                response = await self.deliver(header, payload)
        except TimeoutError:
            link.exchange.settled(stamp, accepted=False, word=str(Reason.TOO_LATE))
            return
        except DilocoError as error:
            link.exchange.settled(stamp, accepted=False, word=str(error.reason))
            self._look_at(error)
            return
        accepted = response.outcome == synchronizer_pb2.PUSH_OUTCOME_ACCEPTED
        word = "ACCEPTED" if accepted else str(reason_of(response.reason))
        link.exchange.settled(stamp, accepted=accepted, word=word)
        if not accepted:
            self._explain(header, response)

    def _encode(self, work: PushWork, grant: Grant) -> tuple[types_pb2.Encoding, Payload]:
        layout = self._link.exchange.layout
        assert layout is not None, "joined"
        fragment = layout.fragments[work.answer.stamp.fragment]
        base = self._link.parameters.local_view_of(fragment, work.base)
        return encode(outer_gradient(base, work.capture.vector), grant.settings.codec_up)

    async def deliver(
        self, header: synchronizer_pb2.PushHeader, payload: Payload
    ) -> synchronizer_pb2.PushResponse:
        """Sends a push until it is answered, from where the synchronizer has it.

        Raises:
            DilocoError: where trying again is of no use, or was tried often enough.
        """
        runtime, backoff, offset = self._link.runtime, Backoff(first_s=0.05, most_s=1.0), 0
        failure = DilocoError(Reason.NO_PROGRESS, "the push was asked to resume again and again")
        for _ in range(_MAX_ATTEMPTS):
            sent_before = offset
            try:
                response = await send(self._link.transport, header, payload, offset)
            except DilocoError as error:
                if error.reason not in _RETRIED:
                    raise
                failure, offset = error, _resume_at(error, len(payload))
            else:
                self._link.exchange.snapshots.heard(response.clock)
                if response.outcome != synchronizer_pb2.PUSH_OUTCOME_RESUME:
                    self._link.exchange.tally.bytes_up += len(payload)
                    return response
                offset = response.staged_bytes
                if offset > sent_before:
                    continue
            await runtime.sleep(backoff.failed(runtime.rng.random()))
        raise failure

    def _explain(
        self, header: synchronizer_pb2.PushHeader, response: synchronizer_pb2.PushResponse
    ) -> None:
        reason = reason_of(response.reason)
        refused = response.outcome == synchronizer_pb2.PUSH_OUTCOME_REFUSED
        _LOG.log(
            logging.WARNING if refused else logging.INFO,
            "%s: push of fragment %d for global step %d was %s, %s: %s",
            self._link.identity.learner_id,
            header.fragment,
            header.global_step,
            _WORDS.get(response.outcome, "left out"),
            reason,
            response.message,
        )
        self._look_at(DilocoError(reason, response.message))

    def _look_at(self, error: DilocoError) -> None:
        if error.reason in REJOIN or error.reason in _LEAVES:
            self._on_unknown(error)


def _resume_at(error: DilocoError, num_bytes: int) -> int:
    """Where an error says that a push is to be resumed; 0 where it does not."""
    told = error.details.get("expected", "") if error.reason is Reason.OFFSET_MISMATCH else ""
    offset = int(told) if told.isascii() and told.isdigit() and len(told) <= 18 else 0
    return offset if offset <= num_bytes else 0
