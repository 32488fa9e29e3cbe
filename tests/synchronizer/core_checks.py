"""What must never happen (design section 7), checked in the random world after every event."""

from __future__ import annotations

from core_models import Model, Staged, weight_of

from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core import effects as ef
from synchronizer_server.core.rounds import RoundState
from synchronizer_server.core.synchronizer import SynchronizerCore


class Checks:
    """A mixin of `core_world.World`."""

    core: SynchronizerCore
    settings: RunSettings
    P: int
    now: float
    num_events: int
    models: dict[str, Model]
    granted: dict[str, Incarnation]
    asked: dict[tuple[str, Incarnation], int]
    reported: dict[tuple[str, Incarnation], int]
    records: list[ef.RoundSummary]
    results: dict[int, Version]
    sums: dict[int, list[Staged]]
    persisting: int | None

    def check_pull(self, pull: ef.SendPull) -> None:
        learner = self.core.state.roster.find(pull.learner_id)
        assert learner is not None
        assert learner.live
        assert not learner.quarantine, "asked while it is left out"
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
        accepted = self.sums.get(summary.global_step, [])
        assert bool(accepted) != bool(summary.rolled_back), "merged, or put back"
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
        taking_part = {x.learner_id for x in state.roster if x.live and not x.quarantine}
        for round_ in state.rounds:
            assert set(round_.pending) <= taking_part, "somebody who is out is waited for"
            for pending in round_.pending.values():
                assert pending.limit_s <= self.settings.push_timeout_s
                assert now < pending.late_at(), "waits beyond the limit"
            if round_.state is RoundState.GRACE:
                assert now < round_.grace_until, "grace goes on for too long"
                assert round_.grace_s <= self.settings.startup_wait_s
            if round_.state is not RoundState.PULLING:
                assert not round_.pending
            if round_.state in {RoundState.MERGING, RoundState.MERGED, RoundState.PERSISTING}:
                assert len(round_.accepted) >= 1 or round_.rolled_back
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
