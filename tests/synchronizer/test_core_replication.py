"""When a persisted round may be published."""

from __future__ import annotations

from synchronizer_server.core.replication import (
    Effect,
    Hold,
    Release,
    ReplicationCore,
    TellStandby,
    WriteInSync,
)

ACK_S = 4.0
ME, S = "me", "standby"


def make(mode: str = "one", *, expects_standby: bool = True, position: int = 10) -> ReplicationCore:
    return ReplicationCore(
        mode=mode, store_id=ME, expects_standby=expects_standby, ack_timeout_s=ACK_S,
        position=position, published=position,
    )  # fmt: skip


def writes(effects: list[Effect]) -> list[set[str]]:
    return [set(e.standby_ids) for e in effects if isinstance(e, WriteInSync)]


def released(effects: list[Effect]) -> list[Release]:
    return [e for e in effects if isinstance(e, Release)]


def alone(mode: str = "one") -> ReplicationCore:
    """A leader whose keeper has confirmed that nobody else is in sync."""
    core = make(mode)
    assert writes(core.begin(lease_held=True, now=0.0)) == [{ME}]
    core.written({ME}, True, lease_held=True, now=0.0)
    return core


def backed(mode: str = "one") -> ReplicationCore:
    """A leader with a standby in sync."""
    core = alone(mode)
    core.connected(S, lease_held=True, now=0.0)
    assert writes(core.acked(S, 10, lease_held=True, now=0.0)) == [{ME, S}]
    effects = core.written({ME, S}, True, lease_held=True, now=0.0)
    assert TellStandby(S, True) in effects
    return core


def test_a_standby_enters_once_it_has_everything_and_counts_from_before_the_keeper_is_told():
    core = alone()
    assert writes(core.connected(S, lease_held=True, now=0.0)) == []
    assert core.may_be_in_sync == set()
    assert writes(core.acked(S, 9, lease_held=True, now=0.0)) == []
    assert writes(core.acked(S, 10, lease_held=True, now=0.0)) == [{ME, S}]
    assert core.may_be_in_sync == {S}, "the keeper may have it before it answers"
    assert released(core.persisted(11, lease_held=True, now=0.0)) == []
    core.written({ME, S}, None, lease_held=True, now=0.0)
    assert core.may_be_in_sync == {S}, "a lost answer proves nothing"
    (release,) = released(core.acked(S, 11, lease_held=True, now=0.0))
    assert release == Release(11, True, True)


def test_nothing_is_published_before_every_store_that_may_take_over_has_it():
    core = backed()
    effects = core.persisted(11, lease_held=True, now=1.0)
    assert released(effects) == []
    assert [e.reason for e in effects if isinstance(e, Hold)] == ["replica"]
    effects = core.acked(S, 11, lease_held=True, now=1.1)
    assert released(effects) == [Release(11, True, True)]
    assert Hold("", "") in effects
    assert core.published == 11


def test_a_standby_that_is_lost_is_taken_out_before_the_round_goes_on():
    core = backed()
    core.persisted(11, lease_held=True, now=1.0)
    assert writes(core.lost(S, lease_held=True, now=1.0)) == [{ME}]
    assert core.may_be_in_sync == {S}
    (release,) = released(core.written({ME}, True, lease_held=True, now=1.1))
    assert release == Release(11, True, False)


def test_a_standby_that_is_silent_for_too_long_is_taken_out():
    core = backed()
    core.persisted(11, lease_held=True, now=1.0)
    assert writes(core.advance(lease_held=True, now=1.0 + ACK_S - 0.01)) == []
    assert core.wake_at(1.0) == 1.0 + ACK_S
    assert writes(core.advance(lease_held=True, now=1.0 + ACK_S)) == [{ME}]


def test_one_pauses_where_neither_standby_nor_keeper_can_be_told_and_says_so():
    core = backed("one")
    core.persisted(11, lease_held=True, now=1.0)
    core.lost(S, lease_held=False, now=1.0)
    for at in range(2, 60):
        assert released(core.written({ME}, None, lease_held=False, now=float(at))) == []
        core.advance(lease_held=False, now=at + 0.99)
    assert core.num_unsafe == 0


def test_one_or_degrade_goes_on_unsafely_after_the_time_of_an_acknowledgement():
    core = backed("one-or-degrade")
    core.persisted(11, lease_held=True, now=1.0)
    core.lost(S, lease_held=False, now=1.0)
    core.written({ME}, None, lease_held=False, now=1.2)
    assert released(core.advance(lease_held=False, now=1.0 + ACK_S - 0.01)) == []
    (release,) = released(core.advance(lease_held=False, now=1.0 + ACK_S))
    assert release == Release(11, False, False)
    assert core.num_unsafe == 1


def test_the_acknowledgement_of_the_standby_is_enough_without_the_lease():
    core = backed()
    core.persisted(11, lease_held=False, now=1.0)
    assert released(core.acked(S, 11, lease_held=False, now=1.0)) == [Release(11, True, True)]


