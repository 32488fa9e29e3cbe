"""What waits, and for what: the reason that log, status page and metric show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from synchronizer_server.core.effects import WaitChanged
from synchronizer_server.core.rounds import Round, RoundState
from synchronizer_server.core.scheduler import Scheduler
from synchronizer_server.core.snapshots import Snapshots
from synchronizer_server.core.state import CoreState

_REASONS: Final = {
    RoundState.COLLECTING: "quorum",
    RoundState.SUSPENDED: "earlier_round",
    RoundState.GRACE: "grace",
    RoundState.PULLING: "pulling",
    RoundState.MERGING: "merging",
    RoundState.MERGED: "persist",
    RoundState.PERSISTING: "persist",
}
_SNAPSHOT: Final = "snapshot"
_CLAIMS: Final = "claims"
_NO_ROUND: Final = -1
_NO_NEWS: Final = frozenset({"pace", "in_flight"})
"""Reasons that no log line is worth: the settings want it so, or an earlier round says more."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Something that waits.

    Attributes:
        subject: what waits.
        reason: stable word for what it waits for.
        detail: the same for people, with names and numbers.
    """

    subject: str
    reason: str
    detail: str


WaitKey = tuple[int, str]
"""Global step of the round that waits (0: the seed, -1: no round), and the reason."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Reads off the state what waits; the words only where somebody wants them."""

    state: CoreState
    scheduler: Scheduler
    snapshots: Snapshots

    def keys(self, now: float) -> list[WaitKey]:
        """Everything that waits at ``now``; empty where the run is complete."""
        state = self.state
        if state.complete:
            return []
        return [*self._merging_keys(now), *self._data_keys(now)]

    def _data_keys(self, now: float) -> list[WaitKey]:
        is_held = self.state.data is not None and now < self.state.claims_until
        return [(_NO_ROUND, _CLAIMS)] if is_held else []

    def _merging_keys(self, now: float) -> list[WaitKey]:
        state = self.state
        if not state.seeded:
            return [(0, self._seed_reason())]
        found = [(r.global_step, self._round_reason(r)) for r in state.rounds]
        blocked = self.scheduler.why_not_open(now)
        if blocked is not None and blocked not in {"collecting", "complete"}:
            found.append((state.last_opened + 1, blocked))
        if self.snapshots.pending is not None:
            found.append((self.snapshots.pending.global_step, _SNAPSHOT))
        return found

    def describe(self, key: WaitKey, now: float) -> Waiting:
        """Puts one of `keys` into words."""
        global_step, reason = key
        if reason == _SNAPSHOT:
            return Waiting(subject_of(key), reason, self._snapshot_detail())
        if reason == _CLAIMS:
            detail = f"until {claimants_text(self.state)} claimed the leases of before the start"
            return Waiting(subject_of(key), reason, detail)
        if global_step == 0:
            return Waiting("seed", reason, self._seed_detail(reason))
        round_ = self.state.round(global_step)
        detail = (
            self._opening_detail(reason, now) if round_ is None else self._detail(round_, reason)
        )
        return Waiting(subject_of(key), reason, detail)

    def _snapshot_detail(self) -> str:
        pending = self.snapshots.pending
        if pending is None or pending.keeping:
            return "the manifest is being written"
        return "for the parts of " + ", ".join(sorted(pending.awaited))

    def _seed_reason(self) -> str:
        if self.state.seed_persisting:
            return self.state.held[0] or "persist"
        if self.state.seed_forbidden:
            return "store_lost"
        return "learners" if self.state.seeder is None else "seeder"

    def _seed_detail(self, reason: str) -> str:
        state = self.state
        if reason == state.held[0]:
            return state.held[1]
        if reason == "persist":
            if state.seed_retry_at is not None:
                return "the store failed; it is tried again"
            return "the first parameters are being persisted"
        if reason == "store_lost":
            return (
                f"{state.seed_forbidden} holds merged versions of this run, and the store is "
                "empty: start with the store of the run"
            )
        if state.seeder is None:
            return "no learner is there to push the first parameters"
        done, total = len(state.seeded_fragments), state.num_fragments
        return f"{state.seeder[0]} has pushed {done} of {total} fragments"

    def _round_reason(self, round_: Round) -> str:
        if round_.state is RoundState.MERGED and round_ is not self.state.rounds[0]:
            return "earlier_round"
        if round_.state is RoundState.PERSISTING and self.state.held[0]:
            return self.state.held[0]
        if round_.state is RoundState.GRACE and round_.startup:
            return "startup"
        return _REASONS[round_.state]

    def _detail(self, round_: Round, reason: str) -> str:
        if reason == "quorum":
            return self._quorum_detail(round_)
        if reason in {"grace", "startup"}:
            return self._grace_detail(round_)
        if reason == "pulling":
            return "for " + ", ".join(sorted(round_.pending))
        if reason == self.state.held[0]:
            return self.state.held[1]
        if reason == "merging":
            return "the outer step is being computed"
        if reason == "earlier_round":
            first = self.state.rounds[0].global_step
            what = "collects" if round_.state is RoundState.SUSPENDED else "commits"
            return f"round {first} {what} first"
        if round_.state is RoundState.MERGED:
            return "the store failed; it is tried again"
        return "the record is being persisted"

    def _grace_detail(self, round_: Round) -> str:
        names = [x.learner_id for x in self.scheduler.absent(round_)]
        missing = self.scheduler.missing_at_start(round_)
        if missing:
            names.append(self._missing_words(missing))
        return f"for {', '.join(names)}, at most {round_.grace_s:.2f} s"

    def _missing_words(self, missing: int) -> str:
        if self.state.knows_members:
            names = sorted(x.learner_id for x in self.state.roster.expected())
            return ", ".join(names) + " (alive under the leader before, not back yet)"
        return f"{missing} planned learners that are not live"

    def _quorum_detail(self, round_: Round) -> str:
        have = len(round_.accepted) + len(self.scheduler.candidates(round_))
        parts = [f"{have} of {self.state.quorum} learners have stepped"]
        absent = [x.learner_id for x in self.scheduler.absent(round_)]
        if absent:
            parts.append("no step yet: " + ", ".join(absent))
        if have + len(absent) < self.state.quorum:
            # Named only where the quorum cannot be met without them.
            out = [
                f"{x.learner_id} ({x.state})"
                for x in sorted(self.state.roster, key=lambda x: x.learner_id)
                if not x.live and x.learner_id not in round_.accepted
            ]
            num_never = self.state.quorum - sum(1 for _ in self.state.roster)
            if num_never > 0:
                out.append(f"{num_never} more that never joined")
            left_out = [x.learner_id for x in self.state.roster.live() if x.quarantine]
            if out:
                parts.append("not live: " + ", ".join(out))
            if left_out:
                parts.append("in quarantine: " + ", ".join(left_out))
        return "; ".join(parts)

    def _opening_detail(self, reason: str, now: float) -> str:
        state = self.state
        if reason == "in_flight":
            return f"{len(state.rounds)} rounds are in flight, overlap allows no more"
        if reason == "pace":
            return f"opens in {state.opens_at - now:.2f} s"
        return "no round opens any more"


