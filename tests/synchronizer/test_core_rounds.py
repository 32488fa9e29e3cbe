"""Rounds: opening, quorum, freshness, grace, pulling, commit order (design section 4)."""

from __future__ import annotations

import itertools

import pytest
from core_script import ACTIONS, Script, answers, only, pulls, settings

from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.rounds import (
    TRANSITIONS,
    Round,
    RoundInput,
    RoundState,
    diagram,
)


def states(script: Script) -> list[tuple[int, str]]:
    return [(r.global_step, r.state.value) for r in script.core.state.rounds]


# -- the table ---------------------------------------------------------------------------------


def test_a_pair_that_is_absent_from_the_table_is_illegal():
    for state in RoundState:
        for what in RoundInput:
            round_ = Round(global_step=1, fragment=1, opened_at=0.0, startup=False, state=state)
            if (state, what) in TRANSITIONS:
                round_.move(what)
                assert round_.state is TRANSITIONS[state, what]
            else:
                with pytest.raises(AssertionError, match="round 1"):
                    round_.move(what)


def test_every_state_can_be_reached_and_left_and_the_diagram_shows_every_transition():
    ends = {RoundState.PUBLISHED, RoundState.ABANDONED}
    assert {a for a, _ in TRANSITIONS} == set(RoundState) - ends
    assert set(TRANSITIONS.values()) == set(RoundState)
    text = diagram()
    assert all(f"{a} --> {b}: {what}" in text for (a, what), b in TRANSITIONS.items())


# -- quorum and freshness --------------------------------------------------------------------


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_a_round_asks_once_k_learners_have_stepped(quorum):
    s = Script(settings(quorum=quorum, grace=False)).warm("a", "b", "c")
    for i, name in enumerate("abc"):
        effects = s.report(name)
        if i + 1 == quorum:
            assert pulls(effects) == [(x, s.t - 1) for x in "abc"[:quorum]]
            return
        assert pulls(effects) == []


def test_asking_consumes_the_report_one_local_step_serves_one_round():
    s = Script(settings(quorum=2, grace=False)).warm("a", "b", "c")
    assert len(pulls(s.report("a", "b"))) == 2
    assert s.advance(0.5) is not None
    assert pulls(s.report("a", "b", step=s.steps["a"])) == [], "the same step again is no news"
    assert pulls(s.report("a")) == []
    assert {x for x, _ in pulls(s.report("b"))} == {"a", "b"}


def test_one_step_is_enough_however_far_ahead_a_learner_is():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    assert pulls(s.report("a", step=1000)) == [("a", 7)]
    s.push("a")
    s.advance(0.2)
    assert pulls(s.report("a", step=999)) == [], "an old report does not make it fresh"


def test_a_new_incarnation_is_fresh_at_its_first_step_and_not_before():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.report("a")
    s.push("a")
    s.advance(0.2)
    assert pulls(s.up("a")) == []
    assert pulls(s.report("a")) == [("a", 8)]


def test_a_new_incarnation_that_went_back_is_fresh_at_its_first_step():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.up("a")
    assert pulls(s.report("a", step=2)) == [("a", 7)]
    s.advance(0.2)
    assert pulls(s.report("a", step=2)) == []
    assert pulls(s.report("a", step=3)) == [("a", 8)]


def test_heartbeats_alone_do_not_make_a_learner_fresh():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    for _ in range(10):
        s.heard("a", "b", "c")
        assert pulls(s.advance(0.1)) == []


# -- grace ------------------------------------------------------------------------------------


def test_grace_waits_for_those_that_are_nearly_ready_and_ends_when_all_have_reported():
    s = Script().warm("a", "b", "c")
    assert pulls(s.report("a", "b")) == []
    assert states(s) == [(7, "grace")]
    assert pulls(s.report("c")) == [("a", 7), ("b", 7), ("c", 7)]


def test_grace_ends_in_time_without_the_slow():
    s = Script().warm("a", "b", "c")
    s.report("a", "b")
    grace_s = s.core.state.rounds[0].grace_s
    assert grace_s == pytest.approx(s.core.state.pace.grace_s())
    assert pulls(s.advance(grace_s * 0.99)) == []
    assert pulls(s.advance(grace_s * 0.02)) == [("a", 7), ("b", 7)]
    assert pulls(s.report("c")) == [], "the next round waits for its time"


def test_who_joins_in_the_grace_window_is_asked_too():
    s = Script().warm("a", "b", "c")
    s.report("a")
    s.up("b")
    assert pulls(s.report("b")) == []
    assert pulls(s.report("c")) == [("a", 7), ("b", 7), ("c", 7)]


