"""Pushes: which are accepted, dropped, refused, and why (design section 4, steps 4 and 5)."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, Script, answers, only, settings

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.lineage import Lineage, Place

FOREIGN = Version(1, 3, b"?" * 32)


@pytest.fixture
def asked() -> Script:
    """Round 7 of fragment 3 has asked a and b; c was not ready."""
    s = Script().warm("a", "b", "c")
    s.report("a", "b")
    s.advance(0.1)
    assert set(s.core.state.rounds[0].pending) == {"a", "b"}
    return s


@pytest.mark.parametrize(
    ("how", "answer"),
    [
        ({}, "a accepted"),
        ({"num_steps": 0}, "a dropped NOT_READY"),
        ({"num_steps": -1}, "a refused BAD_COUNTERS"),
        ({"num_steps": 100}, "a refused BAD_COUNTERS"),
        ({"num_steps": 2**60, "local_step": 2**61}, "a refused BAD_COUNTERS"),
        ({"tokens": 0}, "a dropped NOT_READY"),
        ({"tokens": -5}, "a refused BAD_COUNTERS"),
        ({"tokens": 2**53 + 1}, "a refused BAD_COUNTERS"),
        ({"term": 0}, "a refused STALE_TERM"),
        ({"term": 2}, "a refused STALE_TERM"),
        ({"life": Incarnation(1, 7)}, "a refused UNKNOWN_LEARNER"),
        ({"life": Incarnation(0, 1)}, "a refused FENCED"),
        ({"t": 8}, "a refused NOT_ASKED"),
        ({"t": 0}, "a refused NOT_ASKED"),
        ({"t": 6}, "a accepted DUPLICATE"),
        ({"fragment": 0, "base": FOREIGN}, "a refused UNKNOWN_FRAGMENT"),
        ({"fragment": 4, "base": FOREIGN}, "a refused UNKNOWN_FRAGMENT"),
        ({"fragment": -1, "base": FOREIGN}, "a refused UNKNOWN_FRAGMENT"),
        ({"base": FOREIGN}, "a dropped BASE_MISMATCH"),
        ({"base": Version(9, 99, b"?" * 32)}, "a dropped BASE_MISMATCH"),
        ({"base": Version(1, 1, b"?" * 32)}, "a dropped STALE_BASE"),
        ({"base": 0}, "a refused ALREADY_MERGED"),
    ],
)
def test_every_push_gets_the_answer_that_its_header_deserves(asked, how, answer):
    assert answers(asked.push("a", **how)) == [answer]


def test_who_was_not_asked_is_too_late_and_who_never_joined_is_unknown(asked):
    assert answers(asked.push("c", t=7)) == ["c dropped TOO_LATE"]
    assert answers(asked.push("stranger", t=7)) == ["stranger refused UNKNOWN_LEARNER"]


def test_a_push_that_is_not_accepted_leaves_no_trace_and_names_its_reason_in_the_record(asked):
    asked.push("a", base=FOREIGN)
    assert only(asked.push("b"), ef.MergeRound)
    (persist,) = only(asked.merged(7), ef.PersistRound)
    assert [c.learner_id for c in persist.summary.contributions] == ["b"]
    assert [(d.learner_id, d.reason) for d in persist.summary.dropped] == [("a", "BASE_MISMATCH")]
    assert asked.core.state.roster.find("a").last_reason == "BASE_MISMATCH"


def test_the_weight_is_tokens_squared_over_steps(asked):
    (accept,) = only(asked.push("a", tokens=300, num_steps=3), ef.AcceptPush)
    assert accept.weight == 30000.0
    assert accept.rebase is False


def test_an_older_base_is_rebased_where_its_holder_contributed_nothing_since():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.auto = set(ACTIONS)
    s.mute = {"c"}
    base = s.core.state.lineage.current(3)
    while s.core.state.lineage.current(3) == base:
        s.report("a")
        s.advance(0.1)
    while 3 not in [r.fragment for r in s.core.state.rounds if "c" in r.pending]:
        s.report("a", "c")
        s.advance(0.1)
        for r in list(s.core.state.rounds):
            if "c" in r.pending and r.fragment != 3:
                s.decline("c", r.global_step)
    (accept,) = only(s.push("c", base=base), ef.AcceptPush)
    assert accept.rebase is True


def test_whoever_pushes_twice_on_one_base_is_refused_the_second_time():
    s = Script().warm("a", "b", "c")
    s.auto = {"merge", "persist"}
    base = s.core.state.lineage.current(3)
    s.report("a", "b", "c")
    for name in "abc":
        assert answers(s.push(name)) == [f"{name} accepted"]
    for _ in range(3):
        s.advance(0.1)
        s.report("a", "b", "c")
        for name in "abc":
            s.push(name)
    s.advance(0.1)
    s.report("a", "b", "c")
    assert answers(s.push("a", base=base)) == ["a refused ALREADY_MERGED"]
    (accept,) = only(s.push("b"), ef.AcceptPush)
    assert accept.rebase is False


def test_a_push_of_a_life_that_is_fenced_meanwhile_is_not_accepted():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    s.push_open("a")
    assert "a dropped FENCED" in answers(s.up("a"))
    assert answers(s.stage("a")) == [], "answered when the new life joined"
    assert answers(s.push("a", t=7, life=Incarnation(1, 1))) == ["a dropped FENCED"]
    assert answers(s.push("a", t=6, life=Incarnation(1, 1))) == ["a accepted DUPLICATE"]
    assert answers(s.push("a", t=8, life=Incarnation(1, 1))) == ["a refused FENCED"]


# -- the first answer stands -------------------------------------------------------------------


def test_a_repeated_push_gets_the_first_answer(asked):
    assert answers(asked.push("a")) == ["a accepted"]
    assert answers(asked.push("a", t=7)) == ["a accepted DUPLICATE"]
    assert answers(asked.fail("a", Reason.TRUNCATED, refused=False)) == []
    assert answers(asked.stage("a")) == []
    assert answers(asked.push("b", base=FOREIGN)) == ["b dropped BASE_MISMATCH"]
    first = only(asked.push("b", t=7), ef.AnswerPush)
    assert [e.reason for e in first] == [Reason.BASE_MISMATCH]
    assert len(asked.core.state.rounds[0].accepted) == 1


def test_a_repeated_header_goes_on_with_the_same_push(asked):
    assert only(asked.push_open("a"), ef.StagePush)
    asked.advance(0.05)
    assert only(asked.push_open("a"), ef.StagePush)
    assert answers(asked.stage("a")) == ["a accepted"]


def test_two_different_pushes_under_one_key_are_both_refused(asked):
    asked.push_open("a")
    assert answers(asked.push_open("a", tokens=10**6)) == ["a refused MALFORMED"]
    assert answers(asked.stage("a")) == []
    assert "a" not in asked.core.state.rounds[0].accepted


def test_after_being_asked_again_in_the_same_round_a_new_push_counts():
    s = Script(settings(grace=False)).warm("a", "b", "c")
    s.report("a")
    s.push_open("a")
    assert answers(s.fail("a", Reason.NON_FINITE, refused=True)) == ["a refused NON_FINITE"]
    s.report("a")
    assert answers(s.stage("a")) == [], "the old bytes were thrown away"
    assert answers(s.push("a")) == ["a accepted"]


def test_staged_without_a_header_or_of_another_life_accepts_nothing(asked):
    asked.headers["a"] = asked.header("a")
    assert answers(asked.stage("a")) == []
    old = asked.headers["a"].key
    asked.push_open("a")
    key = ev.PushKey("a", Incarnation(1, 9), old.global_step, old.fragment)
    assert answers(asked.feed(ev.PushStaged(key=key))) == ["a dropped TOO_LATE"]
    assert asked.core.state.rounds[0].accepted == {}


# -- late, failed, declined ---------------------------------------------------------------------


def test_without_a_byte_a_contributor_is_dropped_for_no_progress(asked):
    limit = asked.core.state.rounds[0].pending["a"].limit_s
    assert limit == asked.settings.push_floor_s
    asked.push("b")
    asked.advance(0.5)
    asked.heard("a", "b", "c")
    effects = asked.advance(limit)
    assert "a dropped NO_PROGRESS" in answers(effects)
    assert only(effects, ef.MergeRound)
    assert answers(asked.push("a", t=7)) == ["a dropped NO_PROGRESS"], "late: the first answer"


def test_a_push_that_is_not_complete_in_time_is_too_late_and_gets_more_time_next_time(asked):
    asked.push_open("a")
    asked.progress("a")
    effects = asked.advance(1.0)
    assert "a dropped TOO_LATE" in answers(effects)
    learner = asked.core.state.roster.find("a")
    assert learner.transfer_s == 1.0
    assert asked.core.state.pace.push_limit_s(learner.transfer_s) == 4.0
    assert asked.core.state.pace.push_limit_s(1e9) == asked.settings.push_timeout_s


def test_progress_does_not_extend_the_limit(asked):
    """A hostile learner that trickles bytes holds nobody beyond its limit."""
    asked.push("b")
    asked.push_open("a")
    effects = []
    for i in range(30):
        effects += asked.progress("a", i + 1) if "a" in asked.core.state.rounds[0].pending else []
        effects += asked.advance(0.05)
    assert "a dropped TOO_LATE" in answers(effects)


@pytest.mark.parametrize(("refused", "outcome"), [(True, "refused"), (False, "dropped")])
def test_a_failed_push_is_answered_with_its_reason_and_the_others_go_on(asked, refused, outcome):
    asked.push_open("a")
    assert answers(asked.fail("a", Reason.CORRUPT, refused=refused)) == [f"a {outcome} CORRUPT"]
    assert only(asked.push("b"), ef.MergeRound)
    learner = asked.core.state.roster.find("a")
    assert (learner.num_refused, learner.num_dropped) == ((1, 0) if refused else (0, 1))


def test_a_learner_that_declines_counts_with_weight_0(asked):
    assert answers(asked.decline("a", 7)) == ["a dropped NOT_READY"]
    assert answers(asked.decline("a", 7)) == [], "once is enough"
    assert answers(asked.decline("c", 7)) == [], "nobody asked it"
    assert only(asked.push("b"), ef.MergeRound)


@pytest.mark.parametrize("way", ["close", "leave"])
def test_a_learner_that_goes_is_dropped_from_every_round_at_once(way):
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    s.advance(0.1)
    s.report("a", "b", "c")
    assert [sorted(r.pending) for r in s.core.state.rounds] == [["a", "b", "c"]] * 2
    effects = getattr(s, way)("a")
    assert answers(effects) == ["a dropped LEARNER_GONE"] * 2
    assert [sorted(r.pending) for r in s.core.state.rounds] == [["b", "c"]] * 2


def test_a_silent_learner_is_dropped_when_the_heartbeat_timeout_is_over():
    s = Script(settings(push_floor_s=30.0)).warm("a", "b", "c")
    s.report("a", "b", "c")
    s.push("a")
    s.push("b")
    s.advance(4.0)
    s.heard("a", "b")
    effects = s.advance(1.01)
    assert "c dropped LEARNER_GONE" in answers(effects)
    assert [e.learner_id for e in only(effects, ef.CloseStream)] == ["c"]
    assert only(effects, ef.MergeRound)


def test_bytes_are_a_sign_of_life():
    s = Script(settings(push_floor_s=30.0)).warm("a", "b", "c")
    s.report("a", "b", "c")
    s.push_open("a")
    for i in range(10):
        s.advance(1.0)
        s.progress("a", i)
    assert s.core.state.roster.find("a").live
    assert not s.core.state.roster.find("b").live


def test_acceptance_is_the_instant_of_accumulation_a_later_fencing_does_not_undo_it(asked):
    asked.push("a")
    asked.up("a")
    asked.push("b")
    (persist,) = only(asked.merged(7), ef.PersistRound)
    assert [(c.learner_id, c.incarnation.number) for c in persist.summary.contributions] == [
        ("a", 1), ("b", 1),
    ]  # fmt: skip


def test_a_new_incarnation_is_not_asked_for_a_round_that_has_it_already():
    s = Script(settings(quorum=2, grace=False)).warm("a", "b", "c")
    s.report("a", "b")
    s.push("a")
    s.up("a")
    s.decline("b", 7)
    effects = s.report("a")
    assert not only(effects, ef.SendPull)
    assert {e.learner_id for e in only(s.report("b"), ef.SendPull)} == {"b"}


def test_what_comes_of_a_push_that_nobody_waits_for_changes_nothing(asked):
    asked.headers["c"] = asked.header("c", t=7)
    assert asked.progress("c") == []
    assert answers(asked.fail("c", Reason.TRUNCATED, refused=False)) == ["c dropped TRUNCATED"]
    assert answers(asked.push("c", t=7)) == ["c dropped TRUNCATED"]


def test_the_memory_of_answers_is_bounded(asked):
    for t in range(100, 6000):
        assert answers(asked.push("a", t=t, base=FOREIGN)) == ["a refused NOT_ASKED"]
    assert answers(asked.push("a", t=7)) == ["a accepted"]


# -- lineage -----------------------------------------------------------------------------------


def v(t: int, term: int = 1, mark: str = "") -> Version:
    return Version(term, t, f"{mark or t}".encode().ljust(32, b"."))


@pytest.mark.parametrize(
    ("version", "place"),
    [
        (v(12), Place.CURRENT),
        (v(12, term=7), Place.CURRENT),
        (v(8), Place.RETAINED),
        (v(4), Place.RETAINED),
        (v(0), Place.STALE),
        (v(5), Place.STALE),
        (v(12, mark="x"), Place.FOREIGN),
        (v(8, mark="x"), Place.FOREIGN),
        (v(16), Place.FOREIGN),
        (v(2, term=2), Place.FOREIGN),
        (v(0, mark="12"), Place.STALE),
    ],
)
def test_where_a_version_stands(version, place):
    lineage = Lineage([v(0)], 2)
    for t in (4, 8, 12):
        lineage.advance(0, v(t))
    assert lineage.place(0, version) is place
    assert lineage.current(0) == v(12)


def test_contributions_are_known_since_the_round_they_went_into():
    lineage = Lineage([v(0)], 4)
    lineage.contribute(0, "a", 4)
    assert lineage.contributed_since(0, "a", v(0))
    lineage.advance(0, v(4))
    assert not lineage.contributed_since(0, "a", v(4))
    assert lineage.contributed_since(0, "a", v(0))
    assert not lineage.contributed_since(0, "b", v(0))


def test_an_update_that_changed_nothing_does_not_hide_a_contribution():
    lineage = Lineage([v(0, mark="same")], 4)
    lineage.contribute(0, "a", 4)
    lineage.advance(0, v(4, mark="same"))
    assert lineage.contributed_since(0, "a", v(0, mark="same"))
    assert not lineage.contributed_since(0, "a", v(4, mark="same"))
