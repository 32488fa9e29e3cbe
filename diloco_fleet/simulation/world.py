"""One simulated fleet, from its seed: two or three synchronizers, a keeper, learners, faults."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from decoupled_diloco.layout import Layout, Role, TensorSpec, build_layout
from decoupled_diloco.parts import Strategy
from decoupled_diloco.settings import RunSettings
from diloco_fleet.simulation import services
from diloco_fleet.simulation.faults import Faults, Profile
from diloco_fleet.simulation.final import check_end, is_healthy, is_quiet, outcome_of
from diloco_fleet.simulation.keeper import Keeper
from diloco_fleet.simulation.kernel import Kernel, Process, Work
from diloco_fleet.simulation.learner import LearnerProcess
from diloco_fleet.simulation.network import Network
from diloco_fleet.simulation.node import Node
from diloco_fleet.simulation.oracle import BeyondError, Oracle

RECOVERY_S: Final = 60.0
_QUIET_S: Final = 20.0
_STAYS_S: Final = 2.0
_SETTLINGS: Final = 4
_ROUNDS_AFTER: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a world.

    Attributes:
        seed: its seed.
        profile: what kind of faults it had.
        replication: mode of replication.
        num_rounds: rounds published.
        rounds_lost: versions that a learner held and that are not on the final lineage.
        num_terms: terms that were led.
        participation: contributors over live learners.
        measured_h: inner steps between two merges of one fragment, over its setting.
        longest_gap_s: longest time without a merge, seconds of virtual time.
        tally: faults and outcomes, by kind.
    """

    seed: int
    profile: Profile
    replication: str
    num_rounds: int
    rounds_lost: int
    num_terms: int
    participation: float
    measured_h: float
    longest_gap_s: float
    tally: Counter[str]


class World:
    """Everything of one seed.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.kernel = Kernel()
        self.network = Network(self.kernel, random.Random(seed + 1))
        self.tally: Counter[str] = Counter()
        self.settings, self.profile = _settings(self.rng)
        self.layout = _layout(self.settings)
        sizes = [f.num_elements for f in self.layout.fragments]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.slices = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.num_parameters = ends[-1]
        self.trains = True
        self.oracle = Oracle(self)
        self.faults = Faults(self, random.Random(seed + 2), self.profile)
        self.keeper = Keeper(self.kernel, self.network, self.settings.lease_timeout_s / 2)
        self.nodes: list[Node] = []
        self.nodes += [Node(self, f"s{i}") for i in range(3 if self.rng.random() < 0.2 else 2)]
        self.learners = self._learners()
        self._uid = 0
        self._replaced: list[LearnerProcess] = []
        self._deltas = torch.Generator().manual_seed(seed)
        self._table = torch.randint(-8, 9, (64, self.num_parameters), generator=self._deltas) / 8

    def _learners(self) -> list[LearnerProcess]:
        rng, number = self.rng, self.settings.num_learners
        step_s = rng.uniform(0.15, 0.4)
        learners = [
            LearnerProcess(self, f"l{i}", step_s * rng.choice((1.0, 1.0, 1.3, 2.0)))
            for i in range(number)
        ]
        if number > 2 and rng.random() < 0.2:
            learners[-1] = LearnerProcess(self, f"l{number - 1}", step_s, name="hostile")
        return learners

    @property
    def is_strict(self) -> bool:
        """Whether no published round may be lost: the guarantee of design section 6."""
        if self.settings.replication != "one" or self.keeper.num_restored:
            return False
        several = self.profile in {Profile.MULTI, Profile.RESTORED_KEEPER}  # faults at once
        return not several or not self.keeper.num_emptied

    def node_at(self, address: str) -> Node:
        """The synchronizer at an address."""
        return next(node for node in self.nodes if node.name == address)

    def new_uid(self) -> int:
        """Names one process of a learner."""
        self._uid += 1
        return self._uid

    def delta(self, uid: int, step: int) -> torch.Tensor:
        """What one inner step of one process changes."""
        return self._table[(uid * 17 + step * 5) % 64]

    def num_tokens(self, learner: LearnerProcess) -> int:
        """Tokens of one inner step."""
        return 16 + 8 * (learner.uid % 3)

    # -- what happens to learners ----------------------------------------------------------------

    def replace(self, learner: LearnerProcess) -> None:
        """Another process takes the id over while the first one lives, or is frozen."""
        number = self.learners.index(learner)
        successor = LearnerProcess(
            self, learner.learner_id, learner.step_s, name=f"{learner.learner_id}-{self._uid + 1}"
        )
        if self.rng.random() < 0.5:
            learner.freeze(self.rng.uniform(0.5, 4.0))
        self.learners[number] = successor
        self._replaced.append(learner)
        successor.start()

    def replay(self, learner: LearnerProcess, rng: random.Random) -> None:
        """Pushes that were sent before arrive again."""
        for push in rng.sample(learner.sent, min(3, len(learner.sent))):
            node = rng.choice(self.nodes)
            self.network.call(self.keeper, node, functools.partial(services.push, node, push), 5.0)

    def is_healthy(self) -> bool:
        """Whether the fleet has recovered from everything."""
        return is_healthy(self)

    # -- the whole -------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Runs it to its end.

        Raises:
            AssertionError: what must never happen, happened.
        """
        for node in self.nodes:
            self.kernel.at(self.rng.uniform(0.0, 0.3), node.start)
        for learner in self.learners:
            self.kernel.at(self.rng.uniform(0.0, 0.6), learner.start)
        striker = Process(self.kernel, "faults")
        striker.begin()
        striker.spawn(self.faults.run())
        wanted = self.rng.randint(4, 10)
        self.kernel.run(
            self.rng.uniform(8.0, 16.0), lambda: self.oracle.num_rounds_published >= 2 * wanted
        )
        striker.die()
        self._heal()
        rounds = self.oracle.num_rounds_published + _ROUNDS_AFTER
        recovered = self.kernel.run(
            self.kernel.now + RECOVERY_S,
            lambda: (
                self.oracle.num_rounds_published >= rounds
                and self.kernel.num_events % 16 == 0
                and is_healthy(self)
            ),
        )
        assert recovered, f"no progress after the faults: {self.describe()}"
        self.trains = False
        for _ in range(_SETTLINGS):  # a grace window may still be open
            self.kernel.run(
                self.kernel.now + _QUIET_S,
                lambda: self.kernel.num_events % 16 == 0 and is_quiet(self),
            )
            self.kernel.run(self.kernel.now + _STAYS_S)
            if is_quiet(self):
                break
        assert is_quiet(self), f"published copies do not become equal: {self.describe()}"
        return check_end(self)

    def _heal(self) -> None:
        self.faults.stop()
        self.network.heal()
        for before in self._replaced:
            if before.alive:
                before.die()
        supervisor = Process(self.kernel, "supervisor")
        supervisor.begin()
        supervisor.spawn(self._supervise())
        for node in self.nodes:
            if not node.alive:
                node.start()
        if not self.keeper.alive:
            self.keeper.begin()

    def _supervise(self) -> Work:
        """Starts learners that are dead; also who is fenced by a call of before that came late."""
        while True:
            for learner in self.learners:
                if learner.alive and learner.is_over:
                    learner.die()
                if not learner.alive:
                    learner.start()
            yield 0.5

    def describe(self) -> str:
        """Where everybody stands."""
        lines = [f"t={self.kernel.now:.2f} {self.settings.replication} {self.profile}"]
        for node in self.nodes:
            role = node.leadership.core
            lines.append(
                f"{node.name}: {role.role} term {role.term}, {role.why_waiting}; tip "
                f"{self.oracle.tip_of(node)}; in sync {node.in_sync}"
            )
            if node.engine is not None:
                core = node.engine.core
                lines += [f"  waits: {w}" for w, _ in core.waits(self.kernel.now)]
                lines += [f"  {x.learner_id} {x.state} {x.incarnation}" for x in core.state.roster]
        server = self.keeper.server
        lines.append(f"keeper: term {server.term}, in sync {server.in_sync}, {server.lease}")
        for learner in self.learners:
            c = learner.exchange.connection
            lines.append(f"{learner.name}: {c.state} online {c.online} {c.reason} {c.detail}")
        return "\n".join(lines)


