"""What goes wrong: one fault after another, chosen by the seed, until they stop.

Processes die and freeze at a named effect, just before or after it is carried out; the rest
strikes at a time. Where a world is to have a single fault at a time, the next one waits until the
fleet has recovered from the one before.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from diloco_fleet.simulation.kernel import CrashedError, Process, Work
from diloco_fleet.simulation.messages import Push
from synchronizer_server.core.lease import Role

if TYPE_CHECKING:
    from diloco_fleet.simulation.learner import LearnerProcess
    from diloco_fleet.simulation.node import Node
    from diloco_fleet.simulation.world import World

POINTS: Final = (
    *("renew", "bid", "lead", "keeper_answer", "step_down", "write_in_sync", "release"),
    *("load:before", "load:after", "begin_term:before", "begin_term:after", "identity:before"),
    *("identity:after", "open_run:before", "open_run:after", "install:before", "install:after"),
    *("ack", "ack_heard", "sent", "record_sent", "pull", "granted", "update_sent"),
    *("accumulate:before", "accumulate:after", "merge:before", "merge:after"),
    *("persist:before", "persist:after", "publish", "published"),
    *("persist_seed:before", "persist_seed:after", "publish_seed", "decode:after"),
)
"""Effects at which a synchronizer may die or freeze."""

_PATIENCE_S = 3.0
_EARLY = frozenset({"persist_seed:before", "persist_seed:after", "publish_seed", "open_run:before"})


def _start_learner(learner: LearnerProcess) -> None:
    if not learner.alive:
        learner.start()


def _start(node: Node) -> None:
    if not node.alive:
        node.start()


class Profile(StrEnum):
    """What kind of world it is."""

    CALM = "calm"
    LEARNERS = "learners"
    SINGLE = "single"
    MULTI = "multi"
    RESTORED_KEEPER = "restored_keeper"


class Faults:
    """Injects them.

    Args:
        world: the world.
        rng: chance.
        profile: what may happen.
    """

    def __init__(self, world: World, rng: random.Random, profile: Profile) -> None:
        self.profile = profile
        self.is_over = profile is Profile.CALM
        self._world = world
        self._rng = rng
        self._armed: tuple[str, int, str] | None = None
        self._full_until = 0.0
        self._slow: dict[str, tuple[float, float]] = {}
        self._backup: dict[str, Any] | None = None
        self._held_rng = random.Random(world.seed + 3)
        self._grant_rng = random.Random(world.seed + 4)
        self._disk_rng = random.Random(world.seed + 5)
        self._push_loss = 0.0 if self.is_over else rng.choice((0.0, 0.02, 0.1))

    def run(self) -> Work:
        """Strikes again and again."""
        rng, world = self._rng, self._world
        is_early = rng.random() < 0.15
        if not is_early:
            yield rng.uniform(0.5, 4.0)
        while not self.is_over:
            if self.profile is Profile.LEARNERS:
                yield from self._strike_learner()
            else:
                yield from self._strike(is_early=is_early)
                if self._disk_rng.random() < 0.04:
                    self._lose_disk()
            is_early = False
            yield rng.uniform(0.05, 2.5)
            while self.profile is Profile.SINGLE and not world.is_healthy() and not self.is_over:
                yield 0.25

    def stop(self) -> None:
        """No fault happens any more; who is dead is started."""
        self.is_over, self._armed = True, None
        self._slow.clear()
        self._full_until = self._push_loss = 0.0

    # -- at an effect ----------------------------------------------------------------------------

    def point(self, node: Node, name: str) -> None:
        """An effect of a synchronizer: it may die, or freeze, here."""
        armed = self._armed
        if armed is None or armed[0] != name:
            return
        if armed[1] > 1:
            self._armed = (name, armed[1] - 1, armed[2])
            return
        self._armed = None
        self._world.tally[f"{armed[2]}_at_{name}"] += 1
        self._hit(node, armed[2])

    def _hit(self, node: Node, action: str) -> None:
        if action == "freeze":
            node.freeze(self._length())
        else:
            self._later(self._length(), functools.partial(_start, node))
            raise CrashedError

    def _length(self) -> float:
        return self._rng.choice((self._rng.uniform(0.1, 1.0), self._rng.uniform(1.0, 6.0)))

    def _strike(self, *, is_early: bool) -> Work:
        rng = self._rng
        if is_early or rng.random() < 0.6:
            name = rng.choice(tuple(sorted(_EARLY)) if is_early else POINTS)
            self._armed = (name, 1 if is_early else rng.choice((1, 1, 2, 3, 5)), rng.choice(
                ("crash", "crash", "freeze")
            ))  # fmt: skip
            waited = 0.0
            while self._armed is not None and waited < _PATIENCE_S:
                yield 0.1
                waited += 0.1
            self._armed = None
        else:
            strikes: tuple[Callable[[], None], ...] = (
                *(self._cut_leader,) * 4, self._kill_keeper, self._freeze_keeper,
                self._empty_keeper, self._break_stream, self._break_stream, self._fill_disk,
                self._hold_up, self._strike_random, self._kill_both,
            )  # fmt: skip
            if self.profile is Profile.RESTORED_KEEPER:
                strikes = (*strikes, self._restore_keeper, self._restore_keeper)
            strike = rng.choice(strikes)
            if self.profile is Profile.SINGLE and strike in {self._kill_both, self._hold_up}:
                return
            self._world.tally[f"fault{strike.__name__}"] += 1
            strike()
            if rng.random() < 0.3:
                yield from self._strike_learner()
        yield 0.0

    # -- at a time -------------------------------------------------------------------------------

    def _later(self, delay: float, what: Callable[[], None]) -> None:
        self._world.kernel.at(delay, what)

    def _leader(self) -> Node:
        leaders = [node for node in self._world.nodes if node.engine is not None]
        return self._rng.choice(leaders or self._world.nodes)

    def _cut_leader(self) -> None:
        """From the keeper, from the standbys, from both, from half of the learners."""
        world, rng, leader = self._world, self._rng, self._leader()
        others = [node.name for node in world.nodes if node is not leader]
        half = [learner.name for learner in world.learners[::2]]
        far = rng.choice((["keeper"], others, ["keeper", *others], half, [*others, *half]))
        seconds = rng.choice((rng.uniform(0.2, 2.0), rng.uniform(2.0, 7.0)))
        for name in far:
            world.network.cut(leader.name, name, seconds)

    def _kill_keeper(self) -> None:
        keeper = self._world.keeper
        if keeper.alive:
            keeper.die()
            self._later(self._length(), lambda: None if keeper.alive else keeper.begin())

    def _freeze_keeper(self) -> None:
        self._world.keeper.freeze(self._length())

    def _empty_keeper(self) -> None:
        self._kill_keeper()
        self._world.keeper.empty()

    def _restore_keeper(self) -> None:
        if self._backup is None:
            self._backup = self._world.keeper.backup()
        else:
            self._world.keeper.restore(self._backup)
            self._backup = None

    def _break_stream(self) -> None:
        streams = [stream for stream in self._world.network.streams if not stream.broken]
        if streams:
            self._rng.choice(streams).break_off()

    def _fill_disk(self) -> None:
        self._full_until = self._world.kernel.now + self._rng.uniform(0.5, 3.0)

    def _lose_disk(self) -> None:
        """A standby comes back on an empty disk; who leads keeps its own, though it may die."""
        leader = self._leader()
        others = [node for node in self._world.nodes if node is not leader]
        if leader.engine is None or any(n.leadership.core.role is Role.LEADING for n in others):
            return
        node = self._disk_rng.choice(others)
        self._world.tally["fault_lose_disk"] += 1
        if node.alive:
            node.die()
            self._later(self._length(), functools.partial(_start, node))
        node.lose_store()
        if self.profile is Profile.MULTI and self._disk_rng.random() < 0.5:
            self._empty_keeper()
            leader.die()
            self._later(self._disk_rng.uniform(2.0, 9.0), functools.partial(_start, leader))

    def _hold_up(self) -> None:
        """Messages are held up for seconds, each by itself."""
        network = self._world.network
        network.held_up, network.loss = self._rng.choice(((0.05, 0.0), (0.15, 0.1), (0.02, 0.2)))

        def over() -> None:
            network.held_up = network.loss = 0.0

        self._later(self._rng.uniform(1.0, 5.0), over)

    def _strike_random(self) -> None:
        """Somebody dies or freezes, wherever it stands."""
        node = self._rng.choice(self._world.nodes)
        if not node.alive:
            return
        if self._rng.random() < 0.5:
            node.freeze(self._length())
        else:
            node.die()
            self._later(self._length(), functools.partial(_start, node))

    def _kill_both(self) -> None:
        for node in self._world.nodes:
            if node.alive:
                node.die()
                self._later(self._length(), functools.partial(_start, node))

    # -- learners --------------------------------------------------------------------------------

    def _strike_learner(self) -> Work:
        rng, world = self._rng, self._world
        victims = world.learners[1:] or world.learners
        learner = rng.choice(victims)
        kind = rng.choice(("kill", "freeze", "slow", "replace", "replay", "stream"))
        world.tally[f"fault_learner_{kind}"] += 1
        if kind == "kill" and learner.alive:
            learner.die()
            self._later(self._length(), functools.partial(_start_learner, learner))
        elif kind == "freeze":
            learner.freeze(self._length())
        elif kind == "slow":
            self._slow[learner.name] = (world.kernel.now + rng.uniform(1, 5), rng.uniform(2, 8))
        elif kind == "replace" and learner.alive:
            world.replace(learner)
        elif kind == "replay":
            world.replay(learner, rng)
        elif kind == "stream":
            self._break_stream()
        yield 0.0

    # -- how long things take --------------------------------------------------------------------

    def job_s(self, name: str) -> float:
        """Duration of a job of a runner, seconds."""
        if name in {"accumulate", "decode", "wait"}:
            return 0.0005
        slow = not self.is_over and self._rng.random() < 0.03
        return self._rng.uniform(0.05, 0.6) if slow else 0.001 + 0.01 * self._rng.random()

    def step_s(self, learner: LearnerProcess) -> float:
        """Duration of an inner step, seconds."""
        until, factor = self._slow.get(learner.name, (0.0, 1.0))
        step_s = learner.step_s * self._rng.uniform(0.9, 1.1)
        return step_s * factor if self._world.kernel.now < until else step_s

    def transfer_s(self) -> float:
        """Duration of half a push, seconds."""
        if not self.is_over and self._rng.random() < 0.03:
            return self._rng.uniform(0.3, 3.0)
        return 0.002 + 0.02 * self._rng.random()

    def write_held_s(self, leader: Node) -> float:
        """How long a word about who is in sync is held up, seconds; its standby goes meanwhile."""
        rng = self._held_rng
        if self.is_over or self.profile is not Profile.MULTI or rng.random() > 0.1:
            return 0.0
        self._world.tally["write_held_up"] += 1
        others = [node.name for node in self._world.nodes if node is not leader]
        if rng.random() < 0.7:
            self._world.network.cut(leader.name, rng.choice(others), rng.uniform(2.0, 5.0))
        return rng.uniform(0.4, 3.0)

    def grant_held_s(self, leader: Node) -> float:
        """How long the entry of a new life is held up, seconds; its leader may be gone soon."""
        rng = self._grant_rng
        if self.is_over or self.profile is not Profile.MULTI or rng.random() > 0.15:
            return 0.0
        self._world.tally["grant_held_up"] += 1
        held_s = rng.uniform(0.4, 4.0)
        if rng.random() < 0.7:
            self._later(held_s + rng.uniform(0.1, 1.5), functools.partial(self._kill, leader))
        return held_s

    def _kill(self, node: Node) -> None:
        if node.alive and not self.is_over:
            node.die()
            self._later(self._grant_rng.uniform(2.0, 6.0), functools.partial(_start, node))

    def breaks_push(self) -> bool:
        """Whether the stream of a push breaks now."""
        return self._rng.random() < self._push_loss

    def disk_is_full(self, process: Process) -> bool:
        """Whether a commit fails now."""
        del process
        return self._world.kernel.now < self._full_until

    def hostile(self, learner: LearnerProcess, push: Push) -> Push:
        """What a learner that lies sends in place of a push."""
        if learner.name != "hostile" or self.is_over:
            return push
        rng, lies = self._rng, replace(push, work=None)
        return rng.choice((
            push,
            replace(lies, num_tokens=rng.choice((0, 2**63 - 1, 10**9)), num_steps=1),
            replace(lies, num_steps=rng.choice((0, 10**6))),
            replace(lies, fragment=rng.choice((0, 99))),
            replace(lies, global_step=push.global_step + rng.choice((-1, 1, 7))),
            replace(lies, payload=lies.payload[:-1]),
            replace(lies, payload=b"\xff" * len(lies.payload)),
            replace(lies, term=push.term + rng.choice((-1, 1))),
        ))  # fmt: skip
