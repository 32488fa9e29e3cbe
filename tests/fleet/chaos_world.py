"""A fleet of a few numbers, for what conducts scenarios: it heals by itself after some seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.chaos.conductor import Arm, Begin
from diloco_fleet.chaos.injector import Injector
from diloco_fleet.chaos.sample import LearnerSeen, Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.metrics import Round, RunMetrics, Step

UNKNOWN = "unknown"
"""State of a learner of which who leads has never heard."""
LEARNERS = ("learner-0", "learner-1", "learner-2")
NAMES = frozenset([*LEARNERS, "synchronizer-0", "synchronizer-1", "redis", "evaluator"])


@dataclass
class World:
    """A clock, and a fleet at it; a test changes what it is to see.

    Attributes:
        now_s: the clock.
        away: who does not contribute, until when.
        dead: who does not run, until when.
    """

    now_s: float = 1000.0
    term: int = 1
    leader: str | None = "synchronizer-0"
    global_step: int = 0
    in_sync: bool = True
    merging: bool = True
    away: dict[str, float] = field(default_factory=dict)
    dead: dict[str, float] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEARNERS, 1))
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEARNERS, 0))
    states: dict[str, str] = field(default_factory=dict)
    silent_s: dict[str, float] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    struck: dict[int, str] = field(default_factory=dict)
    ended: str = ""
    steps: dict[str, list[Step]] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)

    def now(self) -> float:
        """The time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """A second passes, whatever is asked: rounds are merged, who was away comes back."""
        self.now_s += max(seconds, 0.5)
        for name in [name for name, until in self.dead.items() if until <= self.now_s]:
            del self.dead[name]
            if name in self.lives:
                self.lives[name] += 1
            self.restarts[name] = self.restarts.get(name, 0) + 1
        self.away = {name: until for name, until in self.away.items() if until > self.now_s}
        if self.merging and self.leader is not None and self.leader not in self.dead:
            self.global_step += 1
            there = [name for name in LEARNERS if name not in {*self.dead, *self.away}]
            for name in there:
                self.accepted[name] += 1
                self.steps.setdefault(name, []).append(self._step())
            self.rounds.append(self._round(tuple(there)))

    def _step(self) -> Step:
        return Step(
            time=self.now_s, global_step=self.global_step, loss=1.0, num_tokens=10,
            step_s=0.5, overhead_s=0.0, life=0,
        )  # fmt: skip

    def _round(self, contributors: tuple[str, ...]) -> Round:
        return Round(
            time=self.now_s, global_step=self.global_step, fragment=0, contributors=contributors,
            live=LEARNERS, tokens=10, measured_h=1.0, bytes_up=0, bytes_down=0, term=self.term,
        )  # fmt: skip

    def sample(self) -> Sample:
        """What is seen now."""
        learners = {
            name: LearnerSeen(
                state=self.states.get(name, "live"),
                incarnation=(1, self.lives[name]),
                local_step=self.accepted[name],
                accepted=self.accepted[name],
                silent_s=self.silent_s.get(name, 0.1),
            )
            for name in LEARNERS
            if self.states.get(name) != UNKNOWN
        }
        leader = None if self.leader in self.dead else self.leader
        sample = Sample(
            at_s=self.now_s,
            running=NAMES - set(self.dead),
            restarts=dict(self.restarts),
            struck=dict(self.struck),
            ended=self.ended,
        )
        if leader is None:
            return sample
        return replace(
            sample,
            leader=leader,
            term=self.term,
            global_step=self.global_step,
            in_sync=self.in_sync,
            lease_held=True,
            learners=learners,
        )


class WorldInjector(Injector):
    """Does faults to a world, and remembers what was done.

    Attributes:
        done: everything that was asked, in order.
        open: strikes that are not healed.
        stubborn: strikes that cannot be healed.
        broken: whether looking fails.
        written: what is read of the fleet's metrics, look by look; then what it has written.
    """

    name = "world"

    def __init__(self, world: World) -> None:
        self.world = world
        self.done: list[str] = []
        self.open: set[int] = set()
        self.stubborn: set[int] = set()
        self.broken = False
        self.written: list[RunMetrics] = []

    def refusal(self, fault: Fault) -> str:
        return "a world loses no packets" if fault.fault is FaultKind.LOSS else ""

    def names(self) -> frozenset[str]:
        return NAMES

    def __enter__(self) -> WorldInjector:
        return self

    def __exit__(self, *_: object) -> None:
        self.heal_all()

    def look(self) -> Sample:
        if self.broken:
            raise OSError("the eye is broken")
        return self.world.sample()

    def begin(self, action: Begin) -> None:
        names = [name for group in action.groups for name in group]
        self.done.append(f"{action.fault.fault} {' '.join(names)}")
        if action.fault.fault is FaultKind.KILL:
            self.world.dead |= dict.fromkeys(names, self.world.now_s + 3.0)
        elif action.fault.fault is FaultKind.REDIS_EMPTY:
            raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "Redis is not there")
        else:
            self.open.add(action.number)
            self.world.away |= dict.fromkeys(action.groups[0], 1e9)

    def arm(self, action: Arm) -> None:
        self.done.append(f"arm {action.process}")

    def heal(self, number: int) -> None:
        self.done.append("heal")
        if number in self.stubborn:
            raise DilocoError(Reason.INTERNAL, "it will not")
        self.open.discard(number)
        self.world.away.clear()

    def heal_all(self) -> list[str]:
        self.done.append("heal all")
        self.open &= self.stubborn
        self.world.away.clear()
        return [f"strike {number}" for number in sorted(self.open)]

    def settle(self) -> None:
        self.done.append("settle")

    def metrics(self) -> RunMetrics:
        self.done.append("metrics")
        if self.written:
            return self.written.pop(0)
        steps = {name: tuple(steps) for name, steps in self.world.steps.items()}
        return RunMetrics(steps=steps, rounds=tuple(self.world.rounds))

    def sync_interval(self) -> int:
        return 8
