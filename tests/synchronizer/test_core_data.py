"""Data leases in the core: whose are kept, whose are taken back, and when a contribution counts."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, Script, answers, only, pulls, settings

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core import leases
from synchronizer_server.core.data_records import DataLease, DataRange
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.core.state import Restored

TIMEOUT_S = 5.0


def leased(**changes: object) -> Script:
    return Script(
        settings(
            data_mode="leases", data_length=100, data_lease_length=10,
            heartbeat_timeout_s=TIMEOUT_S, **changes,
        )
    )  # fmt: skip


def lease(s: Script, name: str, request: str = "1") -> DataLease:
    effects = s.feed(
        ev.DataRequested(learner_id=name, incarnation=s.lives[name], request_id=request)
    )
    (grant,) = only(effects, ef.GrantData)
    assert grant.lease is not None
    return grant.lease


def trained(s: Script, name: str, held: DataLease, position: int) -> list[ef.Effect]:
    s.steps[name] = s.steps.get(name, 0) + 1
    return s.feed(
        ev.StepReported(
            learner_id=name, incarnation=s.lives[name], local_step=s.steps[name], num_steps=1,
            num_tokens=64, data_lease_id=held.lease_id, data_position=position,
        )
    )  # fmt: skip


def test_who_is_back_in_time_keeps_its_leases():
    s = leased()
    s.up("a", "b")
    lease(s, "a")
    s.close("a")
    s.advance(TIMEOUT_S - 0.1)
    s.open("a")
    s.heard("b")
    s.advance(1.0)
    assert "a" in s.core.state.data.holders()
    assert s.core.state.data.record.num_returned == 0


@pytest.mark.parametrize("away", ["close", "stay"])
def test_who_is_silent_for_too_long_gives_back_its_leases_and_nothing_of_it_is_merged(away):
    s = leased()
    s.up("a", "b")
    s.seed("b")
    held = lease(s, "a")
    if away == "close":
        s.close("a")
    for _ in range(6):
        s.advance(1.0)
        s.heard("b")
    assert s.core.state.roster.find("a").state is LearnerState.GONE
    assert s.core.state.data.record.returned == (held.where,)
    s.open("a")
    assert not s.core.state.roster.find("a").live, "it has to join again"
    assert answers(s.push_open("a", t=1)) == ["a refused LEASE_LOST"]
    assert lease(s, "b").where == held.where
    s.up("a")
    assert lease(s, "a").where == DataRange(0, 10, 20)


def test_a_learner_without_leases_that_was_silent_comes_back_as_before():
    s = leased()
    s.up("a", "b")
    s.seed("a")
    s.advance(TIMEOUT_S + 1.0)
    s.open("a")
    assert s.core.state.roster.find("a").live


def test_a_goodbye_and_a_later_incarnation_give_back_at_once():
    s = leased()
    s.up("a", "b")
    first, second = lease(s, "a"), lease(s, "b")
    s.leave("a")
    s.join("b")
    assert s.core.state.data.record.num_returned == 20
    assert s.core.state.data.record.returned == (
        DataRange(0, first.where.start, second.where.stop),
    )


def test_a_contribution_counts_once_its_round_is_persisted_and_not_before():
    s = leased(num_learners=1, num_fragments=3)
    s.up("a")
    s.seed("a")
    held = lease(s, "a")
    s.auto = set(ACTIONS) - {"persist"}
    seen = []
    for position in (2, 4, 6, 8, 10):
        effects = trained(s, "a", held, position)
        effects += s.advance(0.1)
        while persisting := only(effects, ef.PersistRound):
            (summary,) = (x.summary for x in persisting)
            seen.append((summary.global_step, summary.merged_data))
            assert summary.data_totals is not None
            assert summary.data_totals.merged == s.core.state.data.record.num_merged
            effects = s.persisted(summary.global_step)
    assert [t for t, _ in seen][:4] == [1, 2, 3, 4]
    assert seen[0][1] == seen[1][1] == (), "not in every fragment yet"
    assert seen[2][1] == (DataRange(0, 0, 2),)
    assert seen[3][1] == (DataRange(0, 2, 4),)


def test_a_round_that_is_persisted_again_says_again_what_it_merges():
    s = leased(num_learners=1, num_fragments=3, overlap=1)
    s.up("a")
    s.seed("a")
    held = lease(s, "a")
    s.auto = set(ACTIONS) - {"persist"}
    effects: list[ef.Effect] = []
    for position in (1, 2, 3):
        effects = trained(s, "a", held, position) + s.advance(0.2)
        (first,) = only(effects, ef.PersistRound)
        if position < 3:
            s.persisted(first.summary.global_step)
    s.persist_failed(3, retry_after_s=1.0)
    (again,) = only(s.advance(1.1), ef.PersistRound)
    assert again.summary.merged_data == first.summary.merged_data == (DataRange(0, 0, 1),)


def test_after_a_restart_leases_stay_until_they_expire():
    s = leased()
    s.up("a", "b")
    s.seed("b")
    held = lease(s, "a")
    book = s.core.state.data
    restored = Restored(
        global_step=0, versions=s.seed_versions(), incarnations=dict(s.lives),
        shards={"a": 0, "b": 1}, local_steps={}, tokens_merged={}, tokens_processed={"a": 7},
        quorum=1, data=book.record, leases=book.leases,
    )  # fmt: skip
    again = Script(s.settings, restored=restored, term=2)
    assert again.core.state.roster.find("a").num_tokens == 7
    previous, claims = Incarnation(1, 1), (held,)
    assert again.core.lease_refusal("a", previous, claims, 1.0) is None
    again.advance(TIMEOUT_S - 0.1)
    assert "a" in again.core.state.data.holders()
    again.advance(0.2)
    assert "a" not in again.core.state.data.holders()
    assert "silent" in (again.core.lease_refusal("a", previous, claims, again.now) or "")


def test_more_learners_than_planned_take_part_in_rounds():
    s = leased(num_learners=2)
    s.up("a", "b", "c", "d")
    s.seed("a")
    assert sorted(x.shard for x in s.core.state.roster) == [0, 1, 2, 3]
    asked = {name for name, _ in pulls(s.report("a", "b", "c", "d"))}
    assert asked == {"a", "b", "c", "d"}


def test_with_fixed_shards_there_is_no_book_and_nobody_more():
    s = Script(settings(num_learners=1))
    s.up("a")
    assert s.core.state.data is None
    assert s.core.shard_for("b") is None
    assert s.core.lease_refusal("a", None, (), 0.0) is None


def restored(s: Script, **changes: object) -> Restored:
    """What a record says in which ``a`` has a lease and ``b`` none."""
    book = s.core.state.data
    values: dict[str, object] = {
        "global_step": 0, "versions": s.seed_versions(), "incarnations": dict(s.lives),
        "shards": {"a": 0, "b": 1}, "local_steps": {}, "tokens_merged": {}, "quorum": 1,
        "data": book.record, "leases": book.leases,
    }  # fmt: skip
    return Restored(**(values | changes))  # type: ignore[arg-type]


def with_a_lease() -> Script:
    s = leased()
    s.up("a", "b")
    s.seed("b")
    lease(s, "a")
    return s


def held_for(s: Script) -> list[str]:
    return [wait.detail for wait, _ in s.core.waits(s.now) if wait.reason == "claims"]


def test_data_is_leased_once_everybody_is_back_that_the_membership_knew():
    """The latest heartbeat is as old as the leader's own end; who was silent then is gone."""
    s = with_a_lease()
    ages = {"a": 7.0, "b": 7.5, "late": 7.2, "dead": 7.0 + TIMEOUT_S}
    again = Script(s.settings, restored=restored(s, ages_s=ages), term=2)
    assert held_for(again) == ["until a, b, late have claimed the leases of before the start"]
    again.up("a", "b")
    assert held_for(again) == ["until late has claimed the leases of before the start"]
    again.up("late")
    assert held_for(again) == []
    assert again.core.state.claims_until <= again.now
    assert lease(again, "b").where == DataRange(0, 0, 10), "a claims nothing: it is a new process"


