"""Answers pulls: `learner_client.pusher`, in virtual time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Version
from diloco_fleet.simulation import services
from diloco_fleet.simulation.kernel import Task, Work, within
from diloco_fleet.simulation.messages import Push
from diloco_fleet.simulation.network import unavailable
from learner_client.captures import PushWork
from learner_client.core.learner_core import AnswerDecline, PullRequest
from learner_client.core.retry import REJOIN, Backoff
from learner_client.grants import Grant
from learner_client.pushes import outer_gradient

if TYPE_CHECKING:
    from diloco_fleet.simulation.learner import LearnerProcess

_MAX_ATTEMPTS = 20
_LEAVES = frozenset({Reason.FENCED, Reason.NOT_LEADING})


def push_of(
    learner_id: str, grant: Grant, *, fragment: int, codec: str, vector: torch.Tensor,
    base: Version,
    **rest: Any,  # noqa: ANN401  fields of the message
) -> Push:  # fmt: skip
    """A message with an encoded vector."""
    fields = {"global_step": 0, "local_step": 0, "num_tokens": 0, "num_steps": 0, "work": None}
    return Push(
        learner_id=learner_id,
        incarnation=grant.incarnation,
        fragment=fragment,
        base=base,
        codec=codec,
        payload=bytes(get_codec(codec).encode(vector)),
        **{"term": grant.term, **fields, **rest},
    )


class Pusher:
    """Runs the pushes of one learner."""

    def __init__(self, learner: LearnerProcess) -> None:
        self._learner = learner
        self._tasks: dict[Task, Grant] = {}
        self._credited: dict[int, int] = {}

    def pulled(self, pull: PullRequest, grant: Grant) -> Reason | None:
        """Answers a pull: starts a push, or returns why not."""
        learner = self._learner
        self._tasks = {task: g for task, g in self._tasks.items() if not task.done}
        if len(self._tasks) >= 2 * grant.settings.overlap + 2:
            return Reason.OUT_OF_MEMORY_BUDGET
        work = learner.exchange.pull(pull)
        if isinstance(work, AnswerDecline):
            return work.reason
        first = learner.applied_at[pull.fragment]
        counted = work.answer.counters.num_steps
        credited = max(first, self._credited.get(pull.fragment, 0))
        learner.world.oracle.counts(learner, counted, credited, work.answer.stamp.totals.num_steps)
        self._tasks[learner.spawn(self._push(work, grant, first))] = grant
        return None

    def keep_only(self, grant: Grant) -> None:
        """Gives up the pushes of an earlier incarnation; nobody would take them."""
        for task, started in list(self._tasks.items()):
            if (started.incarnation, started.term) != (grant.incarnation, grant.term):
                task.cancel()
                del self._tasks[task]

    def close(self) -> None:
        """Gives up all pushes."""
        for task in self._tasks:
            task.cancel()

    def _push(self, work: PushWork, grant: Grant, first: int) -> Work:
        learner = self._learner
        stamp, pull = work.answer.stamp, work.answer.pull
        vector = outer_gradient(work.base, work.capture.vector)
        request = push_of(
            learner.learner_id,
            grant,
            term=pull.term,
            fragment=stamp.fragment,
            codec=grant.settings.codec_up,
            vector=vector,
            base=stamp.base,
            global_step=pull.global_step,
            local_step=stamp.local_step,
            num_tokens=work.answer.counters.num_tokens,
            num_steps=work.answer.counters.num_steps,
            work=(learner.uid, first, stamp.totals.num_steps),
        )
        learner.world.oracle.pushes(learner, request, work.capture.vector.clone())
        request = learner.world.faults.hostile(learner, request)
        learner.sent.append(request)
        learner.exchange.release(work.capture)
        delivery = learner.spawn(self._deliver(request))
        try:
            accepted, reason, message = yield from within(delivery, grant.settings.push_timeout_s)
        except TimeoutError:
            delivery.cancel()
            learner.exchange.settled(stamp, accepted=False, word=str(Reason.TOO_LATE))
            return
        except DilocoError as error:
            learner.exchange.settled(stamp, accepted=False, word=str(error.reason))
            accepted, reason, message = False, error.reason, error.message
        else:
            learner.exchange.settled(stamp, accepted=accepted, word=str(reason))
            if accepted:
                known = self._credited.get(stamp.fragment, 0)
                self._credited[stamp.fragment] = max(known, stamp.totals.num_steps)
        if not accepted and (reason in REJOIN or reason in _LEAVES):
            learner.fail_session(DilocoError(reason, message))

    def _deliver(self, request: Push) -> Work:
        learner = self._learner
        backoff = Backoff(first_s=0.05, most_s=1.0)
        failure = unavailable("the synchronizer")
        for _ in range(_MAX_ATTEMPTS):
            node = learner.world.node_at(learner.search.leadership.current)
            try:
                return (
                    yield learner.world.network.call(
                        learner,
                        node,
                        functools.partial(services.push, node, request),
                        learner.world.settings.push_timeout_s,
                    )
                )
            except DilocoError as error:
                if error.reason is not Reason.UNAVAILABLE:
                    raise
                failure = error
            yield backoff.failed(learner.world.rng.random())
        raise failure
