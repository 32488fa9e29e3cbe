"""Who is there: incarnations, streams, silence, seeding, shards, drain, end, restart."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, Script, answers, only, pulls, settings

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.state import Restored
from synchronizer_server.core.synchronizer import SynchronizerCore


def state_of(s: Script, name: str) -> str:
    learner = s.core.state.roster.find(name)
    assert learner is not None
    return learner.state.value


# -- lives --------------------------------------------------------------------------------------


def test_a_later_incarnation_fences_the_earlier_one():
    s = Script().warm("a", "b", "c")
    old = s.lives["a"]
    (fence,) = only(s.up("a"), ef.Fence)
    assert (fence.learner_id, fence.incarnation) == ("a", old)
    assert s.lives["a"] > old


def test_whatever_an_earlier_life_still_sends_changes_nothing():
    s = Script().warm("a", "b", "c")
    old = s.lives["a"]
    s.up("a")
    learner = s.core.state.roster.find("a")
    before = (learner.local_step, learner.heard_at, learner.state)
    s.advance(0.05)
    for event in (
        ev.StepReported(learner_id="a", incarnation=old, local_step=99, num_steps=1, num_tokens=1),
        ev.Heard(learner_id="a", incarnation=old),
        ev.StreamClosed(learner_id="a", incarnation=old),
        ev.StreamOpened(learner_id="a", incarnation=old),
        ev.LearnerLeft(learner_id="a", incarnation=old, reason=""),
        ev.LearnerJoined(learner_id="a", incarnation=old, shard=0),
        ev.LearnerJoined(learner_id="a", incarnation=s.lives["a"], shard=0),
    ):
        assert s.feed(event) == []
        assert (learner.local_step, learner.heard_at, learner.state) == before
        assert s.core.state.roster.find("a") is learner


def test_a_new_life_keeps_the_counts_of_the_learner():
    s = Script().warm("a", "b", "c")
    before = s.core.state.roster.find("a")
    s.up("a")
    after = s.core.state.roster.find("a")
    assert after is not before
    for name in ("shard", "local_step", "num_tokens", "num_tokens_merged", "num_accepted"):
        assert getattr(after, name) == getattr(before, name)
    assert after.num_accepted == 6


# -- live and progressing are separate ---------------------------------------------------------


def test_a_learner_is_gone_after_the_heartbeat_timeout_and_may_come_back_in_the_same_life():
    s = Script().warm("a", "b", "c")
    s.heard("a", "b", "c")
    s.advance(4.99)
    s.heard("a", "b")
    assert state_of(s, "c") == "live"
    (close,) = only(s.advance(0.02), ef.CloseStream)
    assert (close.learner_id, close.reason) == ("c", Reason.LEARNER_GONE)
    assert state_of(s, "c") == "gone"
    s.close("c")
    assert state_of(s, "c") == "gone", "that its stream then ends is no news"
    assert [e.state for e in only(s.open("c"), ef.LearnerChanged)] == ["live"]


def test_heartbeats_keep_a_learner_live_that_makes_no_progress():
    s = Script().warm("a", "b", "c")
    for _ in range(10):
        s.advance(1.0)
        s.heard("c")
    assert state_of(s, "c") == "live"
    assert state_of(s, "a") == "gone"


def test_the_time_that_a_stream_was_broken_is_no_step_time():
    s = Script().warm("a", "b", "c")
    s.close("a")
    s.advance(2.0)
    s.open("a")
    s.report("a")
    assert s.core.state.roster.find("a").step_s == pytest.approx(0.1)


def test_who_left_does_not_come_back_in_the_same_life():
    s = Script().warm("a", "b", "c")
    s.leave("a")
    assert state_of(s, "a") == "left"
    assert s.open("a") == []
    assert s.close("a") == []
    assert pulls(s.up("a") + s.report("a") + s.report("b", "c")) != []


def test_nobody_there_then_all_back():
    s = Script().warm("a", "b", "c")
    s.auto = set(ACTIONS)
    for name in "abc":
        s.close(name)
    s.advance(100.0)
    committed = s.core.state.committed
    s.up("a")
    for _ in range(4):
        s.report("a")
        s.advance(0.1)
    assert s.core.state.committed > committed


# -- seeding ------------------------------------------------------------------------------------


def test_the_first_to_join_seeds_and_nobody_else():
    s = Script()
    assert [(e.learner_id, e.incarnation) for e in only(s.up("a"), ef.GrantSeed)] == [
        ("a", s.lives["a"])
    ]
    assert only(s.up("b"), ef.GrantSeed) == []
    assert s.core.seed_refusal("b", s.lives["b"], 0) is Reason.NOT_ASKED
    assert s.core.seed_refusal("a", Incarnation(1, 9), 0) is Reason.NOT_ASKED
    assert s.core.seed_refusal("a", s.lives["a"], 4) is Reason.UNKNOWN_FRAGMENT
    assert s.core.seed_refusal("a", s.lives["a"], -1) is Reason.UNKNOWN_FRAGMENT
    assert s.core.seed_refusal("a", s.lives["a"], 3) is None
    assert s.stage_seed("b", 0) == []
    assert s.core.state.seeded_fragments == set()


def test_the_seed_is_persisted_once_whole_and_published_once_persisted():
    s = Script()
    s.up("a", "b", "c")
    assert s.stage_seed("a", 0, 1, 2, 2) == []
    assert [type(e) for e in s.stage_seed("a", 3)] == [ef.PersistSeed]
    assert s.core.seed_refusal("a", s.lives["a"], 0) is Reason.ALREADY_MERGED
    assert s.reasons() == ["persist"]
    assert s.core.state.rounds == []
    effects = s.feed(ev.SeedPersisted(versions=s.seed_versions()))
    assert isinstance(effects[0], ef.PublishSeed)
    assert s.core.state.rounds[0].global_step == 1


def test_a_seed_that_cannot_be_persisted_is_tried_again_after_a_while():
    s = Script()
    s.up("a")
    s.stage_seed("a")
    assert s.persist_failed(0, retry_after_s=2.0) == []
    assert "tried again" in s.details()
    s.heard("a")
    assert not only(s.advance(1.99), ef.PersistSeed)
    assert only(s.advance(0.02), ef.PersistSeed)
    assert not only(s.advance(3.0), ef.PersistSeed), "once per failure"


def test_a_lost_seeder_is_replaced_by_whoever_joins_next():
    s = Script()
    s.up("a")
    s.stage_seed("a", 0, 1)
    assert only(s.close("a"), ef.CloseStream) == []
    assert s.core.state.seeded_fragments == set(), "a seed is of one piece"
    assert s.reasons() == ["learners"]
    (grant,) = only(s.up("b"), ef.GrantSeed)
    assert grant.learner_id == "b"


def test_where_others_are_live_a_lost_seeder_makes_them_join_again():
    s = Script()
    s.up("a", "b", "c")
    s.stage_seed("a", 0)
    closed = only(s.close("a"), ef.CloseStream)
    assert [(e.learner_id, e.reason) for e in closed] == [
        ("b", Reason.UNKNOWN_LEARNER), ("c", Reason.UNKNOWN_LEARNER),
    ]  # fmt: skip
    (grant,) = only(s.up("c") + s.up("b"), ef.GrantSeed)
    assert grant.learner_id == "c"
    s.seed("c")
    assert s.core.state.seeded


def test_the_seeder_itself_may_come_back_and_seeds_anew():
    s = Script()
    s.up("a", "b")
    s.stage_seed("a", 0, 1, 2)
    effects = s.up("a")
    assert [e.learner_id for e in only(effects, ef.GrantSeed)] == ["a"]
    assert only(effects, ef.CloseStream) == []
    assert s.core.state.seeded_fragments == set()


def test_a_stream_that_opens_when_nobody_seeds_is_told_to_join_again():
    s = Script()
    s.up("a")
    s.join("b")
    s.close("a")
    (close,) = only(s.open("b"), ef.CloseStream)
    assert (close.learner_id, close.reason) == ("b", Reason.UNKNOWN_LEARNER)
    assert only(s.join("b"), ef.GrantSeed)


@pytest.mark.parametrize("opened", [True, False])
def test_a_seeder_that_brings_nothing_does_not_hold_the_others_for_ever(opened):
    s = Script(settings(push_timeout_s=10.0, heartbeat_timeout_s=100.0))
    s.join("a")
    if opened:
        s.open("a")
    s.up("b")
    assert s.core.wake_at(s.now) is not None
    effects = s.advance(10.0)
    assert "b" in {e.learner_id for e in only(effects, ef.CloseStream)}
    assert [e.learner_id for e in only(s.up("b"), ef.GrantSeed)] == ["b"]
    assert s.core.seed_refusal("a", s.lives["a"], 0) is Reason.NOT_ASKED


def test_alone_a_slow_seeder_gets_all_the_time_it_needs():
    s = Script(settings(push_timeout_s=10.0, heartbeat_timeout_s=1000.0))
    s.up("a")
    assert only(s.advance(500.0), ef.CloseStream) == []
    s.seed("a")
    assert s.core.state.seeded


# -- shards -------------------------------------------------------------------------------------


def test_a_shard_belongs_to_a_learner_id_in_every_life_and_there_are_as_many_as_planned():
    s = Script()
    s.up("a", "b", "c")
    assert [s.core.shard_for(x) for x in "abcd"] == [0, 1, 2, None]
    s.close("b")
    assert s.core.shard_for("d") is None
    s.up("b")
    assert [s.core.state.roster.find(x).shard for x in "abc"] == [0, 1, 2]


def test_a_free_shard_is_found_between_those_that_a_record_knows():
    restored = Restored(
        global_step=0, versions=Script().seed_versions(), incarnations={"x": Incarnation(1, 4)},
        shards={"x": 1}, local_steps={}, tokens_merged={}, quorum=1,
    )  # fmt: skip
    s = Script(restored=restored, term=2)
    assert s.core.shard_for("x") == 1
    assert s.core.shard_for("y") == 0


def test_the_layout_may_come_with_the_first_learner():
    core = SynchronizerCore(settings(), term=1)
    core.fix_layout(3)
    core.fix_layout(3)
    assert core.state.num_fragments == core.state.pace.num_fragments == 3
    with pytest.raises(AssertionError, match="fixed once"):
        core.fix_layout(4)


# -- drain and end ------------------------------------------------------------------------------


def test_a_drain_finishes_what_is_in_flight_and_opens_nothing():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    s.advance(0.1)
    assert [r.state.value for r in s.core.state.rounds] == ["pulling", "collecting"]
    effects = s.feed(ev.DrainStarted())
    assert not only(effects, ef.Completed)
    assert [r.global_step for r in s.core.state.rounds] == [7]
    assert "draining" in s.reasons()
    s.report("a", "b", "c")
    for name in "abc":
        s.push(name, t=7)
    s.merged(7)
    effects = s.persisted(7)
    assert isinstance(effects[-1], ef.Completed)
    assert not only(effects, ef.SendStop), "the run goes on elsewhere"
    assert s.reasons() == []
    assert s.advance(0.5) == []


def test_a_drain_does_not_wait_for_a_round_that_falls_back():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    s.feed(ev.DrainStarted())
    effects = s.decline("a", 7) + s.decline("b", 7) + s.decline("c", 7)
    assert only(effects, ef.Completed)
    assert s.core.state.committed == 6


def test_a_drain_finishes_an_earlier_round_before_a_later_one():
    """Abandoning the earlier one would leave a gap in t."""
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    s.advance(0.1)
    s.report("a", "b", "c")
    for name in "abc":
        s.push(name, t=8)
    s.merged(8)
    s.feed(ev.DrainStarted())
    for name in "abc":
        s.decline(name, 7)
    assert [(r.global_step, r.state.value) for r in s.core.state.rounds] == [
        (7, "collecting"), (8, "merged"),
    ]  # fmt: skip
    s.auto = set(ACTIONS)
    s.report("a", "b", "c")
    assert s.core.state.committed == 8
    assert s.core.state.complete


def test_a_drain_before_anything_was_seeded_is_done_at_once():
    s = Script()
    s.up("a")
    assert only(s.feed(ev.DrainStarted()), ef.Completed)
    assert only(s.close("a") + s.open("a"), ef.CloseStream) == []


def test_a_drain_waits_for_a_seed_that_is_being_persisted():
    s = Script()
    s.up("a")
    s.stage_seed("a")
    assert not only(s.feed(ev.DrainStarted()), ef.Completed)
    effects = s.feed(ev.SeedPersisted(versions=s.seed_versions()))
    assert [type(e) for e in effects] == [ef.PublishSeed, ef.Completed]


def test_the_run_is_complete_with_its_last_round():
    s = Script(settings(total_global_steps=8)).warm("a", "b", "c")
    s.auto = set(ACTIONS)
    for _ in range(6):
        s.report("a", "b", "c")
        s.advance(0.1)
    assert s.core.state.committed == s.core.state.last_opened == 8
    log = [e for _, e in s.log]
    assert [e.global_step for e in log if isinstance(e, ef.SendStop | ef.Completed)] == [8, 8]
    assert s.core.state.finished
    assert s.reasons() == []
    assert s.core.wake_at(s.now) is not None, "silence is still noticed"


def test_a_run_that_was_complete_is_complete_after_a_restart():
    old = Script(settings(total_global_steps=6)).run_to_end("a", "b", "c")
    s = Script(settings(total_global_steps=6), restored=restored_from(old), term=2)
    assert [type(e) for e in s.feed(ev.Tick())] == [ef.SendStop, ef.Completed]


# -- restart ------------------------------------------------------------------------------------


def restored_from(old: Script) -> Restored:
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


def test_a_restart_goes_on_from_what_is_persisted_and_fences_what_was_before():
    old = Script().warm("a", "b", "c")
    old.feed(ev.QuorumSet(quorum=2))
    s = Script(restored=restored_from(old), term=2)
    assert s.core.state.seeded
    assert (s.core.state.committed, s.core.state.quorum) == (6, 2)
    assert s.core.state.lineage.vector() == old.core.state.lineage.vector()
    s.feed(ev.Tick())
    assert s.core.state.rounds[0].global_step == 7
    assert "not live: a (disconnected), b (disconnected), c (disconnected)" in s.details()
    s.lives = dict(old.lives)
    assert answers(s.push("a", t=7, term=1)) == ["a refused STALE_TERM"]
    assert [e.incarnation for e in only(s.up("a"), ef.Fence)] == [old.lives["a"]]
    assert s.lives["a"] == Incarnation(2, 2)
    assert only(s.report("a", step=3), ef.SendPull) == []
    s.up("b", "c")
    s.steps = dict(old.steps)
    assert {x for x, _ in pulls(s.report("a", "b", "c"))} == {"a", "b", "c"}
    s.auto = set(ACTIONS)
    for name in "abc":
        s.push(name, t=7)
    assert s.core.state.committed == 7
    assert s.core.state.lineage.current(3).term == 2
