"""A small random world round `SynchronizerCore`: dumb learners, a dumb store, a network that fails.

Everything that a learner trains is a set of numbered inner steps per fragment, so that "merged
twice" is an intersection of sets. After every event the world checks what must never happen.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from decoupled_diloco.errors import Reason
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.rounds import RoundState
from synchronizer_server.core.state import Restored
from synchronizer_server.core.synchronizer import SynchronizerCore

STEP_TOKENS = 64


@dataclass(slots=True, kw_only=True)
class Faults:
    """Probabilities of what goes wrong, per occasion; all 0 is a healthy world."""

    kill: float = 0.0
    cut: float = 0.0
    freeze: float = 0.0
    lose_push: float = 0.0
    slow_push: float = 0.0
    duplicate: float = 0.0
    slow_watch: float = 0.0
    persist: float = 0.0
    restart: float = 0.0
    garbage: float = 0.0
    same_digest: float = 0.0


@dataclass(slots=True, eq=False)
class Model:
    """A learner as dumb as can be."""

    name: str
    step_s: float
    alive: bool = False
    frozen_until: float = 0.0
    epoch: int = 0
    incarnation: Incarnation | None = None
    term: int = 0
    stream: int | None = None
    watch: int = 0
    local_step: int = 0
    due: tuple[int, ...] = ()
    base: dict[int, Version] = field(default_factory=dict)
    work: dict[int, set[int]] = field(default_factory=dict)
    counters: dict[int, int] = field(default_factory=dict)
    copies: dict[int, tuple[Version, frozenset[int], int, int]] = field(default_factory=dict)
    updates: list[tuple[int, Version]] = field(default_factory=list)


@dataclass(slots=True)
class Staged:
    """What a push carried."""

    header: ev.PushOpened
    work: frozenset[int]


def weight_of(header: ev.PushOpened) -> float:
    """Quantity times quality, written down once more."""
    return header.num_tokens * (header.num_tokens / header.num_steps)


class World:
    """Runs a core, its shell, its store and its learners in virtual time."""

    def __init__(
        self, settings: RunSettings, *, seed: int = 0, step_s: dict[str, float] | None = None,
        num_fragments: int | None = None, faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.rng = random.Random(seed)
        self.faults = faults or Faults()
        self.P = num_fragments or settings.num_fragments
        self.now = 0.0
        self.term = 1
        self.queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self.serial = 0
        self.era = 0  # of the synchronizer process; what it had in flight dies with it
        steps = step_s or {f"l{i}": 0.1 for i in range(settings.num_learners)}
        self.models = {name: Model(name, s) for name, s in steps.items()}
        self.lives: dict[str, int] = {}
        self.granted: dict[str, Incarnation] = {}
        self.shards: dict[str, int] = {}
        # the store
        self.records: list[ef.RoundSummary] = []
        self.seed_versions: tuple[Version, ...] | None = None
        self.versions: list[Version] = []
        self.merged: list[set[int]] = [set() for _ in range(self.P)]
        self.persisted_quorum = settings.quorum
        # the shell
        self.staged: dict[ev.PushKey, Staged] = {}
        self.sums: dict[int, list[Staged]] = {}
        self.results: dict[int, Version] = {}
        self.persisting: int | None = None
        self.published = 0
        # what is checked
        self.asked: dict[tuple[str, Incarnation], int] = {}
        self.reported: dict[tuple[str, Incarnation], int] = {}
        self.open_pushes: dict[ev.PushKey, int] = {}  # the newest stream of each
        self.accepted_bases: set[tuple[str, int, Version]] = set()
        self.stops = 0
        self.completed = 0
        self.num_events = 0
        self.outcomes: dict[str, int] = {}
        self.participation: list[tuple[int, int]] = []
        self.measured_h: list[float] = []
        self.commit_times: list[float] = []
        self.contributions: dict[str, int] = {}
        self.told: list[ef.WaitChanged] = []
        self.core = SynchronizerCore(settings, term=1, num_fragments=self.P, now=0.0)
        for model in self.models.values():
            self.later(self.rng.uniform(0.0, 0.05), lambda m=model: self.start(m))

    # -- time ------------------------------------------------------------------------------------

    def later(self, delay: float, what: Callable[[], None], *, shell: bool = False) -> None:
        self.serial += 1
        era = self.era if shell else -1
        heapq.heappush(self.queue, (self.now + delay, self.serial, era, what))

    def latency(self) -> float:
        return self.rng.uniform(0.001, 0.01)

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.rng.random() < probability

    def run(self, *, until: float, done: Callable[[], bool] | None = None) -> None:
        while self.now < until and not (done is not None and done()):
            wake = self.core.wake_at(self.now)
            if wake is not None and (not self.queue or wake <= self.queue[0][0]):
                # The shell may be late, and is often exactly in time.
                self.now = max(self.now, wake) + (0.03 if self.chance(0.1) else 0.0)
                self.feed(ev.Tick())
                continue
            if not self.queue:
                return
            at, _, era, what = heapq.heappop(self.queue)
            self.now = max(self.now, at)
            if era in {-1, self.era}:
                what()
                if self.chance(self.faults.restart):
                    self.restart()

    def heal(self) -> None:
        """Faults stop: everybody is there again."""
        self.faults = Faults()
        for model in self.models.values():
            model.frozen_until = 0.0
            if not model.alive:
                self.later(self.latency(), lambda m=model: self.start(m))

    # -- the shell -------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        self.num_events += 1
        if isinstance(event, ev.StepReported):
            key = (event.learner_id, event.incarnation)
            self.reported[key] = max(self.reported.get(key, 0), event.local_step)
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self.carry_out(effect)
        self.check()

    def carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.SendPull():
                self.check_pull(effect)
                model = self.models[effect.learner_id]
                if self.connected(model, effect.incarnation):
                    epoch, term = model.epoch, self.term
                    self.later(self.latency(), lambda: self.pulled(model, epoch, term, effect))
            case ef.SendSchedule():
                for model in self.models.values():
                    if self.connected(model, model.incarnation):
                        epoch = model.epoch
                        self.later(
                            self.latency(),
                            lambda m=model, e=epoch, d=effect.due_fragments: self.scheduled(
                                m, e, d
                            ),
                        )
            case ef.GrantSeed():
                model = self.models[effect.learner_id]
                epoch = model.epoch
                self.later(self.latency(), lambda: self.seed(model, epoch, effect.incarnation))
            case ef.Fence():
                assert self.granted[effect.learner_id] > effect.incarnation
            case ef.CloseStream():
                self.close(effect)
            case ef.AcceptPush():
                self.accept(effect)
            case ef.AnswerPush():
                self.answered(effect.key, effect.outcome, effect.reason)
            case ef.MergeRound():
                self.later(self.latency(), lambda: self.merge(effect), shell=True)
            case ef.PersistSeed():
                self.later(self.latency(), self.persist_seed, shell=True)
            case ef.PublishSeed():
                assert self.seed_versions is not None, "published before persisted"
                self.broadcast(range(self.P))
            case ef.PersistRound():
                self.check_persist(effect.summary)
                self.later(self.latency(), lambda: self.persist(effect.summary), shell=True)
            case ef.PublishRound():
                self.publish(effect)
            case ef.SendStop():
                self.stops += 1
                assert effect.global_step == self.settings.total_global_steps
            case ef.Completed():
                self.completed += 1
            case ef.WaitChanged():
                self.told.append(effect)
            case ef.StagePush() | ef.LearnerChanged():
                pass
            case _:
                raise AssertionError(effect)

    def connected(self, model: Model, incarnation: Incarnation | None) -> bool:
        return model.alive and model.stream is not None and model.incarnation == incarnation

    def close(self, effect: ef.CloseStream) -> None:
        model = self.models[effect.learner_id]
        if model.incarnation != effect.incarnation or model.stream is None:
            return
        stream, epoch = model.stream, model.epoch
        again = effect.reason is Reason.UNKNOWN_LEARNER
        self.later(self.latency(), lambda: self.lost_stream(model, epoch, stream, again))

    def accept(self, effect: ef.AcceptPush) -> None:
        key = effect.key
        push = self.staged.pop(key)
        header = push.header
        assert self.granted[key.learner_id] == key.incarnation, "accepted from a fenced life"
        assert header.term == self.term, "accepted from an old term"
        accepted = self.sums.setdefault(key.global_step, [])
        assert key.learner_id not in {p.header.key.learner_id for p in accepted}, "twice in a round"
        once = (key.learner_id, key.fragment, header.base)
        assert once not in self.accepted_bases, f"accepted twice on one base: {once}"
        self.accepted_bases.add(once)
        assert effect.weight == weight_of(header)
        current = self.core.state.lineage.current(key.fragment)
        assert effect.rebase == (header.base.digest != current.digest)
        accepted.append(push)
        self.answered(key, ef.Outcome.ACCEPTED, None)

    def answered(self, key: ev.PushKey, outcome: ef.Outcome, reason: Reason | None) -> None:
        self.open_pushes.pop(key, None)
        word = f"{outcome}" if reason is None else f"{outcome}:{reason}"
        self.outcomes[word] = self.outcomes.get(word, 0) + 1
        if outcome is not ef.Outcome.ACCEPTED:
            self.staged.pop(key, None)
            return
        model = self.models.get(key.learner_id)
        if model is not None and model.incarnation == key.incarnation:
            epoch = model.epoch
            self.later(self.latency(), lambda: self.credited(model, epoch, key.fragment))

    def merge(self, effect: ef.MergeRound) -> None:
        before = self.core.state.lineage.current(effect.fragment)
        self.serial += 1
        digest = self.serial.to_bytes(32, "little")
        if self.chance(self.faults.same_digest):
            digest = before.digest
        version = Version(self.term, effect.global_step, digest)
        self.results[effect.global_step] = version
        self.feed(ev.RoundMerged(global_step=effect.global_step, version=version))

    def persist_seed(self) -> None:
        if self.chance(self.faults.persist):
            self.feed(self.failure(0))
            return
        self.serial += 1
        versions = tuple(
            Version(self.term, 0, (self.serial * 64 + f).to_bytes(32, "big")) for f in range(self.P)
        )
        self.seed_versions = versions
        self.versions = list(versions)
        self.feed(ev.SeedPersisted(versions=versions))

    def failure(self, global_step: int) -> ev.PersistFailed:
        return ev.PersistFailed(
            global_step=global_step, reason=Reason.DISK_FULL, message="no room", retry_after_s=0.2
        )

    def persist(self, summary: ef.RoundSummary) -> None:
        self.persisting = None
        if self.chance(self.faults.persist):
            self.feed(self.failure(summary.global_step))
            return
        assert summary.global_step == len(self.records) + 1, "rounds commit in order, without gaps"
        self.records.append(summary)
        self.versions[summary.fragment] = self.results[summary.global_step]
        for push in self.sums.pop(summary.global_step):
            twice = self.merged[summary.fragment] & push.work
            assert not twice, f"merged twice in round {summary.global_step}: {twice}"
            self.merged[summary.fragment] |= push.work
        self.feed(ev.RoundPersisted(global_step=summary.global_step))

    def publish(self, effect: ef.PublishRound) -> None:
        summary = effect.summary
        assert len(self.records) >= summary.global_step, "published before persisted"
        assert self.records[summary.global_step - 1] == summary
        assert summary.global_step == self.published + 1
        self.published = summary.global_step
        self.participation.append((len(summary.contributions), len(summary.live)))
        if summary.measured_h is not None:
            self.measured_h.append(summary.measured_h)
        self.commit_times.append(self.now)
        for c in summary.contributions:
            self.contributions[c.learner_id] = self.contributions.get(c.learner_id, 0) + 1
        self.broadcast([summary.fragment])

    def broadcast(self, fragments: range | list[int]) -> None:
        for model in self.models.values():
            if model.alive and model.stream is not None:
                self.send_updates(model, fragments)

    def send_updates(self, model: Model, fragments: range | list[int]) -> None:
        slow = self.rng.uniform(0.1, 1.5) if self.chance(self.faults.slow_watch) else 0.0
        for fragment in fragments:
            version, watch, epoch = self.versions[fragment], model.watch, model.epoch
            self.later(
                self.latency() + slow,
                lambda f=fragment, v=version: self.update(model, epoch, watch, f, v),
            )

    def restart(self) -> None:
        """The synchronizer dies; what it had in flight is lost, what is persisted is not."""
        self.era += 1
        self.term += 1
        self.staged.clear()
        self.sums.clear()
        self.results.clear()
        self.open_pushes.clear()
        # What was accepted and not persisted may be accepted again.
        self.accepted_bases = {
            (c.learner_id, r.fragment, c.base) for r in self.records for c in r.contributions
        }
        self.persisting = None
        self.published = len(self.records)
        restored = None
        if self.seed_versions is not None:
            restored = Restored(
                global_step=len(self.records),
                versions=tuple(self.versions),
                incarnations=dict(self.granted),
                shards=dict(self.shards),
                local_steps={m.name: m.local_step for m in self.models.values()},
                tokens_merged={},
                quorum=self.persisted_quorum,
            )
        self.core = SynchronizerCore(
            self.settings, term=self.term, num_fragments=self.P, restored=restored, now=self.now
        )
        self.completed = 0
        for model in self.models.values():
            if model.alive:
                model.stream = None
                model.watch += 1
                epoch = model.epoch
                self.later(
                    self.rng.uniform(0.01, 0.5), lambda m=model, e=epoch: self.join(m, e)
                )

    # -- learners --------------------------------------------------------------------------------

    def start(self, model: Model) -> None:
        """A fresh process: nothing of the old one's parameters is left."""
        if model.alive:
            return
        model.alive = True
        model.epoch += 1
        model.incarnation = None
        model.stream = None
        model.base.clear()
        model.work.clear()
        model.counters.clear()
        model.copies.clear()
        model.updates.clear()
        model.due = ()
        epoch = model.epoch
        self.join(model, epoch)
        self.later(model.step_s, lambda: self.step(model, epoch))
        self.later(self.settings.heartbeat_interval_s, lambda: self.heartbeat(model, epoch))

    def join(self, model: Model, epoch: int) -> None:
        if not model.alive or model.epoch != epoch:
            return
        shard = self.core.shard_for(model.name)
        assert shard is not None
        assert self.shards.setdefault(model.name, shard) == shard, "a shard survives rejoining"
        self.lives[model.name] = self.lives.get(model.name, 0) + 1
        incarnation = Incarnation(self.term, self.lives[model.name])
        self.granted[model.name] = incarnation
        model.incarnation, model.term, model.stream = incarnation, self.term, None
        self.feed(ev.LearnerJoined(learner_id=model.name, incarnation=incarnation, shard=shard))
        if self.chance(self.faults.kill):
            self.die(model)
            return
        self.later(self.latency(), lambda: self.open_stream(model, epoch, incarnation))

    def open_stream(self, model: Model, epoch: int, incarnation: Incarnation) -> None:
        if not model.alive or model.epoch != epoch or model.incarnation != incarnation:
            return
        if model.term != self.term:
            return  # that synchronizer is gone; the learner joins again
        self.serial += 1
        model.stream = self.serial
        model.watch += 1
        self.feed(ev.StreamOpened(learner_id=model.name, incarnation=incarnation))
        if self.versions:
            self.send_updates(
                model, [f for f in range(self.P) if model.base.get(f) != self.versions[f]]
            )

    def lost_stream(self, model: Model, epoch: int, stream: int, again: bool) -> None:
        if not model.alive or model.epoch != epoch or model.stream != stream:
            return
        incarnation = model.incarnation
        assert incarnation is not None
        model.stream = None
        model.watch += 1
        self.feed(ev.StreamClosed(learner_id=model.name, incarnation=incarnation))
        delay = self.rng.uniform(0.01, 0.5)
        if again:
            self.later(delay, lambda: self.join(model, epoch))
        else:
            self.later(delay, lambda: self.open_stream(model, epoch, incarnation))

    def die(self, model: Model) -> None:
        model.alive = False
        incarnation, stream = model.incarnation, model.stream
        model.stream = None
        if stream is not None and incarnation is not None and self.rng.random() < 0.6:
            # A killed process's sockets close; a lost machine's do not.
            self.later(
                self.latency(),
                lambda: self.feed(
                    ev.StreamClosed(learner_id=model.name, incarnation=incarnation)
                ),
                shell=True,
            )
        self.later(self.rng.uniform(0.05, 4.0), lambda: self.start(model))

    def step(self, model: Model, epoch: int) -> None:
        if not model.alive or model.epoch != epoch:
            return
        if self.now < model.frozen_until:
            self.later(model.frozen_until - self.now, lambda: self.step(model, epoch))
            return
        if model.base:
            self.train(model)
        self.later(
            model.step_s * self.rng.uniform(0.95, 1.05), lambda: self.step(model, epoch)
        )
        if self.chance(self.faults.kill):
            self.die(model)
        elif self.chance(self.faults.freeze):
            model.frozen_until = self.now + self.rng.uniform(0.2, 4.0)
        elif self.chance(self.faults.cut) and model.stream is not None:
            self.lost_stream(model, epoch, model.stream, self.rng.random() < 0.3)
        elif self.chance(self.faults.garbage):
            self.feed(self.garbage(model))

    def train(self, model: Model) -> None:
        model.local_step += 1
        self.serial += 1
        for fragment in model.base:
            model.work[fragment].add(self.serial)
            model.counters[fragment] += 1
        for fragment, version in model.updates:
            model.base[fragment] = version
            model.work[fragment] = set()
            model.counters[fragment] = 0
        model.updates.clear()
        for fragment in model.due:
            if fragment in model.base:
                model.copies[fragment] = (
                    model.base[fragment],
                    frozenset(model.work[fragment]),
                    model.counters[fragment],
                    model.local_step,
                )
        self.report(model)

    def report(self, model: Model) -> None:
        if model.stream is None or model.incarnation is None:
            return
        event = ev.StepReported(
            learner_id=model.name, incarnation=model.incarnation, local_step=model.local_step,
            num_steps=1, num_tokens=STEP_TOKENS,
        )  # fmt: skip
        self.later(self.latency(), lambda: self.feed(event))
        if self.chance(self.faults.duplicate):
            self.later(self.rng.uniform(0.0, 0.5), lambda: self.feed(event))

    def heartbeat(self, model: Model, epoch: int) -> None:
        if not model.alive or model.epoch != epoch:
            return
        if self.now >= model.frozen_until and model.stream is not None and model.incarnation:
            self.feed(ev.Heard(learner_id=model.name, incarnation=model.incarnation))
        self.later(self.settings.heartbeat_interval_s, lambda: self.heartbeat(model, epoch))

    def scheduled(self, model: Model, epoch: int, due: tuple[int, ...]) -> None:
        if model.alive and model.epoch == epoch:
            model.due = due

    def update(self, model: Model, epoch: int, watch: int, fragment: int, version: Version) -> None:
        if not model.alive or model.epoch != epoch or model.watch != watch:
            return
        if fragment not in model.base:  # the first parameters go straight into the model
            model.base[fragment] = version
            model.work[fragment] = set()
            model.counters[fragment] = 0
        else:
            model.updates.append((fragment, version))

    def credited(self, model: Model, epoch: int, fragment: int) -> None:
        if model.alive and model.epoch == epoch:
            model.counters[fragment] = 0

    def seed(self, model: Model, epoch: int, incarnation: Incarnation) -> None:
        if not model.alive or model.epoch != epoch or model.incarnation != incarnation:
            return
        for fragment in self.rng.sample(range(self.P), self.P):
            event = ev.SeedStaged(
                learner_id=model.name, incarnation=incarnation, fragment=fragment
            )
            self.later(self.latency(), lambda e=event: self.feed(e))

    def pulled(self, model: Model, epoch: int, term: int, pull: ef.SendPull) -> None:
        if not model.alive or model.epoch != epoch or self.now < model.frozen_until:
            return
        copy = model.copies.get(pull.fragment)
        if copy is None or copy[2] == 0:
            event = ev.PullDeclined(
                learner_id=model.name, incarnation=pull.incarnation, global_step=pull.global_step,
                reason=Reason.NOT_READY,
            )  # fmt: skip
            self.later(self.latency(), lambda: self.feed(event))
            return
        base, work, steps, local_step = copy
        key = ev.PushKey(model.name, pull.incarnation, pull.global_step, pull.fragment)
        header = ev.PushOpened(
            key=key, term=term, base=base, local_step=local_step,
            num_tokens=steps * STEP_TOKENS, num_steps=steps,
        )  # fmt: skip
        self.later(self.latency(), lambda: self.push(model, header, work))
        if self.chance(self.faults.duplicate):
            self.later(self.rng.uniform(0.0, 1.0), lambda: self.push(model, header, work))

    def push(self, model: Model, header: ev.PushOpened, work: frozenset[int]) -> None:
        key = header.key
        self.serial += 1
        attempt = self.serial
        self.open_pushes[key] = attempt
        self.feed(header)
        if self.open_pushes.get(key) != attempt:
            return  # answered at once
        if self.chance(self.faults.lose_push):
            if self.rng.random() < 0.5:
                refused = self.rng.random() < 0.5
                reason = Reason.CORRUPT if refused else Reason.TRUNCATED
                event = ev.PushFailed(key=key, reason=reason, message="bad", refused=refused)
                self.later(self.latency(), lambda: self.broken(attempt, event), shell=True)
            return
        transfer = self.latency()
        if self.chance(self.faults.slow_push):
            transfer = self.rng.uniform(0.1, 5.0)
            self.later(
                transfer / 2,
                lambda: self.feed(ev.PushProgressed(key=key, staged_bytes=10)),
                shell=True,
            )
        self.later(transfer, lambda: self.whole(attempt, header, work), shell=True)

    def broken(self, attempt: int, event: ev.PushFailed) -> None:
        if self.open_pushes.get(event.key) == attempt:
            self.feed(event)

    def whole(self, attempt: int, header: ev.PushOpened, work: frozenset[int]) -> None:
        key = header.key
        if self.open_pushes.get(key) != attempt:
            return  # answered before, or sent anew: what was staged is thrown away
        self.staged[key] = Staged(header, work)
        self.feed(ev.PushStaged(key=key))
        if self.chance(self.faults.duplicate):
            self.feed(ev.PushStaged(key=key))
        if self.chance(self.faults.duplicate):
            self.feed(ev.PushFailed(key=key, reason=Reason.TRUNCATED, message="", refused=False))

    def garbage(self, model: Model) -> ev.Event:
        """Something that no honest learner sends, or sends that late."""
        rng = self.rng
        incarnation = rng.choice(
            [
                self.granted[model.name],
                Incarnation(self.term, self.lives[model.name] + 1),
                Incarnation(1, 1),
            ]
        )
        key = ev.PushKey(
            rng.choice([model.name, "stranger"]),
            incarnation,
            rng.choice([0, 1, self.published, self.core.state.last_opened + 1]),
            rng.randrange(-1, self.P + 1),
        )
        base = Version(1, rng.randrange(0, 10), b"?" * 32)
        return rng.choice(
            [
                ev.PushOpened(key=key, term=rng.choice([0, self.term]), base=base, local_step=1,
                              num_tokens=rng.choice([-1, 0, 1]), num_steps=rng.choice([-1, 0, 1])),
                ev.PushStaged(key=key),
                ev.PushProgressed(key=key, staged_bytes=1),
                ev.PushFailed(key=key, reason=Reason.MALFORMED, message="", refused=True),
                ev.SeedStaged(learner_id=model.name, incarnation=incarnation, fragment=-1),
                ev.Heard(learner_id="stranger", incarnation=incarnation),
                ev.StepReported(learner_id=model.name, incarnation=Incarnation(0, 1),
                                local_step=10**9, num_steps=1, num_tokens=1),
                ev.PullDeclined(learner_id=model.name, incarnation=incarnation, global_step=1,
                                reason=Reason.NOT_READY),
            ]
        )  # fmt: skip

    # -- what must never happen --------------------------------------------------------------------

    def check_pull(self, pull: ef.SendPull) -> None:
        learner = self.core.state.roster.find(pull.learner_id)
        assert learner is not None
        assert learner.live
        assert pull.incarnation == self.granted[pull.learner_id]
        key = (pull.learner_id, pull.incarnation)
        assert self.reported.get(key, 0) > self.asked.get(key, 0), "asked twice for one local step"
        self.asked[key] = self.reported[key]
        assert pull.fragment == pull.global_step % self.P

    def check_persist(self, summary: ef.RoundSummary) -> None:
        assert self.persisting is None
        assert summary.global_step in self.results, "persisted before merged"
        assert summary.global_step == len(self.records) + 1
        self.persisting = summary.global_step
        accepted = self.sums[summary.global_step]
        assert [c.learner_id for c in summary.contributions] == [
            p.header.key.learner_id for p in accepted
        ], "contributions are recorded in the order of accumulation"
        merged = sum(c.weight for c in summary.contributions)
        assert merged == sum(weight_of(p.header) for p in accepted)
        assert not {d.learner_id for d in summary.dropped} & {
            c.learner_id for c in summary.contributions
        }

    def check(self) -> None:
        state, now = self.core.state, self.now
        fragments = [r.fragment for r in state.rounds]
        assert len(fragments) <= self.settings.overlap
        assert len(set(fragments)) == len(fragments)
        steps = [r.global_step for r in state.rounds]
        assert steps == list(range(state.committed + 1, state.committed + 1 + len(steps)))
        collecting = [
            r for r in state.rounds if r.state in {RoundState.COLLECTING, RoundState.GRACE}
        ]
        assert len(collecting) <= 1, "one round collects at a time"
        live = {x.learner_id for x in state.roster if x.live}
        for round_ in state.rounds:
            assert set(round_.pending) <= live, "somebody who is out is waited for"
            for pending in round_.pending.values():
                assert pending.limit_s <= self.settings.push_timeout_s
                assert now < pending.late_at(), "waits beyond the limit"
            if round_.state is RoundState.GRACE:
                assert now < round_.grace_until, "grace goes on for too long"
                assert round_.grace_s <= self.settings.startup_wait_s
            if round_.state is not RoundState.PULLING:
                assert not round_.pending
            if round_.state in {RoundState.MERGING, RoundState.MERGED, RoundState.PERSISTING}:
                assert len(round_.accepted) >= 1
        wake = self.core.wake_at(now)
        assert wake is None or now < wake < now + 1e6, "a tick at wake_at must get somewhere"
        if self.num_events % 7 == 0:
            self.check_waits(live)

    def check_waits(self, live: set[str]) -> None:
        state = self.core.state
        found = self.core.waits(self.now)
        assert bool(found) != state.complete, "every wait has a reason"
        for wait, since in found:
            assert wait.subject
            assert wait.reason
            assert wait.detail
            assert since >= 0.0
            if wait.reason in {"grace", "startup", "pulling"}:
                named = set(wait.detail.replace(",", " ").split()) & set(self.models)
                assert named <= live, f"names somebody who is out: {wait}"
                assert "for ," not in wait.detail


def small_settings(**changes: object) -> RunSettings:
    """Settings with short times, for worlds of 0.1 s per inner step."""
    values: dict[str, object] = {
        "num_learners": 4,
        "num_fragments": 4,
        "sync_interval": 8,
        "overlap": 2,
        "heartbeat_interval_s": 0.5,
        "heartbeat_timeout_s": 2.0,
        "push_floor_s": 0.5,
        "push_timeout_s": 3.0,
        "startup_wait_s": 5.0,
        **changes,
    }
    return RunSettings(**values)  # type: ignore[arg-type]