def test_grace_ends_at_once_when_the_last_that_is_waited_for_dies():
    s = Script().warm("a", "b", "c")
    s.report("a", "b")
    assert pulls(s.close("c")) == [("a", 7), ("b", 7)]


def test_no_grace_asks_at_the_quorum():
    s = Script(settings(grace=False, quorum=2)).warm("a", "b", "c")
    assert pulls(s.report("a", "b")) == [("a", 7), ("b", 7)]


def test_quorum_lost_in_the_grace_window_asks_nobody():
    s = Script(settings(quorum=2)).warm("a", "b", "c")
    s.report("a", "b")
    assert states(s) == [(7, "grace")]
    s.close("b")
    s.heard("a", "c")
    assert pulls(s.advance(0.3)) == []
    assert states(s) == [(7, "collecting")]
    assert pulls(s.report("c")) == [("a", 7), ("c", 7)]


# -- start ------------------------------------------------------------------------------------


def test_the_first_round_waits_for_all_planned_learners_at_most_the_startup_wait():
    s = Script(settings(startup_wait_s=3.0))
    s.up("a", "b")
    s.seed("a")
    assert pulls(s.report("a", "b")) == []
    assert "1 planned learners" in s.details()
    assert pulls(s.advance(2.9)) == []
    assert pulls(s.advance(0.2)) == [("a", 1), ("b", 1)]


def test_the_first_round_begins_at_once_when_all_planned_learners_have_stepped():
    s = Script()
    s.up("a", "b", "c")
    s.seed("a")
    assert pulls(s.report("a", "b")) == []
    assert pulls(s.report("c")) == [("a", 1), ("b", 1), ("c", 1)]


def test_only_the_first_round_waits_for_learners_that_are_not_there():
    s = Script(settings(startup_wait_s=3.0))
    s.auto = set(ACTIONS)
    s.up("a", "b")
    s.seed("a")
    s.report("a", "b")
    s.advance(3.0)
    assert s.core.state.committed == 1
    s.report("a", "b")
    s.advance(0.5)
    s.report("a", "b")
    assert s.core.state.committed == 3


def test_after_a_restart_the_first_round_waits_a_heartbeat_timeout_for_the_others():
    old = Script().warm("a", "b", "c")
    s = Script(restored=restored_from(old), term=2)
    s.steps = dict(old.steps)
    s.up("a")
    assert pulls(s.report("a")) == []
    s.advance(4.0)
    s.heard("a")
    assert pulls(s.advance(1.1)) == [("a", 7)]


def restored_from(old: Script):
    from synchronizer_server.core.state import Restored

    state = old.core.state
    return Restored(
        global_step=state.committed,
        versions=state.lineage.vector(),
        incarnations={x.learner_id: x.incarnation for x in state.roster},
        shards={x.learner_id: x.shard for x in state.roster},
        local_steps={x.learner_id: x.local_step for x in state.roster},
        tokens_merged={x.learner_id: x.num_tokens_merged for x in state.roster},
        quorum=state.quorum,
    )


# -- pacing -----------------------------------------------------------------------------------


def test_the_next_round_opens_no_earlier_than_h_over_p_steps():
    s = Script(settings(sync_interval=12))
    s.auto = set(ACTIONS)
    s.up("a", "b", "c")
    s.seed("a")
    for _ in range(12):
        s.report("a", "b", "c")
        s.advance(0.1)
    s.report("a", "b", "c")
    s.advance(s.core.state.opens_at - s.now)
    assert s.core.state.opens_at == pytest.approx(s.now + 0.3), "opened and asked just now"
    assert s.core.state.rounds == []
    assert s.reasons() == ["pace"]
    t = s.t
    assert s.core.wake_at(s.now) == s.core.state.opens_at
    s.advance(s.core.state.opens_at - s.now - 0.001)
    assert s.core.state.rounds == []
    s.advance(0.002)
    assert states(s) == [(t + 1, "collecting")]


def test_a_round_that_opened_late_does_not_put_off_the_later_ones_and_none_opens_in_a_burst():
    s = Script(settings(sync_interval=12, grace=False))
    s.auto = set(ACTIONS)
    s.up("a", "b", "c")
    s.seed("a")
    opened = []
    for k in range(240):
        if k % 24:  # every so often nobody steps in time
            s.report("a", "b", "c")
        t = s.t
        s.advance(0.1)
        opened += [s.now] * (s.t - t)
    gaps = [b - a for a, b in itertools.pairwise(opened[8:])]
    assert min(gaps) > 0.5 * 0.3 - 1e-6
    assert sum(gaps) / len(gaps) == pytest.approx(0.3, rel=0.1)


