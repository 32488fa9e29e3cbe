"""Learner recovery: who gives its inner state to whom, and when that is given up (paper 7.2).

The bytes pass through the shell. Here it is decided which live learner is asked, that each gives to
one at a time, that one which fails is replaced by the next, and that an attempt is void once more
global steps have passed than a learner may be behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import events as ev
from synchronizer_server.core.effects import AskDonor, DropDonor, EndRecovery
from synchronizer_server.core.roster import Learner
from synchronizer_server.core.state import CoreState
from synchronizer_server.core.waits import Waiting

MAX_DONORS: Final = 3
"""Learners asked for one recovery, one after the other."""


class Phase(StrEnum):
    """Where a recovery stands; the values are the reasons for which it waits."""

    CHOOSING = "donor"
    ASKED = "donor_copy"
    SENDING = "transfer"
    DELIVERING = "delivery"


@dataclass(slots=True, kw_only=True)
class Recovery:
    """One learner that is to get inner state.

    Attributes:
        recovery_id: its name.
        learner_id: who gets it.
        incarnation: under which life.
        known: global step by fragment that the recipient has: the donor must have them too.
        committed: t when it began.
        began_at: when, seconds.
        phase: where it stands.
        donor: who was asked, and under which life.
        tried: who was asked before.
        due_at: when somebody must have got further, seconds.
        is_blocked: True while the bytes wait for the recipient.
    """

    recovery_id: str
    learner_id: str
    incarnation: Incarnation
    known: tuple[int, ...]
    committed: int
    began_at: float
    phase: Phase = Phase.CHOOSING
    donor: tuple[str, Incarnation] | None = None
    tried: list[str] = field(default_factory=list)
    due_at: float = 0.0
    is_blocked: bool = False


class RecoveryDesk:
    """All recoveries under way, in the order in which they were asked for.

    Args:
        state: state of the core.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._recoveries: dict[str, Recovery] = {}
        self._num_given: Counter[str] = Counter()

    def take(
        self,
        event: ev.RecoveryAsked | ev.DonationProgressed | ev.DonationFailed | ev.RecoveryEnded,
        now: float,
    ) -> None:
        """Takes an event; `advance` draws the conclusions."""
        match event:
            case ev.RecoveryAsked():
                self._asked(event, now)
            case ev.DonationProgressed():
                self._progressed(event, now)
            case ev.DonationFailed():
                recovery = self._recoveries.get(event.recovery_id)
                if recovery is not None and self._gives_to(recovery, event.learner_id):
                    self._drop_donor(recovery, event.reason, event.message)
            case ev.RecoveryEnded():
                self._recoveries.pop(event.recovery_id, None)

    def advance(self, now: float) -> None:
        """Ends what is void, replaces donors that are gone, asks donors that are free."""
        for recovery in list(self._recoveries.values()):
            if self._why_over(recovery, now):
                continue
            self._check_donor(recovery, now)
            if recovery.phase is Phase.CHOOSING:
                self._choose(recovery, now)

    def deadlines(self) -> Iterator[float]:
        """When somebody must have got further, seconds."""
        for recovery in self._recoveries.values():
            if recovery.phase is not Phase.CHOOSING:
                yield recovery.due_at

    def waits(self, now: float) -> list[tuple[Waiting, float]]:
        """What each recovery waits for, and since when it is under way, seconds."""
        return [
            (
                Waiting(f"recovery of {r.learner_id}", str(r.phase), _detail(r)),
                max(now - r.began_at, 0.0),
            )
            for r in self._recoveries.values()
        ]

    # -- events --------------------------------------------------------------------------------

    def _asked(self, event: ev.RecoveryAsked, now: float) -> None:
        for other in list(self._recoveries.values()):
            if other.learner_id == event.learner_id:
                self._end(other, Reason.RECOVERY_VOID, "the learner asked again")
        recovery = Recovery(
            recovery_id=event.recovery_id,
            learner_id=event.learner_id,
            incarnation=event.incarnation,
            known=event.known_global_steps,
            committed=self._state.committed,
            began_at=now,
        )
        self._recoveries[event.recovery_id] = recovery
        if self._state.committed == 0:
            self._end(recovery, Reason.NO_DONOR, "nothing is merged yet: nobody has more to give")

    def _progressed(self, event: ev.DonationProgressed, now: float) -> None:
        recovery = self._recoveries.get(event.recovery_id)
        if recovery is None or not _is_donor(recovery, event.learner_id):
            return
        is_whole = event.is_whole or recovery.phase is Phase.DELIVERING
        recovery.phase = Phase.DELIVERING if is_whole else Phase.SENDING
        recovery.is_blocked = event.is_blocked or is_whole
        recovery.due_at = now + self._limit_s(event.learner_id)

    # -- conclusions ---------------------------------------------------------------------------

    def _why_over(self, recovery: Recovery, now: float) -> bool:
        """Ends a recovery that can lead to nothing any more; returns whether it did."""
        state = self._state
        stranger = state.roster.why_not_current(
            recovery.learner_id, recovery.incarnation, state.term
        )
        num_passed = state.committed - recovery.committed
        if stranger is not None:
            self._end(recovery, *stranger)
        elif num_passed > state.settings.sync_interval:
            self._end(
                recovery,
                Reason.RECOVERY_VOID,
                f"{num_passed} global steps have passed, at most {state.settings.sync_interval} "
                "may; ask again",
            )
        elif recovery.donor is not None and recovery.is_blocked and now >= recovery.due_at:
            self._end(recovery, Reason.NO_PROGRESS, f"{recovery.learner_id} does not read")
        else:
            return False
        return True

    def _check_donor(self, recovery: Recovery, now: float) -> None:
        if recovery.donor is None or recovery.phase is Phase.DELIVERING:
            return
        learner = self._state.roster.current(*recovery.donor)
        if learner is None or not learner.live:
            self._drop_donor(recovery, Reason.LEARNER_GONE, "it is no longer live")
        elif now >= recovery.due_at:
            self._drop_donor(recovery, Reason.NO_PROGRESS, "it got no further in time")

    def _choose(self, recovery: Recovery, now: float) -> None:
        able = [x for x in self._state.roster.live() if self._may_give(x, recovery)]
        if not able or len(recovery.tried) >= MAX_DONORS:
            self._end(recovery, Reason.NO_DONOR, self._why_none(recovery))
            return
        free = [x for x in able if not self._gives(x.learner_id)]
        if not free:
            return
        donor = min(free, key=lambda x: self._rank(x, recovery))
        recovery.donor = (donor.learner_id, donor.incarnation)
        recovery.tried.append(donor.learner_id)
        recovery.phase = Phase.ASKED
        recovery.is_blocked = False
        recovery.due_at = now + self._limit_s(donor.learner_id)
        self._num_given[donor.learner_id] += 1
        self._state.effects.append(
            AskDonor(
                recovery_id=recovery.recovery_id,
                learner_id=donor.learner_id,
                incarnation=donor.incarnation,
                recipient_id=recovery.learner_id,
                known_global_steps=recovery.known,
            )
        )

    def _rank(self, learner: Learner, recovery: Recovery) -> tuple[int, int, int, str]:
        """Who has every version already, then who gave least, then who is furthest."""
        known = learner.known_global_steps
        num_missing = sum(a < b for a, b in zip(known, recovery.known, strict=True))
        return num_missing, self._num_given[learner.learner_id], -sum(known), learner.learner_id

    def _may_give(self, learner: Learner, recovery: Recovery) -> bool:
        """A donor has trained in this life, has every fragment, and is not left out itself."""
        return (
            learner.stepped
            and not learner.quarantine
            and len(learner.known_global_steps) == len(recovery.known)
            and learner.learner_id not in recovery.tried
            and all(r.learner_id != learner.learner_id for r in self._recoveries.values())
        )

    def _gives(self, learner_id: str) -> bool:
        return any(self._gives_to(r, learner_id) for r in self._recoveries.values())

    def _gives_to(self, recovery: Recovery, learner_id: str) -> bool:
        """Whether this donor is not done yet."""
        return _is_donor(recovery, learner_id) and recovery.phase is not Phase.DELIVERING

    def _limit_s(self, donor_id: str) -> float:
        """How long nothing may move: as for a push, and a donor ends its inner step first."""
        donor = self._state.roster.find(donor_id)
        transfer_s = donor.transfer_s if donor is not None else None
        step_s = (donor.step_s if donor is not None else None) or 0.0
        return self._state.pace.push_limit_s(transfer_s) + self._state.settings.overlap * step_s

    def _why_none(self, recovery: Recovery) -> str:
        if recovery.tried:
            return f"none of {', '.join(recovery.tried)} could give its inner state"
        return "no other live learner has trained"

    def _drop_donor(self, recovery: Recovery, reason: Reason, message: str) -> None:
        assert recovery.donor is not None, "there is one to drop"
        learner_id, _ = recovery.donor
        recovery.donor = None
        recovery.phase = Phase.CHOOSING
        self._state.effects.append(
            DropDonor(
                recovery_id=recovery.recovery_id,
                learner_id=learner_id,
                reason=reason,
                message=message,
            )
        )

    def _end(self, recovery: Recovery, reason: Reason, message: str) -> None:
        del self._recoveries[recovery.recovery_id]
        self._state.effects.append(
            EndRecovery(recovery_id=recovery.recovery_id, reason=reason, message=message)
        )


def _is_donor(recovery: Recovery, learner_id: str) -> bool:
    return recovery.donor is not None and recovery.donor[0] == learner_id


def _detail(recovery: Recovery) -> str:
    if recovery.donor is None:
        return "every learner that could give its inner state gives to another one now"
    donor = recovery.donor[0]
    if recovery.phase is Phase.ASKED:
        return f"{donor} copies its inner state at its next inner step"
    if recovery.phase is Phase.DELIVERING or recovery.is_blocked:
        return f"{recovery.learner_id} reads the inner state of {donor}"
    return f"{donor} sends its inner state"
