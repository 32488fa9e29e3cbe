"""Quarantine: who fails to deliver too often in a row is left out for a while, and tried again."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, Script, answers, only, pulls, settings, words

from decoupled_diloco.errors import Reason
from synchronizer_server.core import effects as ef
from synchronizer_server.core.quarantine import Quarantine

NAMES = ("a", "b", "c")
AFTER = 3


def fleet(**changes: object) -> Script:
    values = {"quarantine_after": AFTER, "push_floor_s": 0.05, "heartbeat_timeout_s": 2.0}
    s = Script(settings(**(values | changes))).warm(*NAMES)
    s.auto, s.mute = set(ACTIONS), {"a"}
    return s


def turn(s: Script, reason: Reason | None, *, refused: bool = True) -> list[ef.Effect]:
    """A step of all; b and c push, a fails with a reason (None: it says nothing at all)."""
    effects = s.report(*NAMES)
    if reason is not None:
        for round_ in list(s.core.state.rounds):
            if "a" in round_.pending:
                effects += s.push_open("a", t=round_.global_step)
                effects += s.fail("a", reason, refused=refused)
    return effects + s.advance(0.1)


def until_out(s: Script, reason: Reason | None, limit: int = 40) -> list[ef.Effect]:
    """Turns until a is left out; returns what led there."""
    effects: list[ef.Effect] = []
    for _ in range(limit):
        effects += turn(s, reason)
        if s.core.state.roster.find("a").quarantine:
            return effects
    raise AssertionError("never left out")


@pytest.mark.parametrize(
    "reason", [Reason.NON_FINITE, Reason.NORM_BOUND, Reason.CORRUPT, Reason.MALFORMED, None]
)
def test_failures_in_a_row_leave_a_learner_out_and_the_others_go_on_without_it(reason):
    s = fleet()
    effects = until_out(s, reason)
    (told,) = only(effects, ef.QuarantineChanged)
    assert (told.learner_id, told.seconds) == ("a", 4.0)
    assert (reason or Reason.NO_PROGRESS) in told.reason
    assert f"{AFTER} pushes in a row" in told.reason
    failed = [x for x in answers(effects) if x.startswith("a ") and "QUARANTINED" not in x]
    assert len(failed) == AFTER
    before = s.core.state.committed
    later = [e for _ in range(10) for e in turn(s, reason)]
    assert "a" not in {name for name, _ in pulls(later)}, "nobody asks it"
    assert s.core.state.committed >= before + 8, "nobody waits for it"
    for persist in only(later, ef.PersistRound)[1:]:
        assert persist.summary.live == ("b", "c"), "it does not count as live"
    assert s.core.state.roster.find("a").live, "its stream stays open, updates go on"


def test_it_is_tried_again_with_one_pull_and_an_accepted_push_wipes_the_slate():
    s = fleet()
    until_out(s, Reason.NON_FINITE)
    s.mute = set()
    effects: list[ef.Effect] = []
    while s.core.state.roster.find("a").quarantine:
        effects += turn(s, None)
    assert [words(e) for e in only(effects, ef.QuarantineChanged)] == ["a is tried again"]
    while "a accepted" not in answers(effects):
        effects += turn(s, None)
    assert s.core.state.quarantine.num_failures("a") == 0
    assert not s.core.state.quarantine.probing("a")
    s.mute = {"a"}
    effects = until_out(s, Reason.NON_FINITE)
    assert only(effects, ef.QuarantineChanged)[0].seconds == 4.0, "it starts over"


def test_one_failure_on_trial_is_enough_and_it_is_out_for_twice_as_long():
    s = fleet()
    until_out(s, Reason.NON_FINITE)
    for expected in (8.0, 16.0):
        while s.core.state.roster.find("a").quarantine:
            turn(s, None)
        effects = until_out(s, Reason.NON_FINITE)
        assert [e.seconds for e in only(effects, ef.QuarantineChanged)] == [expected]
        failed = [x for x in answers(effects) if "NON_FINITE" in x]
        assert len(failed) == 1


def test_on_trial_it_is_asked_for_one_push_at_a_time():
    s = fleet(overlap=3, push_floor_s=5.0)
    until_out(s, Reason.NON_FINITE)
    while s.core.state.roster.find("a").quarantine:
        turn(s, None)
    for _ in range(6):
        turn(s, None)
        assert sum("a" in r.pending for r in s.core.state.rounds) <= 1


def test_joining_again_does_not_end_it():
    s = fleet()
    until_out(s, Reason.CORRUPT)
    s.up("a")
    effects = [e for _ in range(5) for e in turn(s, None)]
    assert "a" not in {name for name, _ in pulls(effects)}
    assert s.core.state.roster.find("a").quarantine


@pytest.mark.parametrize("reason", [Reason.STALE_BASE, Reason.ALREADY_MERGED, Reason.NOT_READY])
def test_what_healthy_learners_are_told_too_never_counts(reason):
    s = fleet()
    for _ in range(30):
        turn(s, reason, refused=False)
    assert s.core.state.quarantine.num_failures("a") == 0


def test_a_slow_link_gets_more_time_before_being_late_counts():
    quarantine = Quarantine(settings(push_timeout_s=60.0))
    assert not quarantine.counts(Reason.TOO_LATE, 59.9)
    assert quarantine.counts(Reason.TOO_LATE, 60.0)
    assert quarantine.counts(Reason.NO_PROGRESS, 1.0)


def test_it_doubles_up_to_a_bound_and_zero_switches_it_off():
    quarantine = Quarantine(settings(quarantine_after=1, heartbeat_timeout_s=5.0))
    now, seen = 0.0, []
    for _ in range(9):
        seconds = quarantine.failed("a", now)
        assert seconds is not None
        assert quarantine.failed("a", now) is None, "it is out already"
        now += seconds
        assert quarantine.release(now) == ["a"]
        seen.append(seconds)
    assert seen == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]
    off = Quarantine(settings(quarantine_after=0))
    assert [off.failed("a", 0.0) for _ in range(99)] == [None] * 99


def test_a_quorum_that_waits_names_who_is_left_out():
    s = fleet(quorum=3)
    s.core.state.quorum = 2
    until_out(s, Reason.NON_FINITE)
    s.core.state.quorum = 3
    for _ in range(4):
        turn(s, None)
    assert "in quarantine: a" in s.details()