def test_a_holder_that_the_membership_does_not_know_is_waited_for():
    s = with_a_lease()
    again = Script(s.settings, restored=restored(s, ages_s={"b": 1.0}), term=2)
    again.up("b")
    assert held_for(again) == ["until a has claimed the leases of before the start"]
    again.advance(TIMEOUT_S)
    assert held_for(again) == [], "at most so long"
    assert "a" not in again.core.state.data.holders()


def test_without_a_membership_nobody_knows_who_may_have_data_and_it_is_waited_for():
    s = with_a_lease()
    again = Script(s.settings, restored=restored(s), term=2)
    again.up("a", "b")
    assert len(held_for(again)) == 1
    again.advance(TIMEOUT_S)
    assert held_for(again) == []


@pytest.mark.parametrize("takes_over_again", [False, True], ids=["later", "a term later"])
def test_who_was_away_while_others_had_what_it_got_after_the_last_record_has_lost_it(
    takes_over_again,
):
    """Nobody but the leader that died knew of its lease: it is merged by now, by another one."""
    s = leased()
    s.up("a", "b")
    s.seed("b")
    before = restored(s, ages_s={"a": 1.0, "b": 1.0})
    claims = (lease(s, "a"),)
    again = Script(s.settings, restored=before, term=2)
    again.up("b")
    for _ in range(2):
        again.advance(TIMEOUT_S / 2)
        again.heard("b")
    held = lease(again, "b")
    assert held.where == claims[0].where
    again.auto = set(ACTIONS)
    for _ in range(20):
        trained(again, "b", held, held.where.stop)
        again.advance(0.2)
    assert again.core.state.data.record.num_merged == 10
    lives = {"a": s.lives["a"], "b": again.lives["b"]}
    if takes_over_again:
        versions = tuple(again.core.state.lineage.current(x) for x in range(again.P))
        later = restored(again, incarnations=lives, versions=versions, ages_s={"b": 1.0})
        again = Script(s.settings, restored=later, term=3)
    why = again.core.lease_refusal("a", s.lives["a"], claims, again.now)
    assert "handed out again" in (why or "")
    own = again.core.lease_refusal("b", lives["b"], (held,), again.now)
    assert own is None, "it merged it itself, and need not know"


