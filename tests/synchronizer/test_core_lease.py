"""Who leads: when a process bids, when it leads, when it steps down."""

from __future__ import annotations

import pytest

from synchronizer_server.core.lease import (
    AskPeers,
    Bid,
    Forget,
    Holder,
    Lead,
    LeaseCore,
    Peer,
    ReadLease,
    RenewLease,
    Role,
    Seen,
    StepDown,
)

TIMEOUT_S = 4.0
ME, OTHER = "me", "other"


def make(*, now: float = 0.0, num_peers: int = 1) -> LeaseCore:
    return LeaseCore(
        store_id="mine", leader_id=ME, timeout_s=TIMEOUT_S, num_peers=num_peers, now=now
    )


def seen(
    holder: Holder | None = None, *, term: int = 0, in_sync: set[str] | None = None, at: float = 0.0
) -> Seen:
    ids = None if in_sync is None else frozenset(in_sync)
    return Seen(holder=holder, term=term, in_sync=ids, asked_at=at)


def leading(term: int = 3, at: float = 0.0) -> LeaseCore:
    core = make(now=at)
    core.tick(at)
    core.seen(seen(term=term - 1, in_sync={"mine"}, at=at), at)
    assert core.seen(seen(Holder(term=term, leader_id=ME), term=term, at=at), at) == [Lead(term)]
    return core


def test_a_store_in_sync_bids_at_once_above_every_term_it_knows():
    core = make()
    assert core.tick(0.0) == [ReadLease()]
    core.standing.position = (7, 120)
    core.hear(Holder(term=9, leader_id=OTHER))
    assert core.seen(seen(term=4, in_sync={"mine", "x"}), 0.0) == [Bid(10)]


def test_a_term_that_began_in_our_empty_store_is_never_bid_for_again():
    core = make(num_peers=0)
    core.standing.begun_term = 3
    core.seen(seen(), 0.0)
    core.peers([], 0.0)
    assert core.seen(seen(), TIMEOUT_S) == [Bid(4)]
    assert core.seen(seen(Holder(term=3, leader_id=ME), term=3), TIMEOUT_S) == []


def test_a_store_that_misses_rounds_never_bids():
    core = make()
    for at in range(100):
        assert core.seen(seen(term=4, in_sync={"other-store"}), float(at)) == []
    assert "misses published rounds" in core.why_waiting
    assert core.role is Role.FOLLOWING


def test_who_holds_the_lease_is_followed_and_known():
    core = make()
    holder = Holder(term=5, leader_id=OTHER, address="a:1")
    assert core.seen(seen(holder, term=5, in_sync={"mine"}), 0.0) == []
    assert core.leader == holder


def test_a_keeper_that_knows_nothing_is_given_one_whole_time_out():
    core = make(num_peers=0)
    assert core.seen(seen(), 10.0) == [AskPeers()]
    core.peers([], 10.0)
    assert core.seen(seen(), 10.0 + TIMEOUT_S - 0.01) == []
    assert core.seen(seen(), 10.0 + TIMEOUT_S) == [Bid(1)]


def test_a_leader_that_tells_an_emptied_keeper_in_time_stays():
    core = make()
    core.seen(seen(), 0.0)
    core.seen(seen(Holder(term=5, leader_id=OTHER), term=5, in_sync={"mine"}), 1.0)
    assert core.seen(seen(), 2.0) == [AskPeers()], "emptied once more: the wait begins anew"
    core.peers([], 2.0)
    assert core.seen(seen(), 2.0 + TIMEOUT_S - 0.01) == []


def test_on_an_emptied_keeper_the_one_with_more_rounds_goes_first():
    core = make()
    core.standing.position = (2, 10)
    core.seen(seen(), 0.0)
    core.peers([Peer(position=(2, 11))], 0.0)
    assert core.seen(seen(), TIMEOUT_S) == [AskPeers()]
    core.peers([Peer(position=(2, 10))], TIMEOUT_S)
    assert core.seen(seen(), TIMEOUT_S) == [Bid(3)]


@pytest.mark.parametrize("answers", [False, True])
def test_on_an_emptied_keeper_a_store_known_to_lack_rounds_waits_for_every_peer(answers: bool):
    core = make()
    core.standing.in_sync = False
    core.standing.position = (2, 10)
    core.seen(seen(), 0.0)
    core.peers([Peer(position=(2, 9))] if answers else [], 0.0)
    expected = [Bid(3)] if answers else [AskPeers()]
    assert core.seen(seen(), TIMEOUT_S) == expected


