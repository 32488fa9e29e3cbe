"""A small random world round `SynchronizerCore`: dumb learners, a dumb store, a network that fails.

Everything that a learner trains is a set of numbered inner steps per fragment, so that "merged
twice" is an intersection of sets. After every event the world checks what must never happen.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from core_checks import Checks
from core_learners import Learners
from core_models import Faults, Model, Staged, weight_of

from decoupled_diloco.errors import Reason
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.state import Restored
from synchronizer_server.core.synchronizer import SynchronizerCore


class World(Learners, Checks):
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
        self.rolled_back: dict[int, int] = {}  # newest round that put a fragment back
        self.quarantined: list[str] = []
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
            case ef.QuarantineChanged():
                self.quarantined += [effect.learner_id] if effect.reason else []
            case ef.StagePush() | ef.LearnerChanged() | ef.RollBackFailed():
                pass
            case ef.CountersCut():
                raise AssertionError(f"an honest learner's counters are cut: {effect}")
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
        if effect.roll_back_to is not None:
            assert not self.sums.get(effect.global_step), "an accepted contribution is undone"
            assert self.core.state.lineage.retains(effect.fragment, effect.roll_back_to)
            digest = effect.roll_back_to.digest
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
        if summary.rolled_back:
            self.rolled_back[summary.fragment] = summary.global_step
        for push in self.sums.pop(summary.global_step, []):
            older = push.header.base.global_step < self.rolled_back.get(summary.fragment, 0)
            assert not older, "merged against what was put back"
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
        watch, epoch = model.watch, model.epoch
        for fragment in fragments:
            version = self.versions[fragment]
            model.watched_at = max(model.watched_at, self.now + self.latency() + slow)
            self.later(
                model.watched_at - self.now,
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
        if restored is None:
            self.shards.clear()  # no record yet, and nobody has trained
        for model in self.models.values():
            if model.alive:
                model.stream = None
                model.watch += 1
                epoch = model.epoch
                self.later(self.rng.uniform(0.01, 0.5), lambda m=model, e=epoch: self.join(m, e))
