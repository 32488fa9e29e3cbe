"""Where a learner stands with its synchronizer: a table of states, and online or offline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from decoupled_diloco.errors import Reason


class State(StrEnum):
    """What a learner is doing.

    TRAINING goes on with the synchronizer away: being online is a fact beside the state.
    """

    JOINING = "joining"
    SEEDING = "seeding"
    SYNCING = "syncing"
    TRAINING = "training"
    DRAINING = "draining"
    FINISHED = "finished"
    FENCED = "fenced"
    REFUSED = "refused"
    LEFT = "left"


class Event(StrEnum):
    """What moves a learner from state to state."""

    JOINED = "joined"
    SEED_GRANTED = "seed_granted"
    SEEDED = "seeded"
    SYNCED = "synced"
    LOST = "lost"
    DRAIN = "drain"
    STOP = "stop"
    FENCE = "fence"
    REFUSE = "refuse"
    LEAVE = "leave"


_S, _E = State, Event

TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (_S.JOINING, _E.JOINED): _S.SYNCING,
    (_S.JOINING, _E.SEED_GRANTED): _S.SEEDING,
    (_S.SEEDING, _E.SEEDED): _S.SYNCING,
    (_S.SEEDING, _E.LOST): _S.JOINING,
    (_S.SYNCING, _E.LOST): _S.JOINING,
    (_S.SYNCING, _E.SYNCED): _S.TRAINING,
    **{
        (state, event): target
        for state in (_S.JOINING, _S.SEEDING, _S.SYNCING, _S.TRAINING, _S.DRAINING)
        for event, target in (
            (_E.STOP, _S.FINISHED),
            (_E.FENCE, _S.FENCED),
            (_E.REFUSE, _S.REFUSED),
        )
    },
    **{
        (state, _E.DRAIN): _S.DRAINING
        for state in (_S.JOINING, _S.SEEDING, _S.SYNCING, _S.TRAINING)
    },
    **{
        (state, _E.LEAVE): _S.LEFT
        for state in (_S.JOINING, _S.SEEDING, _S.SYNCING, _S.TRAINING, _S.DRAINING)
    },
}
"""Pairs that are absent change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something to say once.

    Attributes:
        state: the state now.
        online: whether the synchronizer answers.
        reason: stable word for why.
        detail: the same for people.
    """

    state: State
    online: bool
    reason: str
    detail: str


class Connection:
    """State of the connection; every method returns what is new to say, or None."""

    def __init__(self) -> None:
        self._state = State.JOINING
        self._online = False
        self._reason = "joining"
        self._detail = "not connected yet"

    @property
    def state(self) -> State:
        """What the learner is doing."""
        return self._state

    @property
    def online(self) -> bool:
        """Whether the synchronizer answers."""
        return self._online

    @property
    def reason(self) -> str:
        """Why the learner waits or is offline; empty where neither is so."""
        return self._reason

    @property
    def detail(self) -> str:
        """The reason, for people."""
        return self._detail

    def happened(self, event: Event, reason: str = "", detail: str = "") -> Change | None:
        """Takes an event."""
        target = TRANSITIONS.get((self._state, event))
        if target is None or target is self._state:
            return None
        self._state = target
        self._reason, self._detail = reason, detail
        return self._change()

    def up(self) -> Change | None:
        """The synchronizer answers."""
        if self._online:
            return None
        self._online = True
        self._reason = self._detail = ""
        return self._change()

    def down(self, reason: Reason, detail: str) -> Change | None:
        """The synchronizer does not answer, or answers with an error that heals."""
        if not self._online and self._reason == reason:
            self._detail = detail
            return None
        self._online = False
        self._reason, self._detail = str(reason), detail
        return self._change()

    def waits(self, reason: str, detail: str) -> Change | None:
        """The learner waits for something while connected."""
        if (self._reason, self._detail) == (reason, detail):
            return None
        self._reason, self._detail = reason, detail
        return self._change()

    def _change(self) -> Change:
        return Change(
            state=self._state, online=self._online, reason=self._reason, detail=self._detail
        )


def left_out(reason: str, seconds: float) -> tuple[str, str]:
    """What a learner waits for that is left out for so long, or (reason empty) no longer is."""
    if not reason:
        return "", ""
    return str(Reason.QUARANTINED), f"left out for {seconds:.0f} s, training on: {reason}"
