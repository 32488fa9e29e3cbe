"""What operators ask of a running fleet: quorum, drain of a learner, a fragment put back."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from google.protobuf.message import Message

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.settings import quorum_above_learners
from decoupled_diloco.v1 import admin_pb2 as pb
from decoupled_diloco.wire import version_to
from synchronizer_server.convert import check_id, one_line
from synchronizer_server.core import events as ev
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.engine import Engine

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

MAX_QUORUM: Final = 100_000
_MAX_REMEMBERED: Final = 256


class OperatorDesk:
    """Carries out operators' requests, each of them once.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: OrderedDict[tuple[str, str], asyncio.Task[Message]] = OrderedDict()

    async def set_quorum(self, request: pb.SetQuorumRequest) -> pb.SetQuorumResponse:
        """Sets the minimum quorum.

        Raises:
            UsageError: CONFIG_INVALID for a quorum that cannot be, QUORUM_ABOVE_LEARNERS for one
                that the planned learners cannot meet where nobody else may join.
        """
        return await self._once("quorum", request.request_id, lambda: self._set_quorum(request))

    async def drain_learner(self, request: pb.DrainLearnerRequest) -> pb.DrainLearnerResponse:
        """Asks a learner to finish its step and leave; one that is drained has done so.

        Raises:
            DilocoError: UNKNOWN_LEARNER for one that never joined, UNAVAILABLE for one that is not
                connected.
        """
        return await self._once("drain", request.request_id, lambda: self._drain(request))

    async def roll_back(self, request: pb.RollBackFragmentRequest) -> pb.RollBackFragmentResponse:
        """Puts a fragment back and answers once that is published.

        Raises:
            DilocoError: why it cannot be.
        """
        return await self._once("rollback", request.request_id, lambda: self._roll_back(request))

    async def _once(self, what: str, request_id: str, work: Callable[[], Awaitable[M]]) -> M:
        """Does a request the first time; a repetition gets the same answer. Failures are no answer.

        The caller may hang up and ask again: the work goes on.
        """
        key = (what, check_id(request_id, "request_id"))
        task = self._answers.get(key)
        if task is None:

            async def run() -> Message:
                return await work()

            task = asyncio.get_running_loop().create_task(run())
            task.add_done_callback(_look)  # nobody may be left who asks
            self._answers[key] = task
            while len(self._answers) > _MAX_REMEMBERED:
                self._answers.popitem(last=False)
        try:
            answer = await asyncio.shield(task)
        except Exception:
            self._answers.pop(key, None)
            raise
        return answer  # type: ignore[return-value]

    async def _set_quorum(self, request: pb.SetQuorumRequest) -> pb.SetQuorumResponse:
        engine, quorum = self._engine, request.quorum
        if not 1 <= quorum <= MAX_QUORUM:
            raise UsageError(
                Reason.CONFIG_INVALID, f"quorum is {quorum}; between 1 and {MAX_QUORUM}"
            )
        settings = engine.parts.settings
        if settings.data_mode == "shards" and quorum > settings.num_learners:
            # Each planned learner has a shard; nobody else can ever join.
            raise quorum_above_learners(quorum, settings.num_learners)
        try:
            await engine.parts.membership.set_quorum(quorum, engine.core.state.term)
        except DilocoError as error:
            if error.reason not in {Reason.MEMBERSHIP_UNAVAILABLE, Reason.MALFORMED}:
                raise
            logger.warning("the membership keeps another quorum for now: %s", error.message)
            engine.quorum_owed = True
        before = engine.core.state.quorum
        engine.handle(ev.QuorumSet(quorum=quorum))
        num_live = len(engine.core.state.roster.taking_part())
        above = f"; only {num_live} learners are live: merging waits for more"
        logger.log(
            logging.WARNING if quorum > num_live else logging.INFO,
            "quorum %d, was %d%s",
            quorum,
            before,
            above if quorum > num_live else "",
        )
        engine.parts.journal.write("quorum", quorum=quorum, before=before)
        return pb.SetQuorumResponse(quorum=quorum)

    async def _drain(self, request: pb.DrainLearnerRequest) -> pb.DrainLearnerResponse:
        engine, learner_id = self._engine, request.learner_id
        learner = engine.core.state.roster.find(learner_id)
        stream = engine.streams.get(learner_id)
        if learner is None:
            known = sorted(x.learner_id for x in engine.core.state.roster)
            names = ", ".join(known[:20]) or "none yet"
            raise DilocoError(
                Reason.UNKNOWN_LEARNER, f"no learner {learner_id[:40]!r}; learners are {names}"
            )
        if learner.state is LearnerState.DRAINED:
            return pb.DrainLearnerResponse(already_drained=True)
        if stream is None or stream.closed:
            raise DilocoError(
                Reason.UNAVAILABLE,
                f"{learner_id} is not connected ({learner.state}), so it cannot be asked to leave; "
                "try again once it is back",
            )
        reason = one_line(request.reason) or "an operator asked for it"
        engine.handle(ev.LearnerDrained(learner_id=learner_id, reason=reason))
        logger.info("%s is asked to leave: %s", learner_id, reason)
        engine.parts.journal.write("drain", learner_id=learner_id, reason=reason)
        return pb.DrainLearnerResponse()

    async def _roll_back(self, request: pb.RollBackFragmentRequest) -> pb.RollBackFragmentResponse:
        engine, fragment = self._engine, request.fragment
        reason = one_line(request.reason)
        if not reason:
            raise UsageError(
                Reason.CONFIG_INVALID, "say why the fragment is put back: the record keeps it"
            )
        refusal = engine.core.roll_back_refusal(fragment)
        if refusal is not None:
            raise DilocoError(*refusal)
        done = engine.roll_backs.wait(fragment)
        engine.handle(ev.RollBack(fragment=fragment, reason=reason))
        logger.warning(
            "fragment %d is put back to before %s with its next round: %s",
            fragment,
            engine.updates.version(fragment),
            reason,
        )
        return pb.RollBackFragmentResponse(version=version_to(await asyncio.shield(done)))


def _look(task: asyncio.Task[Message]) -> None:
    if not task.cancelled():
        task.exception()
