"""A learner that an operator drains: it is asked until it has left, and every leader knows it."""

from __future__ import annotations

from core_script import Script, only

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import effects as ef
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.state import Restored
from synchronizer_server.ledger import make_record, restored_from
from synchronizer_server.membership.base import Member, Roll


def state_of(s: Script, name: str) -> str:
    learner = s.core.state.roster.find(name)
    assert learner is not None
    return learner.state.value


def drain_asked(effects: list[ef.Effect]) -> list[tuple[str, str]]:
    return [(e.learner_id, e.reason) for e in only(effects, ef.SendDrain)]


def test_a_learner_that_is_asked_to_leave_and_does_is_drained_until_it_joins_again():
    s = Script().warm("a", "b", "c")
    assert drain_asked(s.drain("a")) == [("a", "new disk")]
    assert state_of(s, "a") == "live", "until it has left"
    s.leave("a")
    assert state_of(s, "a") == "drained"
    s.close("a")
    s.advance(100)
    assert state_of(s, "a") == "drained", "its silence is no news"
    assert drain_asked(s.up("a")) == [], "somebody started it again: that is the operators' word"
    s.leave("a")
    assert state_of(s, "a") == "left"


def test_who_dies_before_it_has_left_is_asked_again_in_its_next_life():
    s = Script().warm("a", "b", "c")
    s.drain("a")
    s.close("a")
    assert state_of(s, "a") == "disconnected"
    assert drain_asked(s.open("a")) == [("a", "new disk")], "the same life, a new stream"
    assert drain_asked(s.up("a")) == [("a", "new disk")]
    s.leave("a")
    assert state_of(s, "a") == "drained"


def test_the_next_leader_knows_who_is_drained_and_who_was_asked():
    old = Script().warm("a", "b", "c")
    old.drain("a")
    old.leave("a")
    old.drain("b")
    state = old.core.state
    record = make_record(state, global_step=6, versions=state.lineage.vector(), fingerprint="f")
    here = [Member(learner_id=x, incarnation=old.lives[x], age_s=0.1) for x in "abc"]
    s = Script(restored=restored_with(record, here), term=2)
    assert [state_of(s, x) for x in "abc"] == ["drained", "expected", "expected"]
    assert drain_asked(s.up("b", "c")) == [("b", "new disk")]
    later = [Member(learner_id="a", incarnation=Incarnation(1, 9), age_s=0.1)]
    s = Script(restored=restored_with(record, later), term=2)
    assert state_of(s, "a") == "expected", "the membership knows a later life: it was let in"
    assert drain_asked(s.up("a")) == []


def restored_with(record: RoundRecord, members: list[Member]) -> Restored:
    read = RoundRecord.from_json(record.to_json())
    return restored_from(read, Roll(members=tuple(members), quorum=None, seeded=True), quorum=1)