def run_world(seed: int) -> Outcome:
    """Runs the world of a seed.

    Raises:
        AssertionError: with the seed, and how to see it again.
    """
    with _quiet():
        return _run(World(seed))


def _run(world: World) -> Outcome:
    try:
        return world.run()
    except BeyondError:
        world.tally["beyond"] += 1
        return outcome_of(world, rounds_lost=0)
    except Exception as error:
        error.add_note(
            f"seed {world.seed}: see it again with "
            f"`python -m diloco_fleet.simulation {world.seed}`\n"
            f"{world.describe()}"
        )
        raise
    finally:
        world.faults.stop()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No logs, and no search for garbage: a world is one heap of live objects until it ends."""
    level, collected = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(level)
        if collected:
            gc.enable()


def _settings(rng: random.Random) -> tuple[RunSettings, Profile]:
    profile = rng.choices(
        (Profile.CALM, Profile.LEARNERS, Profile.SINGLE, Profile.MULTI, Profile.RESTORED_KEEPER),
        (3, 12, 40, 42, 3),
    )[0]
    num_learners = rng.randint(2, 4)
    num_fragments = rng.randint(3, 5)
    is_calm = profile in {Profile.CALM, Profile.LEARNERS}
    settings = RunSettings(
        run_id="simulated",
        num_learners=num_learners,
        quorum=1 if is_calm else rng.choice((1, 1, 2)),
        num_fragments=num_fragments,
        sync_interval=num_fragments * rng.choice((1, 1, 2)),
        overlap=rng.choice((1, 2)),
        startup_wait_s=2.0,
        granularity=rng.choice(("tensor", "fragment")),
        merge=rng.choice(("rda", "rda", "average")),
        codec_up="fp32",
        codec_down=rng.choice(("bf16", "bf16", "fp32")),
        retained_updates=rng.choice((1, 4)),
        heartbeat_interval_s=0.5,
        heartbeat_timeout_s=2.0,
        lease_timeout_s=rng.choice((0.8, 1.5)),
        replication=rng.choices(("one", "off", "one-or-degrade"), (15, 3, 2))[0],
        push_floor_s=0.4,
        push_timeout_s=2.5,
    )
    return settings, profile


def _layout(settings: RunSettings) -> Layout:
    embedding = TensorSpec(name="embedding", shape=(2, 2), dtype="float32", role=Role.EMBEDDING)
    tensors = [embedding] + [
        TensorSpec(name=f"layer{i}", shape=(3,), dtype="float32", role=Role.BODY)
        for i in range(settings.num_fragments)
    ]
    return build_layout(
        tensors,
        strategy=Strategy(settings.strategy),
        num_fragments=settings.num_fragments,
        overlap=settings.overlap,
    )