def test_no_bid_while_the_leaders_records_still_come():
    core = make()
    core.standing.leader_heard_at = 9.0
    assert core.seen(seen(term=1, in_sync={"mine"}), 10.0) == []
    assert core.seen(seen(term=1, in_sync={"mine"}), 9.0 + TIMEOUT_S) == [Bid(2)]


def test_a_bid_whose_answer_was_lost_is_found_granted_at_the_next_look():
    core = make()
    assert core.seen(seen(term=1, in_sync={"mine"}), 0.0) == [Bid(2)]
    core.unanswered(1.0)
    ours = Holder(term=2, leader_id=ME)
    assert core.seen(seen(ours, term=2, in_sync={"mine"}, at=1.5), 2.0) == [Lead(2)]
    assert core.holds(1.5 + TIMEOUT_S - 0.01)
    assert not core.holds(1.5 + TIMEOUT_S), "it counts from when the keeper was asked"


def test_a_bid_that_was_overtaken_is_not_led():
    core = make()
    core.seen(seen(term=1, in_sync={"mine"}), 0.0)
    core.standing.position = (2, 50)
    ours = Holder(term=2, leader_id=ME)
    assert core.seen(seen(ours, term=2, in_sync={"mine"}), 1.0) == []
    assert core.role is Role.FOLLOWING


def test_a_term_that_was_given_up_is_not_led_again():
    core = leading(3)
    assert core.step_down("the store failed") == [StepDown("the store failed")]
    ours = Holder(term=3, leader_id=ME)
    assert core.seen(seen(ours, term=3, in_sync={"mine"}), 1.0) == []
    assert core.seen(seen(None, term=3, in_sync={"mine"}), 1.0 + TIMEOUT_S) == [Bid(4)]


def test_a_renewal_prolongs_and_silence_of_the_keeper_ends_the_hold_but_not_the_lead():
    core = leading(3)
    ours = Holder(term=3, leader_id=ME)
    assert core.tick(core.wake_at()) == [RenewLease()]
    core.seen(seen(ours, term=3, in_sync={"mine"}, at=2.0), 2.1)
    assert core.holds(2.0 + TIMEOUT_S - 0.01)
    for at in (3.0, 4.0, 5.0, 9.0):
        assert core.unanswered(at) == []
    assert not core.holds(9.0)
    assert core.role is Role.LEADING


@pytest.mark.parametrize(
    "view",
    [
        seen(Holder(term=4, leader_id=OTHER), term=4, in_sync={"other-store"}),
        seen(None, term=4, in_sync={"other-store"}),
        seen(Holder(term=3, leader_id=OTHER), term=3, in_sync=set()),
    ],
)
def test_a_leader_steps_down_where_the_keeper_knows_another(view: Seen):
    core = leading(3)
    (effect,) = core.seen(view, 5.0)
    assert isinstance(effect, StepDown)
    assert core.role is Role.FOLLOWING
    assert not core.holds(0.0)


def test_a_higher_claim_deposes_and_a_lower_one_or_our_own_does_nothing():
    core = leading(3)
    assert core.hear(Holder(term=2, leader_id=OTHER)) == []
    assert core.hear(Holder(term=3, leader_id=ME)) == []
    assert core.role is Role.LEADING
    (effect,) = core.hear(Holder(term=4, leader_id=OTHER))
    assert isinstance(effect, StepDown)


def test_one_question_at_a_time_and_a_lost_one_is_asked_again():
    core = make()
    assert core.tick(0.0) == [ReadLease()]
    assert core.tick(TIMEOUT_S - 0.01) == []
    assert core.tick(TIMEOUT_S) == [ReadLease()]


def test_a_process_that_may_not_lead_waits():
    core = make()
    core.standing.may_lead = False
    assert core.seen(seen(term=1, in_sync={"mine"}), 0.0) == []
    core.standing.may_lead = True
    assert core.seen(seen(term=1, in_sync={"mine"}), 1.0) == [Bid(2)]


def test_a_standby_looks_again_when_the_lease_runs_out():
    core = make()
    holder = Holder(term=5, leader_id=OTHER)
    view = Seen(holder=holder, term=5, in_sync=frozenset({"mine"}), asked_at=0.0, remaining_s=0.3)
    core.seen(view, 10.0)
    assert 10.3 < core.wake_at() < 10.4
    core.seen(seen(holder, term=5, in_sync={"mine"}), 11.0)
    assert core.wake_at() == 11.0 + TIMEOUT_S / 4


