"""What a scenario says: a steady state, faults, bounds, and an end. Pure values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.fault_points import FaultPoint
from diloco_fleet.chaos.targets import DONOR, REDIS, REST, check_target, speaks_of_synchronizers

_LONGEST_S: Final = 7 * 86400.0
_MOST_STRIKES: Final = 10_000


class FaultKind(StrEnum):
    """What can be done to a fleet."""

    KILL = "kill"
    """A process dies at once; whoever looks after it starts it again."""
    RESTART = "restart"
    """A process is told to stop, and is started again."""
    FREEZE = "freeze"
    """A process stands still, for a while."""
    PARTITION = "partition"
    """Two groups hear nothing of each other, for a while."""
    LATENCY = "latency"
    """Everything between a process and all others is late, for a while."""
    BANDWIDTH = "bandwidth"
    """Everything between a process and all others shares a slow link, for a while."""
    LOSS = "loss"
    """Some packets from a process to others are lost, for a while."""
    REDIS_LOSS = "redis-loss"
    """Nobody reaches Redis, for a while."""
    REDIS_EMPTY = "redis-empty"
    """Redis has forgotten everything."""
    DISK_FULL = "disk-full"
    """The disk of a synchronizer's store is full, for a while."""
    CLOCK_SKEW = "clock-skew"
    """The wall clock of a process is wrong, for a while."""


AT_ONCE: Final = frozenset({FaultKind.KILL, FaultKind.RESTART, FaultKind.REDIS_EMPTY})
"""Faults that are over as soon as they have happened; the fleet itself heals them."""

_WITHOUT_TARGET: Final = frozenset(
    {FaultKind.PARTITION, FaultKind.REDIS_LOSS, FaultKind.REDIS_EMPTY}
)
_FIGURES: Final[Mapping[FaultKind, str]] = MappingProxyType(
    {
        FaultKind.LATENCY: "delay_s",
        FaultKind.BANDWIDTH: "mbit_per_s",
        FaultKind.LOSS: "share",
        FaultKind.CLOCK_SKEW: "offset_s",
    }
)


class Event(StrEnum):
    """What can be seen of every fleet and may set off a fault."""

    LEADER_CHANGE = "leader-change"
    """Another term has merged its first round."""
    LEARNER_GONE = "learner-gone"
    """A learner is no longer live."""
    LEARNER_BACK = "learner-back"
    """A learner that was away is live again."""


POINTS: Final = frozenset(str(point) for point in FaultPoint)
"""Named points of the protocol; a process that gets to one strikes itself."""


def _wrong(where: str, message: str) -> UsageError:
    return UsageError(Reason.CONFIG_INVALID, f"{where}: {message}")


