"""How a learner finds the leader: `learner_client.leaders`, in virtual time."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.simulation import services
from diloco_fleet.simulation.kernel import Either, Work
from diloco_fleet.simulation.messages import Joined
from learner_client.core.leadership import Answer, Leadership, Stall
from learner_client.core.retry import REJOIN, is_fatal

if TYPE_CHECKING:
    from diloco_fleet.simulation.learner import LearnerProcess

ASK_DEADLINE_S = 3.0
_ASK_INTERVAL_S = 0.5
_LINGER_S = 0.5


class LeaderSearch:
    """The way to whoever leads."""

    def __init__(self, learner: LearnerProcess, addresses: list[str]) -> None:
        self.leadership = Leadership(addresses)
        self.claim: Claim | None = None
        self._learner = learner
        self._lost = True

    def heard(self, claim: Claim) -> None:
        """Somebody passed on a claim."""
        self.leadership.heard(claim.term)
        if self.claim is None or claim.term > self.claim.term:
            self.claim = claim

    def joined(self, response: Joined) -> None:
        """A Join was answered."""
        if response.claim.term < self.leadership.highest:
            raise DilocoError(Reason.NOT_LEADING, "a later term was heard of")
        self.leadership.joined(response.claim.term)
        self.claim = response.claim

    def judged(self, error: DilocoError) -> DilocoError:
        """Takes what ended a connection; returns what it is to be taken for."""
        told = _term_of(error)
        leadership = self.leadership
        leadership.heard(told or 0)
        if error.reason is Reason.NOT_LEADING:
            leadership.declined()
        is_stale = (leadership.term if told is None else told) < leadership.highest
        if is_fatal(error) and is_stale:
            error = DilocoError(Reason.NOT_LEADING, f"{error.reason}, from one that leads no more")
        if error.reason not in REJOIN or not leadership.is_obeyed:
            self._lost = True
        return error

    def pause_s(self, backoff_s: float) -> float:
        """How long to wait before the next attempt, seconds."""
        return min(backoff_s, _ASK_INTERVAL_S)

    def settle(self) -> Work:
        """Goes to who leads where the connection was lost."""
        if self._lost and len(self.leadership.addresses) > 1:
            yield from self._find()
        self._lost = False

    def _find(self) -> Work:
        answers = yield from self._ask()
        best = self.leadership.choose(answers)
        if best is None:
            yield from self._relay(answers)
            raise DilocoError(Reason.NOT_LEADING, "no synchronizer leads")
        moved = self.leadership.term > 0 and best.address != self.leadership.current
        self._learner.world.tally["moves"] += moved
        self.leadership.chosen(best)

    def keep_watch(self, lease_timeout_s: float) -> Work:
        """Asks the others whenever nothing new comes for long."""
        stall, learner = Stall(lease_timeout_s), self._learner
        while True:
            online, num_versions = learner.progress()
            if stall.is_due(learner.kernel.now, online=online, num_versions=num_versions):
                answers = yield from self._ask()
                if not self.leadership.stays(answers):
                    raise DilocoError(Reason.NOT_LEADING, "asked all: another one leads")
            yield lease_timeout_s / 4

    def _relay(self, answers: list[Answer]) -> Work:
        claim, learner = self.claim, self._learner
        if claim is None or claim.term < self.leadership.highest:
            return
        for answer in answers:
            if answer.leads:
                node = learner.world.node_at(answer.address)
                request = dataclasses.replace(learner.join_request(), relays_claim=True)
                try:
                    theirs: Claim = yield learner.world.network.call(
                        learner,
                        node,
                        functools.partial(services.join, node, request),
                        ASK_DEADLINE_S,
                    )
                except DilocoError:
                    learner.world.tally["relayed"] += 1
                else:
                    self.heard(theirs)

    def _ask(self) -> Work:
        """Asks all at once; those that are slow are left out once a new leader is found."""
        addresses = self.leadership.addresses
        tasks = [self._learner.spawn(self._ask_one(address)) for address in addresses]
        while not all(task.done for task in tasks):
            yield Either([task for task in tasks if not task.done])
            done = [task.value for task in tasks if task.done]
            if any(self._is_new(answer) for answer in done):
                waiting = [task for task in tasks if not task.done]
                if waiting:
                    yield Either(waiting, _LINGER_S)
                break
        answers = [task.value for task in tasks if task.done]
        for task in tasks:
            task.cancel()
        return answers

    def _is_new(self, answer: Answer) -> bool:
        return answer.term > self.leadership.term and self.leadership.is_acceptable(answer)

    def _ask_one(self, address: str) -> Work:
        learner = self._learner
        node = learner.world.node_at(address)
        try:
            claim: Claim = yield learner.world.network.call(
                learner, node, node.get_run, ASK_DEADLINE_S
            )
        except DilocoError as error:
            follows = error.reason is Reason.NOT_LEADING
            return Answer(address=address, follows=follows, term=_term_of(error) or 0)
        self.heard(claim)
        return Answer(address=address, leads=True, term=claim.term)


def _term_of(error: DilocoError) -> int | None:
    text = str(error.details.get("term", ""))
    return int(text) if text.isdigit() else None
