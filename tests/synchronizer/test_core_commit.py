"""Merging and committing: order of t, persist before publish, weights, measured H, the schedule."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, Script, only, settings

from synchronizer_server.core import effects as ef

# -- commit -----------------------------------------------------------------------------------


def test_rounds_commit_in_order_of_t_and_persist_before_they_publish():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    s.advance(0.1)
    s.report("a", "b", "c")
    for name in "abc":
        s.push(name, t=8)
    assert only(s.merged(8), ef.PersistRound) == []
    assert "round 8: earlier_round: round 7 commits first" in s.details()
    for name in "abc":
        s.push(name, t=7)
    effects = s.merged(7)
    assert [e.summary.global_step for e in only(effects, ef.PersistRound)] == [7]
    assert not only(effects, ef.PublishRound)
    effects = s.persisted(7)
    kinds = [type(e) for e in effects if isinstance(e, ef.PublishRound | ef.PersistRound)]
    assert kinds == [ef.PublishRound, ef.PersistRound], "8 follows at once"
    assert [e.summary.global_step for e in only(s.persisted(8), ef.PublishRound)] == [8]
    assert s.core.state.committed == 8


def test_what_is_published_is_what_was_persisted():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    for name in "abc":
        s.push(name, t=7)
    (persist,) = only(s.merged(7), ef.PersistRound)
    s.advance(0.1)
    s.report("a", "b")
    (publish,) = only(s.persisted(7), ef.PublishRound)
    assert publish.summary == persist.summary
    assert publish.sync_s == pytest.approx(0.1)


def test_a_failed_persist_is_retried_and_nothing_is_published_in_between():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    for name in "abc":
        s.push(name, t=7)
    s.merged(7)
    for _ in range(3):
        effects = s.persist_failed(7, retry_after_s=1.0)
        assert "round 7: persist: the store failed; it is tried again" in s.details()
        s.heard("a", "b", "c")
        effects += s.advance(0.99)
        assert not only(effects, ef.PublishRound | ef.PersistRound)  # type: ignore[arg-type]
        (again,) = only(s.advance(0.02), ef.PersistRound)
        assert again.summary.global_step == 7
    assert only(s.persisted(7), ef.PublishRound)


def test_the_merged_weight_is_the_sum_of_the_accepted_weights_in_order_of_acceptance():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    effects = s.push("c", tokens=100, num_steps=2, local_step=9) + s.push("a", tokens=30)
    effects += s.decline("b", 7)
    accepted = only(effects, ef.AcceptPush)
    assert [e.weight for e in accepted] == [5000.0, 900.0]
    (persist,) = only(s.merged(7), ef.PersistRound)
    assert [c.weight for c in persist.summary.contributions] == [5000.0, 900.0]
    assert [c.learner_id for c in persist.summary.contributions] == ["c", "a"]


def test_measured_h_counts_inner_steps_between_two_merges_of_a_fragment():
    s = Script(settings(sync_interval=12))
    s.auto = set(ACTIONS)
    s.up("a", "b", "c")
    s.seed("a")
    for _ in range(60):
        s.report("a", "b", "c")
        s.advance(0.1)
    published = [e for _, e in s.log if isinstance(e, ef.PublishRound)]
    assert [e.summary.measured_h for e in published[:4]] == [None] * 4
    measured = [e.summary.measured_h for e in published[8:]]
    assert all(10 <= h <= 14 for h in measured if h is not None)
    assert None not in measured


def test_measured_h_is_not_measured_again_when_a_round_asks_again():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.report("a")
    (round_,) = [r for r in s.core.state.rounds if r.global_step == 7]
    before = round_.measured_h
    s.decline("a", 7)
    s.report("a")
    assert round_.measured_h == before == 3.0


# -- schedule ---------------------------------------------------------------------------------


def test_the_schedule_names_the_fragment_that_collects_and_the_next_ones():
    s = Script().warm("a", "b", "c")
    assert s.core.state.due_fragments() == (3, 0, 1)
    s.report("a", "b", "c")
    s.advance(0.1)
    assert s.core.state.due_fragments() == (0, 1, 2)
    assert only((e for _, e in s.log), ef.SendSchedule)[-1].due_fragments == (0, 1, 2)


def test_the_schedule_ends_with_the_run():
    s = Script(settings(total_global_steps=7)).warm("a", "b", "c")
    assert s.core.state.due_fragments() == (3,)