def _check_range(where: str, name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _wrong(where, f"{name} is {value:g}; between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of blow, to whom, and when.

    Exactly one of ``at_s``, ``mtbf_s`` and ``on`` says when.

    Attributes:
        fault: what is done.
        who: whom it strikes, see `targets`; empty for faults of Redis and for partitions.
        between: the two groups of a partition, each a list of targets with commas; ``rest`` is
            everybody else.
        at_s: times since the fleet was steady, seconds.
        mtbf_s: mean time between two of them, drawn anew after each (exponential).
        on: an `Event`, or a point of the protocol.
        first_s: with ``mtbf_s`` and ``on``: none earlier than this.
        spare: it waits while fewer learners than that would be left at work.
        duration_s: from striking to healing; for faults that last.
        delay_s: of latency, each way.
        mbit_per_s: of bandwidth, each way, shared by all connections.
        share: of loss, of packets.
        offset_s: of clock skew.
        recovery_s: bound of the time from healing until the fleet is as it was before.
    """

    fault: FaultKind
    who: str = ""
    between: tuple[str, ...] = ()
    at_s: tuple[float, ...] = ()
    mtbf_s: float | None = None
    on: str = ""
    first_s: float = 0.0
    spare: int = 0
    duration_s: float | None = None
    delay_s: float | None = None
    mbit_per_s: float | None = None
    share: float | None = None
    offset_s: float | None = None
    recovery_s: float = 60.0

    def __post_init__(self) -> None:
        where = f"fault {self.fault}"
        self._check_whom(where)
        self._check_when(where)
        self._check_figures(where)

    @property
    def at_once(self) -> bool:
        """Whether it is over as soon as it has happened."""
        return self.fault in AT_ONCE

    @property
    def at_point(self) -> bool:
        """Whether a process strikes itself where the protocol gets to a point."""
        return self.on in POINTS

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of a partition as targets."""
        return tuple(
            tuple(part.strip() for part in group.split(",") if part.strip())
            for group in self.between
        )

    def _check_whom(self, where: str) -> None:
        if self.fault is FaultKind.PARTITION:
            if len(self.between) != 2 or not all(self.groups):
                raise _wrong(where, 'give its two groups, as in between = ["learner-0", "rest"]')
            self._check_groups(where)
        elif self.between:
            raise _wrong(where, "only a partition is between groups; give who")
        if self.fault in _WITHOUT_TARGET:
            if self.who:
                raise _wrong(where, f"who is {self.who!r}, but it strikes nobody by name")
        elif not self.who:
            raise _wrong(where, "who is missing: the leader, random learner, learner-0, ...")
        elif self.fault is FaultKind.DISK_FULL and not speaks_of_synchronizers(self.who):
            raise _wrong(where, f"who is {self.who!r}, but only synchronizers have a store")
        elif self.fault is FaultKind.CLOCK_SKEW and self.who == REDIS:
            raise _wrong(where, "the clock of Redis is its own, and cannot be set wrong here")
        named = [self.who, *(target for group in self.groups for target in group)]
        if DONOR in named and (self.who != DONOR or self.on != str(FaultPoint.MID_RECOVERY)):
            raise _wrong(where, 'there is a donor within a recovery alone: on = "mid_recovery"')
        if self.at_point and self.who.startswith("every "):
            raise _wrong(where, "one process gets to a point first; give one, or a random one")
        for target in named:
            if target and (target != REST or not self.between):
                check_target(target, where)

    def _check_groups(self, where: str) -> None:
        one, other = self.groups
        if one == (REST,) == other:
            raise _wrong(where, "one group at most is the rest")
        for group in self.groups:
            if REST in group and group != (REST,):
                raise _wrong(where, "the rest is everybody else; it stands in its group alone")
        # Two at random are two; everybody else is one, and on one side.
        named = [target for target in (*one, *other) if not target.startswith("random ")]
        twice = [target for target, count in Counter(named).items() if count > 1]
        if twice:
            raise _wrong(where, f"{twice[0]} is named twice; nobody is cut off from itself")

    def _check_when(self, where: str) -> None:
        given = [bool(self.at_s), self.mtbf_s is not None, bool(self.on)]
        if sum(given) != 1:
            raise _wrong(where, "give one of at_s (times), mtbf_s (a mean) and on (an event)")
        if self.at_s and self.first_s:
            raise _wrong(where, "first_s is given, which is of no use to at_s")
        for moment in self.at_s:
            _check_range(where, "at_s", moment, 0.0, _LONGEST_S)
        if self.mtbf_s is not None:
            _check_range(where, "mtbf_s", self.mtbf_s, 0.1, _LONGEST_S)
        if self.on and self.on not in POINTS and self.on not in tuple(Event):
            raise _wrong(where, f"on is {self.on!r}; one of {', '.join([*Event, *sorted(POINTS)])}")
        if self.at_point and self.fault not in {FaultKind.KILL, FaultKind.FREEZE}:
            raise _wrong(where, "at a point of the protocol a process is killed or frozen")
        _check_range(where, "spare", self.spare, 0, 1_000_000)
        _check_range(where, "first_s", self.first_s, 0.0, _LONGEST_S)
        _check_range(where, "recovery_s", self.recovery_s, 0.1, _LONGEST_S)

    def _check_figures(self, where: str) -> None:
        if self.at_once:
            if self.duration_s is not None:
                raise _wrong(where, "duration_s is given, but it is over at once")
        elif self.duration_s is None:
            raise _wrong(where, "duration_s is missing: when is it healed?")
        else:
            _check_range(where, "duration_s", self.duration_s, 0.1, _LONGEST_S)
        needed = _FIGURES.get(self.fault)
        for name in _FIGURES.values():
            if getattr(self, name) is not None and name != needed:
                raise _wrong(where, f"{name} is given, which is of no use to it")
        if needed is not None and getattr(self, needed) is None:
            raise _wrong(where, f"{needed} is missing")
        bounds = {"delay_s": (0.001, 60.0), "mbit_per_s": (0.001, 1e6), "share": (1e-4, 0.9)}
        for name, (low, high) in bounds.items():
            if getattr(self, name) is not None:
                _check_range(where, name, getattr(self, name), low, high)
        if self.offset_s is not None:
            _check_range(where, "offset_s", self.offset_s, -1e9, 1e9)
            if not self.offset_s:
                raise _wrong(where, "offset_s is 0, which is no wrong clock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """The steady state: what must hold over the whole time, faults or not. None: not asked.

    Attributes:
        uptime: at least this share of the time some learner is in an inner step.
        goodput: at least this share of the learners' time is spent in inner steps.
        participation: at least this, contributors over live learners.
        measured_h: the measured H is within this share of its setting.
        rounds_lost: at most so many rounds that a learner applied are not on the final lineage.
        without_merging_s: the global step never stands still for longer.
        leader_changes: at most so many.
        expired: at most so many learners are given up as gone, of those that were neither killed,
            frozen nor cut off.
        silent_s: none of those is silent for longer.
        crashes: at most so many processes end that nobody has struck.
    """

    uptime: float | None = None
    goodput: float | None = None
    participation: float | None = None
    measured_h: float | None = None
    rounds_lost: int | None = None
    without_merging_s: float | None = None
    leader_changes: int | None = None
    expired: int | None = None
    silent_s: float | None = None
    crashes: int | None = None

    def __post_init__(self) -> None:
        for name in ("uptime", "goodput", "participation", "measured_h"):
            if getattr(self, name) is not None:
                _check_range("steady", name, getattr(self, name), 0.0, 1.0)
        for name in (
            "rounds_lost",
            "without_merging_s",
            "leader_changes",
            "expired",
            "silent_s",
            "crashes",
        ):
            if getattr(self, name) is not None:
                _check_range("steady", name, getattr(self, name), 0, _LONGEST_S)
        if not self.asked:
            raise _wrong("steady", "no query is given: what is to hold while faults happen?")

    @property
    def asked(self) -> dict[str, float]:
        """What is asked, by the name of the query."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortWhen:
    """When a scenario is given up before its end: then everything is healed at once.

    Attributes:
        without_merging_s: the global step has stood still for longer.
        learners_below: fewer learners than that are running.
    """

    without_merging_s: float = 300.0
    learners_below: int = 0

    def __post_init__(self) -> None:
        _check_range("abort", "without_merging_s", self.without_merging_s, 1.0, _LONGEST_S)
        _check_range("abort", "learners_below", self.learners_below, 0, 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """The fleet that is started where the scenario does not get one.

    Attributes:
        learners: how many.
        standby: whether there is a second synchronizer, and Redis.
        settings: of ``[run]``, ``[trainer]`` and ``[fleet]``, as in the file of ``diloco run``.
    """

    learners: int = 3
    standby: bool = True
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_range("fleet", "learners", self.learners, 1, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """An experiment on a fleet.

    Attributes:
        name: its name.
        about: what it shows, in a sentence.
        duration_s: faults begin within this time, and whatever lasts is healed at its end.
        faults: what is done.
        steady: what must hold.
        abort: when it is given up.
        fleet: what is started for it.
        ready_s: longest wait for a steady fleet, at the beginning.
        settle_s: longest wait for the last recoveries, at the end.
    """

    name: str
    about: str
    duration_s: float
    faults: tuple[Fault, ...]
    steady: Hypothesis
    abort: AbortWhen = field(default_factory=AbortWhen)
    fleet: FleetShape = field(default_factory=FleetShape)
    ready_s: float = 180.0
    settle_s: float = 60.0

    def __post_init__(self) -> None:
        where = f"scenario {self.name}"
        if not math.isfinite(self.duration_s):
            raise _wrong(where, "it has no end: duration_s must be a number of seconds")
        _check_range(where, "duration_s", self.duration_s, 1.0, _LONGEST_S)
        _check_range(where, "ready_s", self.ready_s, 1.0, _LONGEST_S)
        _check_range(where, "settle_s", self.settle_s, 1.0, _LONGEST_S)
        for fault in self.faults:
            late = [moment for moment in (*fault.at_s, fault.first_s) if moment >= self.duration_s]
            if late:
                raise _wrong(
                    where, f"{fault.fault} at {late[0]:g} s is after its end, {self.duration_s:g} s"
                )
        by_chance = sum(self.duration_s / x.mtbf_s for x in self.faults if x.mtbf_s is not None)
        num_strikes = by_chance + sum(len(x.at_s) for x in self.faults)
        if num_strikes > _MOST_STRIKES:
            raise _wrong(
                where,
                f"about {num_strikes:.0f} strikes; at most {_MOST_STRIKES}: give longer mtbf_s, or "
                "a shorter duration_s",
            )