@pytest.mark.parametrize("just", [True, False], ids=["just", "since"])
def test_who_is_in_a_snapshot_has_as_long_as_at_the_start_of_a_run_and_no_longer(just):
    s = with_a_lease()
    book = s.core.state.data
    book.went_back("1.7", 2, {"a": s.lives["a"], "b": s.lives["b"]})
    ages = {"b": 1.0}
    again = Script(s.settings, restored=restored(s, has_just_gone_back=just, ages_s=ages), term=3)
    again.advance(TIMEOUT_S + 1.0)
    assert held_for(again) == ["until a, b have claimed the leases of before the start"]
    again.up("b")
    assert "a" in again.core.state.data.holders()
    again.advance(s.settings.startup_wait_s)
    assert held_for(again) == []
    assert again.core.state.data.holders() == []
    assert again.core.state.data.returning.awaited == ()


def test_who_holds_as_much_as_can_be_gives_it_up_and_goes_on(monkeypatch):
    monkeypatch.setattr(leases, "MAX_OPEN_LEASES", 3)
    s = leased()
    s.up("a", "b")
    s.seed("b")
    for request in ("1", "2", "3"):
        held = lease(s, "a", request)
        trained(s, "a", held, held.where.stop)
    effects = s.feed(ev.DataRequested(learner_id="a", incarnation=s.lives["a"], request_id="4"))
    (grant,) = only(effects, ef.GrantData)
    assert grant.lease is None
    learner = s.core.state.roster.find("a")
    assert learner.lease_lost
    assert not learner.live
    assert s.core.state.data.record.num_returned > 0
    assert answers(s.push_open("a", t=1)) == ["a refused LEASE_LOST"]
    s.up("a")
    assert lease(s, "a", "5").where.num_samples == 10