def test_rounds_in_flight_are_at_most_tau_of_different_fragments_and_one_collects():
    s = Script(settings(overlap=2)).warm("a", "b", "c")
    assert states(s) == [(7, "collecting")]
    s.report("a", "b", "c")
    s.advance(0.2)
    assert states(s) == [(7, "pulling"), (8, "collecting")]
    s.report("a", "b", "c")
    s.advance(0.2)
    assert states(s) == [(7, "pulling"), (8, "pulling")]
    assert "in_flight" in s.reasons()
    assert [r.fragment for r in s.core.state.rounds] == [3, 0]


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_overlap_bounds_the_rounds_in_flight(overlap):
    s = Script(settings(overlap=overlap)).warm("a", "b", "c")
    for _ in range(5):
        s.report("a", "b", "c")
        s.advance(0.11)
    assert len(s.core.state.rounds) == overlap


# -- falling back -----------------------------------------------------------------------------


def test_with_too_few_accepted_a_round_collects_again_and_keeps_what_it_accepted():
    s = Script(settings(quorum=2, grace=False)).warm("a", "b", "c")
    assert pulls(s.report("a", "b")) == [("a", 7), ("b", 7)]
    s.push("a")
    effects = s.decline("b", 7)
    assert only(effects, ef.SendSchedule), "its fragment is due again"
    assert states(s)[0] == (7, "collecting")
    assert pulls(s.report("a")) == [], "what is accepted is not asked for again"
    assert pulls(s.report("c")) == [("c", 7)]
    effects = s.push("c")
    assert [(e.global_step) for e in only(effects, ef.MergeRound)] == [7]
    (persist,) = only(s.merged(7), ef.PersistRound)
    assert [c.learner_id for c in persist.summary.contributions] == ["a", "c"]
    assert [(d.learner_id, d.reason) for d in persist.summary.dropped] == [("b", "NOT_READY")]


def test_who_was_dropped_may_be_asked_again_in_the_same_round_and_then_counts_as_in():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.report("a")
    s.decline("a", 7)
    assert pulls(s.report("a")) == [("a", 7)]
    assert answers(s.push("a")) == ["a accepted"]
    (persist,) = only(s.merged(7), ef.PersistRound)
    assert persist.summary.dropped == ()


def test_a_later_round_is_suspended_while_an_earlier_one_collects_again():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.report("a")
    s.advance(0.2)
    assert states(s) == [(7, "pulling"), (8, "collecting")]
    s.decline("a", 7)
    assert states(s) == [(7, "collecting"), (8, "suspended")]
    assert "round 8: earlier_round: round 7 collects first" in s.details()
    assert pulls(s.report("a")) == [("a", 7)]
    assert states(s) == [(7, "pulling"), (8, "collecting")]


def test_a_later_round_in_its_grace_window_is_suspended_too_and_asks_afresh():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    s.advance(0.1)
    s.report("b")
    assert states(s) == [(7, "pulling"), (8, "grace")]
    for name in "abc":
        s.decline(name, 7)
    assert next(r for r in states(s) if r[1] in {"collecting", "grace"})[0] == 7
    assert states(s)[1] == (8, "suspended")
    s.advance(0.11)
    s.report("a", "c")
    s.advance(0.2)
    assert states(s)[0] == (7, "pulling")


# -- a changing quorum ------------------------------------------------------------------------


def test_a_raised_quorum_holds_for_the_round_that_collects():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.feed(ev.QuorumSet(quorum=2))
    assert pulls(s.report("a")) == []
    assert pulls(s.report("b")) == [("a", 7), ("b", 7)]


def test_a_quorum_raised_while_pulling_sends_the_round_back_for_more():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.report("a")
    s.feed(ev.QuorumSet(quorum=2))
    assert not only(s.push("a"), ef.MergeRound)
    assert pulls(s.report("b")) == [("b", 7)]
    assert only(s.push("b"), ef.MergeRound)


def test_a_lowered_quorum_lets_a_round_go_on_with_what_it_has():
    s = Script(settings(quorum=3, grace=False)).warm("a", "b", "c")
    s.report("a", "b", "c")
    s.push("a")
    s.push("b")
    s.close("c")
    assert states(s)[0] == (7, "collecting")
    assert only(s.feed(ev.QuorumSet(quorum=2)), ef.MergeRound)
