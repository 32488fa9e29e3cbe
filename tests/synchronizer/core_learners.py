"""The learners of the random world: dumb, but they train, copy, push and watch as real ones do."""

from __future__ import annotations

import random
from collections.abc import Callable

from core_models import STEP_TOKENS, Faults, Model, Staged

from decoupled_diloco.errors import Reason
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.synchronizer import SynchronizerCore


class Learners:
    """A mixin of `core_world.World`: everything that learners do, and what they suffer."""

    core: SynchronizerCore
    faults: Faults
    rng: random.Random
    settings: RunSettings
    P: int
    now: float
    term: int
    serial: int
    published: int
    versions: list[Version]
    lives: dict[str, int]
    granted: dict[str, Incarnation]
    shards: dict[str, int]
    staged: dict[ev.PushKey, Staged]
    open_pushes: dict[ev.PushKey, int]
    feed: Callable[[ev.Event], None]
    later: Callable[..., None]
    latency: Callable[[], float]
    chance: Callable[[float], bool]
    send_updates: Callable[..., None]

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
                lambda: self.feed(ev.StreamClosed(learner_id=model.name, incarnation=incarnation)),
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
        self.later(model.step_s * self.rng.uniform(0.95, 1.05), lambda: self.step(model, epoch))
        if self.chance(self.faults.kill):
            self.die(model)
        elif self.chance(self.faults.freeze):
            model.frozen_until = self.now + self.rng.uniform(0.2, 4.0)
        elif self.chance(self.faults.cut) and model.stream is not None:
            self.lost_stream(model, epoch, model.stream, self.rng.random() < 0.3)
        elif self.chance(self.faults.garbage):
            self.feed(self.garbage(model))
        elif self.chance(self.faults.diverge):
            model.diverged_until = self.now + self.rng.uniform(0.5, 4.0)
        elif self.chance(self.faults.roll_back):
            fragment = self.rng.randrange(self.P)
            if self.core.roll_back_refusal(fragment) is None:
                self.feed(ev.RollBack(fragment=fragment, reason="it went bad"))

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
            event = ev.SeedStaged(learner_id=model.name, incarnation=incarnation, fragment=fragment)
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
        if self.now < model.diverged_until:
            event = ev.PushFailed(key=key, reason=Reason.NON_FINITE, message="nan", refused=True)
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
        norm = header.num_steps**0.5 * self.rng.uniform(0.5, 2.0)
        self.feed(ev.PushStaged(key=key, norm=norm))
        if self.chance(self.faults.duplicate):
            self.feed(ev.PushStaged(key=key, norm=norm))
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
