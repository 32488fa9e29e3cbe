"""Conducts a scenario: samples in, actions out. Pure: no clock, no chance, no process.

Phases: ``steadying`` until every planned learner contributes (and a standby is in sync),
``striking`` for the duration of the scenario, ``settling`` until everything has recovered, and
``over``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from diloco_fleet.chaos.record import Record
from diloco_fleet.chaos.sample import Progress, Sample, advance, begin
from diloco_fleet.chaos.scenario import Fault, FaultKind, Scenario
from diloco_fleet.chaos.schedule import Strike
from diloco_fleet.chaos.targets import DONOR, REST, is_learner, resolve_groups, resolve_target
from diloco_fleet.metrics import is_synchronizer

_REDIS_FAULTS = frozenset({FaultKind.REDIS_LOSS, FaultKind.REDIS_EMPTY})


class Phase(StrEnum):
    """Where a scenario is."""

    STEADYING = "steadying"
    STRIKING = "striking"
    SETTLING = "settling"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Do it.

    Attributes:
        number: of the strike.
        fault: what.
        groups: who: one group; of a partition two.
    """

    number: int
    fault: Fault
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Let whoever gets to the point of the fault strike itself.

    Attributes:
        number: of the strike.
        fault: what.
        process: pattern of the name of the process.
    """

    number: int
    fault: Fault
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heal:
    """End it; one that was armed and did not happen is not to happen any more.

    Attributes:
        number: of the strike.
    """

    number: int


Action = Begin | Arm | Heal


@dataclass(slots=True, kw_only=True)
class Conductor:
    """One scenario on one fleet.

    Attributes:
        scenario: the scenario.
        schedule: its strikes.
        names: every process of the fleet.
        phase: where it is.
        records: what became of each strike.
        stopped: why it ended early, in words; empty where it did not.
        expired: learners that were given up as gone while nothing had struck them like that.
        longest_silence_s: longest silence of a learner that nothing had struck like that.
        longest_without_merging_s: longest time in which the global step stood still.
    """

    scenario: Scenario
    schedule: Sequence[Strike]
    names: frozenset[str]
    phase: Phase = Phase.STEADYING
    records: list[Record] = field(default_factory=list)
    stopped: str = ""
    expired: set[str] = field(default_factory=set)
    longest_silence_s: float = 0.0
    longest_without_merging_s: float = 0.0
    progress: Progress | None = None
    _zero_s: float = 0.0
    _restarts: Mapping[str, int] | None = None
    _started_s: float | None = None
    _settling_s: float = 0.0
    _armed: set[int] = field(default_factory=set)
    _due: set[int] = field(default_factory=set)
    _merges_before: int = 0
    _running_before: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        faults = self.scenario.faults
        self.records = [Record(strike=x, fault=faults[x.fault_index]) for x in self.schedule]

    @property
    def zero_s(self) -> float:
        """When the fleet was steady, by the clock of the samples."""
        return self._zero_s

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be done."""
        return self.phase is Phase.OVER

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process was started again since the fleet was steady."""
        before = self._restarts
        if before is None:
            return {}
        now = self._seen.sample.restarts
        return {name: count - before.get(name, 0) for name, count in now.items()}

    @property
    def merges(self) -> int:
        """How often the global step was seen to rise since the fleet was steady."""
        return self._seen.merges - self._merges_before if self.progress is not None else 0

    @property
    def crashes(self) -> dict[str, int]:
        """How often each process ended though nothing had ended it."""
        planned = Counter(name for x in self.records if x.ends_lives for name in x.affected)
        ends = Counter(self.restarts)
        if self.progress is not None:
            # Who is not there has not been started again: yet, or for good.
            ends.update(self._running_before - self._seen.sample.running)
        counts = {name: count - planned[name] for name, count in ends.items()}
        return {name: count for name, count in counts.items() if count > 0}

    @property
    def awaited(self) -> str:
        """What keeps it from going on, in words; empty while it waits for time alone."""
        if self.progress is None:
            return ""
        if self.phase is Phase.STEADYING:
            return self._lacks
        if self.phase is not Phase.SETTLING:
            return ""
        pending = [record for record in self.records if record.is_pending]
        names = [f"{x.fault.fault} {', '.join(sorted(x.affected))}" for x in pending]
        return f"not as before since: {'; '.join(names)}" if names else ""

    def handle(self, sample: Sample) -> list[Action]:
        """Takes one more sample; returns what is to be done now."""
        if self.progress is None:
            self.progress, self._started_s = begin(sample), sample.at_s
        else:
            self.progress = advance(self.progress, sample)
        if sample.ended and self.phase is not Phase.OVER:
            return self.stop(f"the fleet has ended: {sample.ended}")
        if self.phase is Phase.STEADYING:
            self._steady(sample.at_s)
        if self.phase in (Phase.STRIKING, Phase.SETTLING):
            self._watch()
        actions: list[Action] = []
        if self.phase is Phase.STRIKING and self._now >= self.scenario.duration_s:
            self.phase, self._settling_s = Phase.SETTLING, self._now
            actions = self._heal_all()
        elif self.phase is Phase.STRIKING:
            actions = self._abort_if_due()
            # Nobody is struck any more where it is given up: not everything can be undone.
            if not self.is_over:
                actions = [*self._heal_due(), *self._strike_due()]
        elif self.phase is Phase.SETTLING:
            # Who got to a point of the protocol just before that was disarmed.
            actions = self._heal_all()
            self._settle()
        return actions

    def failed(self, number: int, problem: str) -> None:
        """A strike could not be done, or not be healed."""
        self.records[number].problem = problem

    def stop(self, why: str) -> list[Action]:
        """Ends at once; returns what heals everything."""
        self.stopped = self.stopped or why
        self.phase = Phase.OVER
        return self._heal_all()

    # -- time -------------------------------------------------------------------------------------

    @property
    def _seen(self) -> Progress:
        assert self.progress is not None, "a sample came first"
        return self.progress

    @property
    def _now(self) -> float:
        """Seconds since the fleet was steady."""
        return self._seen.sample.at_s - self._zero_s

    # -- steady state -----------------------------------------------------------------------------

    def _steady(self, at_s: float) -> None:
        seen, lacks = self._seen, self._lacks
        if not lacks:
            self.phase, self._zero_s = Phase.STRIKING, at_s
            self._restarts, self._merges_before = seen.sample.restarts, seen.merges
            self._running_before = seen.sample.running
            return
        assert self._started_s is not None
        if at_s - self._started_s > self.scenario.ready_s:
            self.stop(f"no steady state within {self.scenario.ready_s:g} s: {lacks}")

    @property
    def _lacks(self) -> str:
        """What a steady state lacks; empty where it is there."""
        seen = self._seen
        missing = [x for x in self.names if is_learner(x) and not seen.contributions.get(x)]
        if missing:
            return f"{', '.join(sorted(missing))} did not contribute"
        if not seen.merges:
            return "nothing was merged"
        return "" if seen.sample.in_sync or not self._has_standby else "no standby is in sync"

    @property
    def _has_standby(self) -> bool:
        return sum(is_synchronizer(name) for name in self.names) > 1

    # -- striking ---------------------------------------------------------------------------------

    def _strike_due(self) -> list[Action]:
        actions: list[Action] = []
        for record in self.records:
            strike, fault = record.strike, record.fault
            done = record.began_s is not None or record.problem or strike.number in self._armed
            if done or self._now < strike.at_s:
                continue
            if strike.on and not fault.at_point:
                # What has to wait after its event does not need another one.
                if strike.on in self._seen.events:
                    self._due.add(strike.number)
                if strike.number not in self._due:
                    continue
            found = self._arm(record) if fault.at_point else self._begin(record)
            actions += [] if found is None else [found]
        return actions

    def _begin(self, record: Record) -> Begin | None:
        groups = self._groups(record)
        why = self._held(record.fault, record.whom, groups)
        if why:
            record.held = why
            return None
        record.begin(groups, self._now, self._seen)
        return Begin(number=record.strike.number, fault=record.fault, groups=groups)

    def _arm(self, record: Record) -> Arm | None:
        fault = record.fault
        leader, pick = self._seen.sample.leader, record.strike.pick
        found = resolve_target(fault.who, self._free(), leader, pick)
        if not found and fault.who != DONOR:
            record.held = f"nobody to strike: {fault.who}"
            return None
        self._armed.add(record.strike.number)
        process = "learner-*" if fault.who == DONOR else found[0]
        return Arm(number=record.strike.number, fault=fault, process=process)

    def _free(self) -> frozenset[str]:
        """Everybody who runs and is not struck already."""
        return self._seen.sample.running - self._down()

    def _down(self) -> frozenset[str]:
        """Everybody who was struck and is not as before."""
        pending = [record for record in self.records if record.is_open or record.is_pending]
        return frozenset(name for record in pending for name in record.affected)

    def _groups(self, record: Record) -> tuple[tuple[str, ...], ...]:
        fault, pick = record.fault, record.strike.pick
        if fault.fault in _REDIS_FAULTS:
            return (("redis",),)
        wanted = fault.groups or ((fault.who,),)
        groups = resolve_groups(wanted, self._free(), self._seen.sample.leader, pick)
        named = {name for group in groups for name in group}
        return tuple(
            tuple(sorted(self.names - named)) if wanted[index] == (REST,) else group
            for index, group in enumerate(groups)
        )

    def _held(self, fault: Fault, whom: str, groups: tuple[tuple[str, ...], ...]) -> str:
        """Why a strike has to wait: the promise is about one fault of the leadership at a time."""
        if not all(groups):
            return f"nobody to strike: {whom}"
        struck = {name for group in groups[:1] for name in group}
        left = self._seen.sample.running - self._down() - struck
        num_left = sum(map(is_learner, left))
        if num_left < fault.spare:
            return f"{num_left} learners would be left at work, and {fault.spare} are to be spared"
        touches = any(not is_learner(name) for group in groups[:1] for name in group)
        if touches and self._has_standby:
            if not self._seen.sample.in_sync:
                return "no standby is in sync, and a second fault at once is beyond the promise"
            pending = [record.affected for record in self.records if record.is_pending]
            if any(not is_learner(name) for affected in pending for name in affected):
                return "an earlier fault of synchronizers or Redis is not over"
        return ""

    def _heal_due(self) -> list[Action]:
        due = []
        for record in self._open():
            assert record.began_s is not None, "open"
            if self._now >= record.began_s + (record.fault.duration_s or 0.0):
                due.append(self._heal(record))
        return due

    def _heal_all(self) -> list[Action]:
        waiting = [number for number in self._armed if self.records[number].began_s is None]
        self._armed.difference_update(waiting)
        disarmed: list[Action] = [Heal(number=number) for number in sorted(waiting)]
        return [*disarmed, *(self._heal(record) for record in self._open())]

    def _open(self) -> list[Record]:
        return [record for record in self.records if record.is_open]

    def _heal(self, record: Record) -> Action:
        record.heal(self._now, self._seen)
        return Heal(number=record.strike.number)

    # -- watching ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen = self._seen
        still_s = seen.sample.at_s - max(seen.merged_at_s, self._zero_s)
        self.longest_without_merging_s = max(self.longest_without_merging_s, still_s)
        for number, name in seen.sample.struck.items():
            if self.records[number].began_s is None:
                self.records[number].begin(((name,),), self._now, seen)
        for record in self.records:
            record.watch(self._now, seen)
        if seen.sample.leader is not None:
            self._watch_others()

    def _watch_others(self) -> None:
        """What is seen of the learners that nothing has cut off, killed or held."""
        gentle = {FaultKind.LATENCY, FaultKind.BANDWIDTH, FaultKind.LOSS, FaultKind.CLOCK_SKEW}
        rough = {
            name
            for record in self.records
            if record.began_s is not None and record.fault.fault not in gentle
            for name in record.affected | record.left_alone
        }
        for name, learner in self._seen.sample.learners.items():
            if name in rough:
                continue
            if learner.state == "gone":
                self.expired.add(name)
            if learner.state in {"live", "disconnected"}:
                self.longest_silence_s = max(self.longest_silence_s, learner.silent_s)

    def _settle(self) -> None:
        recovered = not any(record.is_pending for record in self.records)
        if recovered or self._now - self._settling_s > self.scenario.settle_s:
            self.phase = Phase.OVER

    def _abort_if_due(self) -> list[Action]:
        abort, seen = self.scenario.abort, self._seen
        still_s = seen.sample.at_s - max(seen.merged_at_s, self._zero_s)
        if still_s > abort.without_merging_s:
            return self.stop(f"the global step has stood still for {still_s:.0f} s")
        num_learners = sum(is_learner(name) for name in seen.sample.running)
        if num_learners < abort.learners_below:
            return self.stop(f"{num_learners} learners are running")
        return []