def claimants_text(state: CoreState) -> str:
    """Who may still claim data that was leased before the start, in words."""
    if not state.claimants:
        return "learners of before the start have"
    return ", ".join(sorted(state.claimants)) + (" has" if len(state.claimants) == 1 else " have")


def subject_of(key: WaitKey) -> str:
    """What waits, in words."""
    global_step, reason = key
    if reason == _CLAIMS:
        return "data"
    if reason == _SNAPSHOT:
        return f"snapshot {global_step}"
    return f"round {global_step}" if global_step else "seed"


class WaitLog:
    """Turns waits into effects: once per change, and only for what lasts.

    A round of a healthy fleet waits for its quorum, its grace window and its pushes many times a
    second; that is no news. What waits longer than the given patience is.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._since: dict[WaitKey, float] = {}
        self._told: dict[int, str] = {}
        self._subjects: dict[int, str] = {}

    def observe(self, now: float, patience_s: float) -> list[WaitChanged]:
        """Returns what is to be told."""
        before = self._since
        self._since = {key: before.get(key, now) for key in self._waits.keys(now)}
        changes: list[WaitChanged] = []
        if self._told:
            changes += self._ended()
        for key, since in self._since.items():
            if now < since + patience_s or key[1] in _NO_NEWS:
                continue
            if self._told.get(key[0]) == key[1]:
                continue
            wait = self._waits.describe(key, now)
            # "startup" counts seconds and "seeder" fragments: the reason is the change, except
            # for a quorum, where it matters who is missing.
            news = wait.detail if wait.reason == "quorum" else wait.reason
            if self._told.get(key[0]) != news:
                self._told[key[0]] = news
                self._subjects[key[0]] = wait.subject
                changes.append(
                    WaitChanged(subject=wait.subject, reason=wait.reason, detail=wait.detail)
                )
        return changes

    def _ended(self) -> list[WaitChanged]:
        waiting = {global_step for global_step, _ in self._since}
        ended = [global_step for global_step in self._told if global_step not in waiting]
        for global_step in ended:
            del self._told[global_step]
        return [
            WaitChanged(subject=self._subjects.pop(t), reason="", detail="goes on") for t in ended
        ]

    def current(self, now: float) -> list[tuple[Waiting, float]]:
        """Everything that waits, with for how long, seconds."""
        return [
            (self._waits.describe(key, now), now - self._since.get(key, now))
            for key in self._waits.keys(now)
        ]

    def next_at(self, now: float, patience_s: float) -> float | None:
        """When something that waits becomes news; None where nothing does."""
        news_at = [
            since + patience_s for key, since in self._since.items() if key[1] not in _NO_NEWS
        ]
        return min((at for at in news_at if at > now), default=None)
