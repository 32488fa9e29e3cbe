"""Snapshots in the core: when one begins, who is awaited, when it is complete or has failed."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, Script, only, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev

NAMES = ("a", "b", "c")


def fleet(**changes: object) -> Script:
    s = Script(settings(**changes)).warm(*NAMES)
    s.auto |= set(ACTIONS)
    return s


def commit(s: Script, *names: str) -> list[ef.Effect]:
    """Steps until one more round is published."""
    before, effects = s.core.state.committed, []
    for _ in range(20):
        effects += s.report(*(names or NAMES)) + s.advance(0.1)
        if s.core.state.committed > before:
            return effects
    raise AssertionError("no round was committed")


def begin(s: Script, *names: str) -> int:
    s.feed(ev.SnapshotWanted())
    (begun,) = only(commit(s, *names), ef.BeginSnapshot)
    return begun.global_step


def recorded(s: Script, name: str, cut: int, life: Incarnation | None = None) -> list[ef.Effect]:
    return s.feed(
        ev.SnapshotRecorded(
            learner_id=name, incarnation=life or s.lives[name], global_step=cut
        )
    )  # fmt: skip


def test_the_next_round_after_the_request_is_the_cut_and_follows_its_publication():
    s = fleet()
    assert only(commit(s), ef.BeginSnapshot) == []
    s.feed(ev.SnapshotWanted())
    effects = commit(s)
    (begun,) = only(effects, ef.BeginSnapshot)
    assert begun.awaited == NAMES
    published = [e for e in effects if isinstance(e, ef.PublishRound)]
    assert begun.global_step == published[0].summary.global_step
    assert effects.index(published[0]) < effects.index(begun)
    assert s.core.snapshots.cut == begun.global_step


def test_it_is_kept_once_everybody_returned_the_marker_and_over_once_it_is_durable():
    s = fleet()
    cut = begin(s)
    assert only(recorded(s, "b", cut) + recorded(s, "a", cut), ef.KeepSnapshot) == []
    (keep,) = only(recorded(s, "c", cut), ef.KeepSnapshot)
    assert keep.recorded == s.lives
    assert keep.left_out == {}
    assert only(s.feed(ev.Tick()), ef.KeepSnapshot) == [], "kept once"
    (end,) = only(s.feed(ev.SnapshotKept(global_step=cut)), ef.EndSnapshot)
    assert (end.global_step, end.participants, end.failure) == (cut, NAMES, "")
    assert s.core.snapshots.pending is None
    assert only(commit(s), ef.BeginSnapshot) == [], "one request, one snapshot"


def test_at_every_multiple_of_the_setting_one_begins_by_itself_and_a_missed_one_is_made_up_for():
    s = fleet(snapshot_every=20)
    assert s.core.state.committed < 20
    begun = []
    while s.core.state.committed < 61:
        begun += [e.global_step for e in only(commit(s), ef.BeginSnapshot)]
        # The one of 20 takes until another multiple is over.
        if (pending := s.core.snapshots.pending) and s.core.state.committed >= 42:
            for name in NAMES:
                recorded(s, name, pending.global_step)
            s.feed(ev.SnapshotKept(global_step=pending.global_step))
    assert begun == [20, 43, 60]


def test_a_run_that_is_complete_begins_none():
    s = fleet(snapshot_every=20, total_global_steps=40)
    begun = []
    while not s.core.state.finished:
        begun += [e.global_step for e in only(commit(s), ef.BeginSnapshot)]
        if s.core.state.committed == 20:
            s.feed(ev.SnapshotFailed(global_step=20, message="no room"))
    assert begun == [20]


@pytest.mark.parametrize("how", ["leaves", "killed", "fenced"])
def test_who_is_gone_before_its_marker_is_left_out_with_the_reason(how):
    s = fleet()
    cut = begin(s)
    recorded(s, "a", cut)
    recorded(s, "c", cut)
    life = s.lives["b"]
    if how == "leaves":
        effects = s.leave("b")
    elif how == "killed":
        effects = s.close("b")
        assert only(effects, ef.KeepSnapshot) == [], "its stream may come back"
        for _ in range(60):
            effects += s.advance(0.1)
            s.heard("a", "c")
    else:
        effects = s.up("b")
    (keep,) = only(effects, ef.KeepSnapshot)
    expected = {
        "leaves": "left",
        "killed": "disconnected",
        "fenced": "a later incarnation joined",
    }
    assert keep.left_out == {"b": expected[how]}
    assert sorted(keep.recorded) == ["a", "c"]
    assert recorded(s, "b", cut, life) == [], "too late"


def test_a_stream_that_comes_back_may_still_return_the_marker():
    s = fleet()
    cut = begin(s)
    s.close("b")
    s.open("b")
    recorded(s, "a", cut)
    recorded(s, "c", cut)
    (keep,) = only(recorded(s, "b", cut), ef.KeepSnapshot)
    assert sorted(keep.recorded) == list(NAMES)


def test_who_joins_after_the_cut_is_not_awaited_and_cannot_get_in():
    s = fleet(num_learners=4, startup_wait_s=0.0)
    cut = begin(s)
    s.up("d")
    recorded(s, "d", cut)
    for name in NAMES:
        effects = recorded(s, name, cut)
    (keep,) = only(effects, ef.KeepSnapshot)
    assert sorted(keep.recorded) == list(NAMES)


def test_a_marker_of_another_cut_or_an_earlier_life_counts_for_nothing():
    s = fleet()
    cut = begin(s)
    recorded(s, "a", cut - 1)
    recorded(s, "a", cut + 1)
    recorded(s, "a", cut, Incarnation(1, 99))
    recorded(s, "nobody", cut, Incarnation(1, 1))
    assert s.core.snapshots.pending is not None
    assert sorted(s.core.snapshots.pending.awaited) == list(NAMES)


def test_a_live_learner_that_never_returns_is_left_out_after_the_setting_then_as_measured():
    s = fleet(snapshot_timeout_s=40.0)
    cut = begin(s)

    def until_kept(limit_s: float) -> tuple[ef.KeepSnapshot, float]:
        began = s.now
        while s.now < began + limit_s:
            kept = only(s.report(*NAMES) + s.advance(0.1), ef.KeepSnapshot)
            if kept:
                return kept[0], s.now - began
        raise AssertionError("never left out")

    recorded(s, "a", cut)
    recorded(s, "b", cut)
    keep, waited_s = until_kept(60.0)
    assert sorted(keep.left_out) == ["c"]
    assert waited_s == pytest.approx(40.0, abs=0.5)
    s.feed(ev.SnapshotKept(global_step=cut))

    cut = begin(s)
    s.report(*NAMES)
    recorded(s, "a", cut)
    recorded(s, "b", cut)
    _, waited_s = until_kept(60.0)
    assert waited_s <= s.settings.heartbeat_timeout_s + 0.5, "learned from the one before"


def test_without_any_part_it_fails_and_says_why():
    s = fleet()
    cut = begin(s)
    effects = s.leave("a") + s.leave("b") + s.leave("c")
    (end,) = only(effects, ef.EndSnapshot)
    assert end.global_step == cut
    assert "no learner is in it" in end.failure
    assert only(effects, ef.KeepSnapshot) == []


def test_what_the_store_cannot_keep_has_failed_and_the_next_request_begins_a_new_one():
    s = fleet()
    cut = begin(s)
    (end,) = only(s.feed(ev.SnapshotFailed(global_step=cut, message="no room")), ef.EndSnapshot)
    assert end.failure == "no room"
    for name in NAMES:
        assert recorded(s, name, cut) == []
    assert begin(s) > cut


def test_it_shows_as_a_wait_with_the_names_of_those_awaited():
    s = fleet()
    cut = begin(s)
    recorded(s, "a", cut)
    (wait,) = [w for w, _ in s.core.waits(s.now) if w.reason == "snapshot"]
    assert wait.subject == f"snapshot {cut}"
    assert wait.detail == "for the parts of b, c"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("want", "commit", "record", "stale", "close", "leave", "up", "kept",
                         "failed", "wait")),
        st.sampled_from(NAMES),
    ),
    max_size=40,
)  # fmt: skip


@hypothesis_settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_happens_every_learner_live_at_the_cut_is_in_it_or_left_out_and_it_ends_once(
    steps,
):
    s = fleet()
    at_cut: dict[int, set[str]] = {}
    ended: list[int] = []

    def note(effects: list[ef.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ef.BeginSnapshot):
                assert len(ended) == len(at_cut), "one at a time"
                at_cut[effect.global_step] = set(effect.awaited)
            elif isinstance(effect, ef.KeepSnapshot):
                named = set(effect.recorded) | set(effect.left_out)
                assert named == at_cut[effect.global_step]
                assert not set(effect.recorded) & set(effect.left_out)
                assert effect.recorded, "never without a learner"
            elif isinstance(effect, ef.EndSnapshot):
                ended.append(effect.global_step)

    for what, name in steps:
        cut = s.core.snapshots.cut
        if what == "want":
            note(s.feed(ev.SnapshotWanted()))
        elif what == "commit":
            alive = [x.learner_id for x in s.core.state.roster.live()]
            note(s.report(*alive) + s.advance(0.1))
        elif what in {"record", "stale"}:
            note(recorded(s, name, cut if what == "record" else cut + 1))
        elif what == "close":
            note(s.close(name))
        elif what == "leave":
            note(s.leave(name))
        elif what == "up":
            note(s.up(name))
        elif what == "wait":
            note(s.advance(1.0))
        elif (pending := s.core.snapshots.pending) is not None:
            if what == "failed":
                note(s.feed(ev.SnapshotFailed(global_step=cut, message="x")))
            elif pending.keeping:
                note(s.feed(ev.SnapshotKept(global_step=cut)))
    for _ in range(400):
        pending = s.core.snapshots.pending
        if pending is None:
            break
        note(s.advance(1.0))
        if pending.keeping:
            note(s.feed(ev.SnapshotKept(global_step=pending.global_step)))
    assert s.core.snapshots.pending is None, "it ends, whatever happens"
    assert sorted(ended) == sorted(at_cut)


@pytest.mark.parametrize(("mode", "is_out"), [("leases", True), ("shards", False)])
def test_who_gave_back_its_data_before_all_were_in_is_left_out(mode, is_out):
    """Somebody else may have got it, and have it in its own part."""
    s = fleet(data_mode=mode)
    cut = begin(s)
    recorded(s, "a", cut)
    s.leave("a")
    effects = recorded(s, "b", cut) + recorded(s, "c", cut)
    (keep,) = only(effects, ef.KeepSnapshot)
    assert ("a" in keep.left_out, "a" in keep.recorded) == (is_out, not is_out)


def test_who_has_nowhere_to_write_its_part_is_left_out_at_once_with_the_reason():
    s = Script(settings()).warm(*NAMES)
    s.auto |= set(ACTIONS)
    s.join("c", records_parts=False)
    s.open("c")
    s.feed(ev.SnapshotWanted())
    effects = commit(s)
    (begun,) = only(effects, ef.BeginSnapshot)
    assert begun.awaited == ("a", "b")
    (keep,) = only(recorded(s, "a", begun.global_step) + recorded(s, "b", begun.global_step),
                   ef.KeepSnapshot)  # fmt: skip
    assert keep.left_out == {"c": "it has no directory for its part"}


def test_a_snapshot_that_nobody_can_be_in_is_over_at_once():
    s = Script(settings(num_learners=1)).warm("a")
    s.auto |= set(ACTIONS)
    s.join("a", records_parts=False)
    s.open("a")
    s.feed(ev.SnapshotWanted())
    (end,) = only(commit(s, "a"), ef.EndSnapshot)
    assert end.failure == "no learner is in it (a: it has no directory for its part)"
