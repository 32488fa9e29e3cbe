"""Drives a `SynchronizerCore` by hand, in words: the bench of the unit tests and of the traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeVar

from decoupled_diloco.errors import Reason
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.state import Restored
from synchronizer_server.core.synchronizer import SynchronizerCore

TOKENS = 64
E = TypeVar("E")
ACTIONS = ("push", "merge", "persist")


def settings(**changes: object) -> RunSettings:
    """Four fragments, H = 4: a round per inner step; three learners of 0.1 s per step."""
    values: dict[str, object] = {
        "num_learners": 3, "num_fragments": 4, "sync_interval": 4, "overlap": 2, **changes,
    }  # fmt: skip
    return RunSettings(**values)  # type: ignore[arg-type]


class Script:
    """One synchronizer; every method feeds events and returns the effects, in order.

    What is in ``auto`` happens by itself and at once: pushes of asked learners (unless they are
    in ``mute``), merges, persisting.
    """

    def __init__(
        self, run_settings: RunSettings | None = None, *, restored: Restored | None = None,
        term: int = 1,
    ) -> None:  # fmt: skip
        self.settings = run_settings or settings()
        self.now = 0.0
        self.P = self.settings.num_fragments
        self.core = SynchronizerCore(
            self.settings, term=term, num_fragments=self.P, restored=restored, now=0.0
        )
        self.lives: dict[str, Incarnation] = {}
        self.steps: dict[str, int] = {}
        self.auto: set[str] = set()
        self.mute: set[str] = set()
        self.versions: dict[tuple[int, int], Version] = {}
        self.headers: dict[str, ev.PushOpened] = {}
        self.log: list[tuple[float, ef.Effect]] = []

    # -- feeding ---------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> list[ef.Effect]:
        effects = self.core.handle(event, self.now)
        self.log += [(self.now, e) for e in effects]
        result = list(effects)
        for effect in effects:
            result += self._automatic(effect)
        return result

    def _automatic(self, effect: ef.Effect) -> list[ef.Effect]:
        match effect:
            case ef.SendPull() if "push" in self.auto and effect.learner_id not in self.mute:
                return self.push(effect.learner_id, t=effect.global_step)
            case ef.MergeRound() if "merge" in self.auto:
                return self.merged(effect.global_step, effect.roll_back_to)
            case ef.PersistRound() if "persist" in self.auto:
                return self.persisted(effect.summary.global_step)
            case _:
                return []

    def advance(self, seconds: float) -> list[ef.Effect]:
        """Time passes, with a tick whenever the core asked for one."""
        until = self.now + seconds
        result: list[ef.Effect] = []
        while (wake := self.core.wake_at(self.now)) is not None and wake <= until:
            assert wake > self.now, "a tick at wake_at must get somewhere"
            self.now = wake
            result += self.feed(ev.Tick())
        self.now = until
        return result

    # -- learners --------------------------------------------------------------------------------

    def join(self, name: str, *, records_parts: bool = True) -> list[ef.Effect]:
        before = self.lives.get(name)
        if before is None and (known := self.core.state.roster.find(name)) is not None:
            before = known.incarnation
        number = before.number + 1 if before is not None else 1
        self.lives[name] = Incarnation(self.core.state.term, number)
        shard = self.core.shard_for(name)
        assert shard is not None
        return self.feed(
            ev.LearnerJoined(
                learner_id=name, incarnation=self.lives[name], shard=shard,
                records_parts=records_parts,
            )
        )  # fmt: skip

    def open(self, name: str) -> list[ef.Effect]:
        return self.feed(ev.StreamOpened(learner_id=name, incarnation=self.lives[name]))

    def close(self, name: str) -> list[ef.Effect]:
        return self.feed(ev.StreamClosed(learner_id=name, incarnation=self.lives[name]))

    def leave(self, name: str) -> list[ef.Effect]:
        return self.feed(
            ev.LearnerLeft(learner_id=name, incarnation=self.lives[name], reason="goodbye")
        )

    def drain(self, name: str) -> list[ef.Effect]:
        """An operator asks it to leave."""
        return self.feed(ev.LearnerDrained(learner_id=name, reason="new disk"))

    def up(self, *names: str) -> list[ef.Effect]:
        """They join and open their streams."""
        result: list[ef.Effect] = []
        for name in names:
            result += self.join(name) + self.open(name)
        return result

    def heard(self, *names: str) -> None:
        for name in names:
            self.feed(ev.Heard(learner_id=name, incarnation=self.lives[name]))

    def report(self, *names: str, step: int | None = None) -> list[ef.Effect]:
        """They report an inner step, the next one where none is given."""
        result: list[ef.Effect] = []
        for name in names:
            self.steps[name] = step if step is not None else self.steps.get(name, 0) + 1
            result += self.feed(
                ev.StepReported(
                    learner_id=name, incarnation=self.lives[name], local_step=self.steps[name],
                    num_steps=1, num_tokens=TOKENS,
                )
            )  # fmt: skip
        return result

    def decline(self, name: str, t: int) -> list[ef.Effect]:
        return self.feed(
            ev.PullDeclined(
                learner_id=name, incarnation=self.lives[name], global_step=t,
                reason=Reason.NOT_READY,
            )
        )  # fmt: skip

    # -- pushes ----------------------------------------------------------------------------------

    def header(
        self, name: str, *, t: int | None = None, base: int | Version | None = None,
        tokens: int = TOKENS, num_steps: int = 1, term: int | None = None,
        life: Incarnation | None = None, fragment: int | None = None, local_step: int | None = None,
    ) -> ev.PushOpened:  # fmt: skip
        if t is None:
            t = next(r.global_step for r in self.core.state.rounds if name in r.pending)
        if fragment is None:
            fragment = t % self.P
        if base is None:
            base = self.core.state.lineage.current(fragment % self.P)
        elif isinstance(base, int):
            base = self.versions[fragment, base]
        return ev.PushOpened(
            key=ev.PushKey(name, life or self.lives.get(name, Incarnation(1, 1)), t, fragment),
            term=self.core.state.term if term is None else term,
            base=base,
            local_step=self.steps.get(name, 1) if local_step is None else local_step,
            num_tokens=tokens,
            num_steps=num_steps,
        )

    def push_open(self, name: str, **how: object) -> list[ef.Effect]:
        self.headers[name] = self.header(name, **how)  # type: ignore[arg-type]
        return self.feed(self.headers[name])

    def stage(self, name: str, norm: float = 1.0) -> list[ef.Effect]:
        return self.feed(ev.PushStaged(key=self.headers[name].key, norm=norm))

    def progress(self, name: str, staged_bytes: int = 1) -> list[ef.Effect]:
        return self.feed(ev.PushProgressed(key=self.headers[name].key, staged_bytes=staged_bytes))

    def fail(self, name: str, reason: Reason, *, refused: bool) -> list[ef.Effect]:
        return self.feed(
            ev.PushFailed(
                key=self.headers[name].key, reason=reason, message="bad bytes", refused=refused
            )
        )

    def push(self, name: str, *, norm: float = 1.0, **how: object) -> list[ef.Effect]:
        """Opens a push and stages it, unless it is answered at its header."""
        effects = self.push_open(name, **how)
        if any(isinstance(e, ef.StagePush) for e in effects):
            effects += self.stage(name, norm)
        return effects

    # -- the shell -------------------------------------------------------------------------------

    def merged(self, t: int, roll_back_to: Version | None = None) -> list[ef.Effect]:
        digest = f"{t % self.P}/{t}".encode().ljust(32, b".")
        digest = roll_back_to.digest if roll_back_to is not None else digest
        version = Version(self.core.state.term, t, digest)
        self.versions[t % self.P, t] = version
        return self.feed(ev.RoundMerged(global_step=t, version=version))

    def persisted(self, t: int) -> list[ef.Effect]:
        return self.feed(ev.RoundPersisted(global_step=t))

    def persist_failed(self, t: int, retry_after_s: float = 1.0) -> list[ef.Effect]:
        return self.feed(
            ev.PersistFailed(
                global_step=t, reason=Reason.DISK_FULL, message="no room",
                retry_after_s=retry_after_s,
            )
        )  # fmt: skip

    def seed_versions(self) -> tuple[Version, ...]:
        for f in range(self.P):
            self.versions[f, 0] = Version(1, 0, f"{f}/0".encode().ljust(32, b"."))
        return tuple(self.versions[f, 0] for f in range(self.P))

    def stage_seed(self, name: str, *fragments: int) -> list[ef.Effect]:
        result: list[ef.Effect] = []
        for fragment in fragments or range(self.P):
            result += self.feed(
                ev.SeedStaged(learner_id=name, incarnation=self.lives[name], fragment=fragment)
            )
        return result

    def seed(self, name: str) -> list[ef.Effect]:
        """The learner pushes the whole seed, and it is persisted."""
        return self.stage_seed(name) + self.feed(ev.SeedPersisted(versions=self.seed_versions()))

    # -- short cuts ------------------------------------------------------------------------------

    def warm(self, *names: str, steps: int = 6) -> Script:
        """Brings a fleet of equal learners to a known pace of 0.1 s; the next round collects.

        Warms up with grace and K = 1, whatever the settings, so that all step in one rhythm.
        """
        state = self.core.state
        quorum, auto, self.auto = state.quorum, self.auto, set(ACTIONS)
        state.quorum = 1
        state.settings = state.pace.settings = dataclasses.replace(self.settings, grace=True)
        self.up(*names)
        self.seed(names[0])
        for _ in range(steps):
            self.report(*names)
            self.advance(0.1)
        if not state.rounds:
            self.advance(state.opens_at - self.now)
        self.auto, state.quorum = auto, quorum
        state.settings = state.pace.settings = self.settings
        assert abs((state.pace.step_s or 0.0) - 0.1) < 1e-6
        assert [r.state.value for r in state.rounds] == ["collecting"]
        return self

    def run_to_end(self, *names: str) -> Script:
        """Trains until the run is complete."""
        self.up(*names)
        self.seed(names[0])
        self.auto = set(ACTIONS)
        while not self.core.state.complete:
            self.report(*names)
            self.advance(0.1)
        return self

    @property
    def t(self) -> int:
        """The newest round."""
        return self.core.state.last_opened

    def reasons(self) -> list[str]:
        return [w.reason for w, _ in self.core.waits(self.now)]

    def details(self) -> str:
        return " | ".join(
            f"{w.subject}: {w.reason}: {w.detail}" for w, _ in self.core.waits(self.now)
        )


def only(effects: Iterable[ef.Effect], kind: type[E]) -> list[E]:
    """The effects of one kind."""
    return [e for e in effects if isinstance(e, kind)]


def pulls(effects: Iterable[ef.Effect]) -> list[tuple[str, int]]:
    """Who is asked, for which round."""
    return [(e.learner_id, e.global_step) for e in only(effects, ef.SendPull)]


def answers(effects: Iterable[ef.Effect]) -> list[str]:
    """What pushes are answered, in words."""
    found = []
    for e in effects:
        if isinstance(e, ef.AcceptPush):
            found.append(f"{e.key.learner_id} accepted")
        elif isinstance(e, ef.AnswerPush):
            found.append(f"{e.key.learner_id} {e.outcome} {e.reason}")
    return found


def words(effect: ef.Effect) -> str:
    """One effect as a line of a trace."""
    match effect:
        case ef.GrantSeed():
            return f"grant seed to {effect.learner_id} {effect.incarnation}"
        case ef.SendPull():
            return (
                f"ask {effect.learner_id} for round {effect.global_step} fragment {effect.fragment}"
            )
        case ef.SendSchedule():
            due = ",".join(map(str, effect.due_fragments))
            return f"schedule: t is {effect.global_step}, due {due}"
        case ef.SendStop():
            return f"stop at {effect.global_step}"
        case ef.Fence():
            return f"fence {effect.learner_id} {effect.incarnation}"
        case ef.CloseStream():
            return f"close {effect.learner_id} {effect.incarnation}: {effect.reason}"
        case ef.StagePush():
            return f"stage {_key(effect.key)}"
        case ef.AcceptPush():
            rebase = ", rebase" if effect.rebase else ""
            return f"accept {_key(effect.key)}: weight {effect.weight:g}{rebase}"
        case ef.AnswerPush():
            return f"answer {_key(effect.key)}: {effect.outcome} {effect.reason}: {effect.message}"
        case ef.MergeRound():
            back = f", back to {effect.roll_back_to}" if effect.roll_back_to else ""
            return f"merge round {effect.global_step}{back}"
        case ef.PersistSeed():
            return "persist seed"
        case ef.PublishSeed():
            return "publish seed"
        case ef.PersistRound():
            s = effect.summary
            who = " ".join(c.learner_id for c in s.contributions)
            out = "".join(f", without {d.learner_id} {d.reason}" for d in s.dropped)
            return f"persist round {s.global_step}: {who}{out}; live {' '.join(s.live)}"
        case ef.PublishRound():
            return f"publish round {effect.summary.global_step}"
        case ef.WaitChanged():
            return f"{effect.subject} waits: {effect.reason or '-'}: {effect.detail}"
        case ef.LearnerChanged():
            return f"{effect.learner_id} {effect.incarnation} is {effect.state}: {effect.reason}"
        case ef.QuarantineChanged():
            if not effect.reason:
                return f"{effect.learner_id} is tried again"
            return f"{effect.learner_id} is left out for {effect.seconds:g} s: {effect.reason}"
        case ef.CountersCut():
            return f"{effect.learner_id} {effect.detail}"
        case ef.RollBackFailed():
            return f"fragment {effect.fragment} is not put back: {effect.message}"
        case ef.AskDonor():
            return f"ask {effect.learner_id} to give to {effect.recipient_id}"
        case ef.DropDonor():
            return f"take no more from {effect.learner_id}: {effect.reason}"
        case ef.EndRecovery():
            return f"end recovery {effect.recovery_id}: {effect.reason}"
        case ef.Completed():
            return f"complete at {effect.global_step}"


def _key(key: ev.PushKey) -> str:
    return f"{key.learner_id} {key.incarnation} round {key.global_step}"
