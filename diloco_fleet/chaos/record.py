"""What becomes of one strike: from its beginning until the fleet is as before. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from diloco_fleet.chaos.sample import Progress
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.schedule import Strike
from diloco_fleet.chaos.targets import is_learner

STALE_S: Final = 1.5
"""What is seen of a fleet may be that old."""

_FOR_GOOD: Final = frozenset({"left", "drained"})
"""States of learners that nobody expects back."""


@dataclass(slots=True, kw_only=True)
class _Baseline:
    """What has to be exceeded, or to be there again."""

    at_work: frozenset[str]
    incarnations: Mapping[str, tuple[int, int]]
    contributions: dict[str, int]
    merges: int
    term: int
    leader: str | None
    led: bool
    in_sync: bool
    lease_held: bool
    renewed: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of a strike; times since the fleet was steady, None for what did not happen.

    Attributes:
        strike: what was planned.
        fault: what was to be done.
        targets: whom it struck, in groups; of a partition the first one is cut off from the second.
        began_s: when it struck.
        healed_s: when it was over.
        recovered_s: when the fleet was as before: the global step rises, in a later term where who
            led was killed; who was struck is there, and contributes, and so does who was cut off
            from who led; a standby is in sync and the lease is held.
        merging_s: when the global step rose again.
        held: why it struck later than planned; empty where it did not.
        problem: why it did not happen, or could not be healed.
    """

    strike: Strike
    fault: Fault
    targets: tuple[tuple[str, ...], ...] = ()
    began_s: float | None = None
    healed_s: float | None = None
    recovered_s: float | None = None
    merging_s: float | None = None
    held: str = ""
    problem: str = ""
    _baseline: _Baseline | None = None

    @property
    def whom(self) -> str:
        """Whom it was to strike."""
        return self.fault.who or " from ".join(self.fault.between)

    @property
    def affected(self) -> frozenset[str]:
        """Everybody who has to be back."""
        return frozenset(name for group in self.targets[:1] for name in group)

    @property
    def recovery_s(self) -> float | None:
        """From healing until the fleet was as before."""
        if self.recovered_s is None or self.healed_s is None:
            return None
        return self.recovered_s - self.healed_s

    @property
    def left_alone(self) -> frozenset[str]:
        """Everybody else whom it cut off from who led."""
        base, others = self._baseline, self.targets[1:]
        cut_off = base is not None and base.leader in self.affected
        return frozenset(name for group in others for name in group) if cut_off else frozenset()

    @property
    def happened(self) -> bool:
        """Whether it struck."""
        return self.began_s is not None and not self.problem

    @property
    def ends_lives(self) -> bool:
        """Whether it has ended a life of everybody whom it struck."""
        return self.happened and self._ends_lives

    @property
    def _ends_lives(self) -> bool:
        return self.fault.fault in (FaultKind.KILL, FaultKind.RESTART)

    @property
    def is_open(self) -> bool:
        """Whether it has begun and is not healed."""
        return self.began_s is not None and self.healed_s is None

    @property
    def is_pending(self) -> bool:
        """Whether it has begun and the fleet is not as before."""
        return self.began_s is not None and self.recovered_s is None and not self.problem

    def begin(self, targets: tuple[tuple[str, ...], ...], now_s: float, seen: Progress) -> None:
        """It strikes now."""
        self.targets, self.began_s = targets, now_s
        sample = seen.sample
        # Who leads anew has not heard of everybody yet, but who has contributed was at work.
        for_good = {name for name, x in sample.learners.items() if x.state in _FOR_GOOD}
        at_work = {name for name, count in seen.contributions.items() if count} - for_good
        self._baseline = _Baseline(
            at_work=frozenset(at_work),
            incarnations=dict(seen.incarnations),
            contributions=dict(seen.contributions),
            merges=seen.merges,
            term=sample.term,
            leader=sample.leader,
            led=self._ends_lives and sample.leader in self.affected,
            in_sync=sample.in_sync,
            lease_held=sample.lease_held,
        )
        if self.fault.at_once:
            self.healed_s = now_s

    def heal(self, now_s: float, seen: Progress) -> None:
        """It is over; what came before does not count as recovery."""
        self.healed_s = now_s
        assert self._baseline is not None, "it has begun"
        self._baseline.contributions = dict(seen.contributions)
        self._baseline.merges = seen.merges

    def watch(self, now_s: float, seen: Progress) -> None:
        """Looks whether the fleet is as before."""
        if not self.is_pending or self.healed_s is None or now_s < self.healed_s + STALE_S:
            return
        base = self._baseline
        assert base is not None, "it has begun"
        led_anew = not base.led or seen.sample.term > base.term
        if self.merging_s is None and seen.merges > base.merges and led_anew:
            self.merging_s = now_s
        named = self.affected | self.left_alone
        learners = [name for name in named if is_learner(name) and name in base.at_work]
        back = [self._contributes(name, base, seen) for name in learners]
        in_sync = seen.sample.in_sync or not base.in_sync
        whole = in_sync and (seen.sample.lease_held or not base.lease_held)
        there = self.affected <= seen.sample.running
        if self.merging_s is not None and all(back) and whole and there:
            self.recovered_s = now_s

    def _contributes(self, name: str, base: _Baseline, seen: Progress) -> bool:
        if self._ends_lives and name not in base.renewed:
            learner = seen.sample.learners.get(name)
            if learner is None or learner.incarnation <= base.incarnations[name]:
                return False
            base.renewed.add(name)
            base.contributions[name] = seen.contributions.get(name, 0)
        return seen.contributions.get(name, 0) > base.contributions.get(name, 0)
