"""Every wait has a reason, with names and numbers, told once per change."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, Script, only, settings

from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev


def told(s: Script) -> list[tuple[str, str, str]]:
    return [(e.subject, e.reason, e.detail) for _, e in s.log if isinstance(e, ef.WaitChanged)]


def idle(s: Script, *live: str, seconds: float) -> None:
    for _ in range(int(seconds * 2)):
        s.heard(*live)
        s.advance(0.5)


def test_a_healthy_fleet_tells_nothing():
    s = Script(settings(sync_interval=80))
    s.up("a", "b", "c")
    s.seed("a")
    s.auto = set(ACTIONS)
    for _ in range(200):
        s.report("a", "b", "c")
        s.advance(0.1)
    assert s.core.state.committed > 5
    assert told(s) == []


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda s: None, "seed: learners: no learner is there to push the first parameters"),
        (lambda s: s.up("a"), "seed: seeder: a has pushed 0 of 4 fragments"),
        (lambda s: [s.up("a"), s.stage_seed("a", 0, 2)], "seed: seeder: a has pushed 2 of 4"),
        (lambda s: [s.up("a"), s.stage_seed("a")], "seed: persist: the first parameters are being"),
        (lambda s: [s.up("a"), s.seed("a")], "round 1: quorum: 0 of 1 learners have stepped; no"),
        (
            lambda s: [s.up("a", "b"), s.seed("a"), s.report("a")],
            "round 1: startup: for b, 1 planned learners that are not live, at most 60.00 s",
        ),
        (lambda s: [s.warm("a", "b", "c"), s.report("a")], "round 7: grace: for b, c, at most 0."),
        (
            lambda s: [s.warm("a", "b", "c"), s.report("a", "b", "c"), s.push("b")],
            "round 7: pulling: for a, c",
        ),
    ],
)
def test_what_is_waited_for_is_said_with_names_and_numbers(prepare, expected):
    s = Script()
    prepare(s)
    assert expected in s.details()


def test_merging_and_persisting_are_waits_too():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    for name in "abc":
        s.push(name)
    assert "round 7: merging: the outer step is being computed" in s.details()
    s.merged(7)
    assert "round 7: persist: the record is being persisted" in s.details()


def test_with_k_1_a_dead_learner_is_named_by_no_wait_once_it_is_noticed():
    s = Script(settings(heartbeat_timeout_s=2.0)).warm("a", "b", "c")
    s.auto, s.mute = set(ACTIONS), {"c"}
    for _ in range(100):
        s.report("a", "b")
        s.advance(0.1)
        if not s.core.state.roster.find("c").live:
            assert "c" not in {w for x in s.details().split(": ")[2:] for w in x.split()}
            assert "c (gone)" not in s.details()
    assert not s.core.state.roster.find("c").live
    assert not [detail for _, _, detail in told(s) if " c" in detail]


def test_with_k_above_the_live_ones_the_wait_says_who_is_missing_once():
    s = Script(settings(quorum=3, grace=False, heartbeat_timeout_s=2.0)).warm("a", "b", "c")
    s.close("c")
    for _ in range(100):
        s.report("a", "b")
        s.advance(0.1)
    expected = "2 of 3 learners have stepped; not live: c (disconnected)"
    assert ("round 7", "quorum", expected) in told(s)
    assert len([x for x in told(s) if x[0] == "round 7"]) == 1, "once per change"
    s.auto = set(ACTIONS)
    s.up("c")
    s.report("c")
    assert told(s)[-1] == ("round 7", "", "goes on")
    assert s.core.state.committed == 7


def test_a_change_of_what_is_missing_is_told():
    s = Script(settings(quorum=3, grace=False)).warm("a", "b", "c")
    s.report("a")
    idle(s, "a", "b", "c", seconds=3)
    s.report("b")
    s.close("c")
    idle(s, "a", "b", seconds=3)
    details = [detail for subject, _, detail in told(s) if subject == "round 7"]
    assert details == [
        "1 of 3 learners have stepped; no step yet: b, c",
        "2 of 3 learners have stepped; no step yet: c",
        "2 of 3 learners have stepped; not live: c (disconnected)",
    ]


def test_who_left_is_named_where_the_quorum_misses_it():
    s = Script(settings(quorum=3, grace=False)).warm("a", "b", "c")
    s.leave("c")
    assert "not live: c (left)" in s.details()


def test_a_wait_becomes_news_without_any_event():
    s = Script(settings(heartbeat_timeout_s=1000.0)).warm("a", "b", "c")
    s.report("a", "b", "c")
    for name in "abc":
        s.push(name)
    assert told(s) == []
    s.advance(30.0)
    assert ("round 7", "merging", "the outer step is being computed") in told(s)


def test_another_reason_for_the_same_round_is_told_when_it_lasts():
    s = Script(settings(heartbeat_timeout_s=1000.0)).warm("a", "b", "c")
    s.advance(30.0)
    s.report("a", "b", "c")
    for name in "abc":
        s.push(name)
    s.advance(30.0)
    assert [reason for subject, reason, _ in told(s) if subject == "round 7"] == [
        "quorum", "merging",
    ]  # fmt: skip


def test_what_ends_is_told_only_where_its_beginning_was():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    assert only([e for _, e in s.log], ef.WaitChanged) == []


def test_a_wait_knows_for_how_long():
    s = Script().warm("a", "b", "c")
    idle(s, "a", "b", "c", seconds=4)
    ((wait, seconds),) = s.core.waits(s.now)
    assert wait.reason == "quorum"
    assert seconds == pytest.approx(4.0, abs=0.2)


def test_a_complete_run_waits_for_nothing_and_says_so():
    s = Script(settings(heartbeat_timeout_s=1000.0)).warm("a", "b", "c")
    s.advance(30.0)
    assert told(s)[-1][1] == "quorum"
    s.feed(ev.DrainStarted())
    assert told(s)[-1] == ("round 7", "", "goes on")
    assert s.core.waits(s.now) == []