def test_without_standby_and_without_lease_it_pauses_until_the_lease_is_back():
    core = alone()
    effects = core.persisted(11, lease_held=False, now=1.0)
    assert [e.reason for e in effects if isinstance(e, Hold)] == ["lease"]
    assert released(core.advance(lease_held=True, now=9.0)) == [Release(11, True, False)]


def test_a_run_without_standbys_never_waits():
    core = make(expects_standby=False)
    core.begin(lease_held=False, now=0.0)
    assert core.begun
    assert released(core.persisted(11, lease_held=False, now=0.0)) == [Release(11, True, False)]


def test_off_publishes_at_once_and_counts_what_a_take_over_would_lose():
    core = alone("off")
    core.connected(S, lease_held=True, now=0.0)
    core.acked(S, 10, lease_held=True, now=0.0)
    core.written({ME, S}, True, lease_held=True, now=0.0)
    assert released(core.persisted(11, lease_held=True, now=0.0)) == [Release(11, False, False)]
    assert core.lag == 1
    core.acked(S, 11, lease_held=True, now=0.0)
    assert core.lag == 0


def test_what_was_read_before_it_was_written_never_makes_a_store_forgotten():
    core = backed()
    core.keeper_said({ME})
    assert core.may_be_in_sync == {S}
    assert writes(core.advance(lease_held=True, now=1.0)) == [{ME, S}]


def test_an_emptied_keeper_is_told_again():
    core = backed()
    core.keeper_said(None)
    assert writes(core.advance(lease_held=True, now=1.0)) == [{ME, S}]


def test_numbers_of_writes_go_up():
    core = backed()
    first = core._revision
    core.keeper_said(None)
    (write,) = [e for e in core.advance(lease_held=True, now=1.0) if isinstance(e, WriteInSync)]
    assert write.revision > first


def test_an_acknowledgement_of_what_is_not_persisted_here_is_ignored():
    core = alone()
    core.connected(S, lease_held=True, now=0.0)
    core.acked(S, 99, lease_held=True, now=0.0)
    assert core.standbys[S].acked == -1


def test_a_standby_that_comes_back_must_catch_up_first():
    core = backed()
    core.lost(S, lease_held=True, now=1.0)
    core.written({ME}, True, lease_held=True, now=1.0)
    core.persisted(11, lease_held=True, now=1.0)
    effects = core.connected(S, lease_held=True, now=2.0)
    assert writes(effects) == []
    assert TellStandby(S, False) in effects
    assert writes(core.acked(S, 11, lease_held=True, now=2.5)) == [{ME, S}]


def test_standbys_that_come_and_never_return_are_forgotten():
    """Ids may be new at every connection; who may still take over is kept, connected or not."""
    core = backed()
    core.lost(S, lease_held=True, now=0.0)
    for i in range(1000):
        core.connected(f"stranger-{i}", lease_held=True, now=0.0)
        core.lost(f"stranger-{i}", lease_held=True, now=0.0)
    assert set(core.standbys) == {S, "stranger-999"}
    assert len(core.told) <= len(core.standbys)
    assert core.may_be_in_sync == {S}, "no keeper has confirmed that it is out"


def test_the_keeper_is_told_nothing_before_the_store_has_begun_the_term():
    """Whoever was in sync before may lead where our store cannot begin."""
    core = make()
    core.keeper_said({ME, S})
    assert core.advance(lease_held=True, now=0.0) == []
    assert core.may_be_in_sync == {S}, "the keeper names it still"
    assert not core.begun


def test_a_term_is_served_once_the_keeper_has_confirmed_a_list_of_it():
    core = make()
    core.keeper_said({ME, S})
    (write,) = core.begin(lease_held=True, now=0.0)
    assert write == WriteInSync(frozenset({ME}), 1)
    assert core.is_writing
    for answer, at in ((None, 1.0), (False, 3.0)):
        core.written({ME}, answer, lease_held=True, now=at)
        assert not core.begun, "an answer that was lost, and a refusal, prove nothing"
        assert core.may_be_in_sync == {S}
        assert core.wake_at(at) == at + ACK_S / 4
        assert writes(core.advance(lease_held=True, now=at + ACK_S / 4)) == [{ME}]
    core.written({ME}, True, lease_held=False, now=100.0)
    assert core.begun, "with the lease or without: nobody else may take over"
    assert core.may_be_in_sync == set()
    core.keeper_said(None)
    core.advance(lease_held=True, now=101.0)
    assert core.begun, "what is seen already stays so"


def test_off_begins_at_once_and_one_or_degrade_after_the_time_of_an_acknowledgement():
    core = make("off")
    core.begin(lease_held=False, now=0.0)
    assert core.begun
    core = make("one-or-degrade")
    core.begin(lease_held=True, now=1.0)
    core.written({ME}, None, lease_held=False, now=1.0 + 0.9 * ACK_S)
    assert not core.begun
    assert core.wake_at(1.0 + 0.9 * ACK_S) == 1.0 + ACK_S
    core.advance(lease_held=False, now=1.0 + ACK_S)
    assert core.begun
