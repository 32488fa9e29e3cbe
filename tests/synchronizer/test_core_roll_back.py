"""A fragment put back by an operator: an ordinary round, without contributions."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, Script, answers, only, pulls, settings

from decoupled_diloco.errors import Reason
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev

NAMES = ("a", "b", "c")
REASON = "its loss went up"


def busy(**changes: object) -> Script:
    """Every fragment was updated at least twice; the next round is collecting."""
    s = Script(settings(**changes)).warm(*NAMES)
    s.auto = set(ACTIONS)
    turns(s, 3 * s.P)
    while [r.state.value for r in s.core.state.rounds] != ["collecting"]:
        s.advance(0.01)
    return s


def turns(s: Script, count: int) -> list[ef.Effect]:
    return [e for _ in range(count) for e in s.report(*NAMES) + s.advance(0.1)]


def order(s: Script, fragment: int) -> list[ef.Effect]:
    assert s.core.roll_back_refusal(fragment) is None
    return s.feed(ev.RollBack(fragment=fragment, reason=REASON))


def published(effects: list[ef.Effect]) -> list[ef.RoundSummary]:
    return [e.summary for e in only(effects, ef.PublishRound)]


def test_the_next_round_of_the_fragment_brings_its_older_content_as_a_new_version():
    s = busy()
    fragment = (s.core.state.rounds[0].fragment + 2) % s.P
    chain = s.core.state.lineage
    bad, good = chain.current(fragment), chain.before(fragment)
    assert good is not None
    assert good.digest != bad.digest
    effects = order(s, fragment) + turns(s, s.P)
    summaries = published(effects)
    steps = [x.global_step for x in summaries]
    assert steps == list(range(steps[0], steps[0] + len(steps))), "rounds go on in order"
    (back,) = [x for x in summaries if x.rolled_back]
    assert (back.fragment, back.rolled_back, back.contributions) == (fragment, REASON, ())
    assert all(len(x.contributions) == 3 for x in summaries if x is not back)
    asked = [t for _, t in pulls(effects)]
    assert back.global_step not in asked, "nobody is asked for it"
    now = s.core.state.lineage.current(fragment)
    assert now.digest == good.digest
    assert (now.term, now.global_step) == (1, back.global_step)
    assert not s.core.state.roll_backs


def test_what_was_trained_against_the_replaced_content_is_no_longer_merged():
    """Carried over to the older copy it would bring the replaced one back."""
    s = busy()
    fragment = s.core.state.rounds[0].fragment
    good = s.core.state.lineage.before(fragment)
    bad = s.core.state.lineage.current(fragment)
    order(s, fragment)
    s.mute = {"a", "b"}
    while not any(r.fragment == fragment and "a" in r.pending for r in s.core.state.rounds):
        s.report(*NAMES)
        for round_ in list(s.core.state.rounds):
            if round_.fragment != fragment:
                for name in ("a", "b"):
                    if name in round_.pending:
                        s.push(name, t=round_.global_step)
        s.advance(0.05)
    t = next(r.global_step for r in s.core.state.rounds if r.fragment == fragment)
    assert answers(s.push("a", t=t, base=bad)) == ["a dropped STALE_BASE"]
    assert answers(s.push("b", t=t, base=good)) == ["b dropped STALE_BASE"]


def test_pushes_in_flight_of_that_round_are_dropped_with_the_reason():
    s = busy()
    s.auto = {"merge", "persist"}
    s.report(*NAMES)
    round_ = s.core.state.rounds[0]
    assert set(round_.pending) == set(NAMES)
    s.push_open("a")
    effects = order(s, round_.fragment)
    assert answers(effects) == [f"{name} dropped ROLLED_BACK" for name in NAMES]
    assert all(REASON in e.message for e in only(effects, ef.AnswerPush))
    assert published(effects)[0].rolled_back == REASON
    assert answers(s.stage("a")) == []


def test_acceptance_is_not_undone_the_round_after_puts_the_fragment_back():
    s = busy()
    s.auto = {"merge", "persist"}
    s.report(*NAMES)
    round_ = s.core.state.rounds[0]
    good = s.core.state.lineage.before(round_.fragment)
    assert answers(s.push("a")) == ["a accepted"]
    assert answers(order(s, round_.fragment)) == []
    effects = s.push("b") + s.push("c")
    assert [x.rolled_back for x in published(effects)] == [""]
    s.auto = set(ACTIONS)
    (back,) = [x for x in published(turns(s, s.P)) if x.rolled_back]
    assert back.fragment == round_.fragment
    assert good is not None
    assert s.core.state.lineage.current(back.fragment).digest == good.digest, "as of the order"


def test_an_order_whose_version_is_gone_meanwhile_fails_with_a_reason():
    s = busy(retained_updates=1)
    s.auto = {"merge", "persist"}
    s.report(*NAMES)
    fragment = s.core.state.rounds[0].fragment
    s.push("a")
    order(s, fragment)
    s.push("b")
    s.push("c")
    s.auto = set(ACTIONS)
    effects = turns(s, s.P)
    (failed,) = only(effects, ef.RollBackFailed)
    assert failed.fragment == fragment
    assert "no longer retained" in failed.message
    assert not [x for x in published(effects) if x.rolled_back]


def test_a_round_that_waits_for_a_quorum_is_put_back_without_one():
    s = busy()
    s.core.state.quorum = 9
    s.report(*NAMES)
    effects = order(s, s.core.state.rounds[0].fragment)
    assert [x.rolled_back for x in published(effects)] == [REASON]


def test_what_cannot_be_put_back_is_refused():
    s = Script()
    assert s.core.roll_back_refusal(0)[0] is Reason.STARTING
    s.up("a")
    s.seed("a")
    assert s.core.roll_back_refusal(0)[0] is Reason.STALE_BASE, "nothing older is there"
    assert s.core.roll_back_refusal(s.P)[0] is Reason.UNKNOWN_FRAGMENT
    s.feed(ev.DrainStarted())
    assert s.core.roll_back_refusal(0)[0] is Reason.DRAINING


@pytest.mark.parametrize("times", [1, 2])
def test_a_repeated_order_is_one_order(times):
    s = busy()
    fragment = (s.core.state.rounds[0].fragment + 2) % s.P
    for _ in range(times):
        order(s, fragment)
    assert sum(bool(x.rolled_back) for x in published(turns(s, 3 * s.P))) == 1