def test_two_leaders_of_one_term_end_in_a_higher_one():
    """A keeper that was emptied may grant a term twice; nobody could tell the two apart."""
    core = leading(term=3)
    effects = core.hear(Holder(term=3, leader_id=OTHER))
    assert [type(effect) for effect in effects] == [StepDown]
    assert core.seen(seen(term=3, in_sync={"mine"}, at=1.0), 1.0) == [Bid(4)]


def test_who_was_granted_a_term_that_it_gave_up_follows_whoever_leads_it_now():
    core = leading(term=3)
    core.step_down("the store cannot serve")
    other = Holder(term=3, leader_id=OTHER, address="b:1")
    core.seen(seen(other, term=3, in_sync={"other-store"}, at=1.0), 1.0)
    assert core.leader == other


def test_a_leader_of_an_earlier_term_that_an_emptied_keeper_believes_is_told_not_ignored():
    """Whoever was deposed by it asks it, not itself; it then hears of the later term."""
    core = leading(term=3)
    earlier = Holder(term=2, leader_id=OTHER, address="b:1")
    (effect,) = core.seen(seen(earlier, term=2, in_sync={"other-store"}), 5.0)
    assert isinstance(effect, StepDown)
    core.seen(seen(earlier, term=2, in_sync={"other-store"}), 6.0)
    assert core.leader == earlier
    assert core.seen(seen(None, term=2, in_sync={"mine"}), 9.0) == [Bid(4)], "no term is led twice"


def test_who_cannot_begin_lets_others_in_sync_go_first_for_one_time_out():
    core = leading(3)
    core.stand_back("DISK_FULL: no room", 10.0)
    core.step_down("no room")
    view = seen(term=3, in_sync={"mine", "other-store"})
    assert core.seen(view, 10.0) == []
    assert core.seen(view, 10.0 + TIMEOUT_S - 0.01) == []
    assert "lets another store in sync lead: DISK_FULL" in core.why_waiting
    assert core.wake_at() == 10.0 + TIMEOUT_S
    assert core.seen(view, 10.0 + TIMEOUT_S) == [Bid(4)], "the others do not lead"


@pytest.mark.parametrize(("num_peers", "others"), [(0, {"other-store"}), (1, set())])
def test_who_cannot_begin_bids_again_where_nobody_else_could(num_peers: int, others: set[str]):
    core = make(num_peers=num_peers)
    core.stand_back("no room", 10.0)
    assert core.seen(seen(term=3, in_sync={"mine", *others}), 10.0) == [Bid(4)]


def test_the_keeper_said_at_the_grant_whether_nobody_else_was_in_sync():
    for others in (set(), {"other-store"}):
        core = make()
        ours = Holder(term=3, leader_id=ME)
        core.seen(seen(ours, term=3, in_sync={"mine", *others}), 0.0)
        assert core.is_alone is not bool(others)


def test_a_keeper_that_names_a_store_without_the_run_alone_is_told_again_until_it_forgets():
    """Where the first word was lost nobody could ever lead: the others are not in sync."""
    core = leading(term=3)
    core.standing.may_lead = False
    assert core.step_down("the store lost the run", forget=True) == [
        StepDown("the store lost the run")
    ]
    ours = seen(Holder(term=3, leader_id=ME), term=3, in_sync={"mine"})
    assert core.seen(ours, 1.0) == [Forget(3)]
    assert core.seen(seen(term=3, in_sync={"mine"}), 2.0) == [Forget(3)]
    assert core.seen(seen(term=3, in_sync={"mine", "x"}), 3.0) == [], "another one may lead"
    assert core.seen(seen(term=3, in_sync={"mine"}), 4.0) == [Forget(3)]
    core.forgotten()
    assert core.seen(seen(term=3, in_sync={"mine"}), 5.0) == []


def test_what_a_later_leader_told_the_keeper_is_not_forgotten():
    core = leading(term=3)
    core.step_down("the store lost the run", forget=True)
    assert core.seen(seen(Holder(term=4, leader_id=OTHER), term=4, in_sync={"x"}), 1.0) == []
    core.standing.may_lead = False
    assert core.seen(seen(term=3, in_sync={"mine"}), 2.0) == [], "it is over"


def test_a_lease_that_is_given_back_forgets_nothing():
    core = leading(term=3)
    core.step_down("the process stops")
    core.standing.may_lead = False
    assert core.seen(seen(term=3, in_sync={"mine"}), 1.0) == []
