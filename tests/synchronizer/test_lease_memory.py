"""The keeper in memory for simulation: its clock, one memory for all, and users cut off from it."""

from __future__ import annotations

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import (
    Link,
    MemoryLease,
    MemoryLeaseServer,
    MemoryMembership,
)
from tests.synchronizer.keepers import MemoryKeeper, claim_of, prolong, take

pytestmark = pytest.mark.asyncio
KEEPER = MemoryKeeper()


async def test_a_lease_lasts_as_long_as_the_clock_says() -> None:
    now = 100.0
    lease = MemoryLease(MemoryLeaseServer(clock=lambda: now))
    claim = claim_of(KEEPER, 1)
    assert (await take(lease, claim, timeout_s=3.0)).remaining_s == 3.0
    now = 102.5
    assert (await lease.read()).remaining_s == 0.5
    assert (await prolong(lease, claim, timeout_s=3.0)).remaining_s == 3.0
    now = 105.5
    view = await lease.read()
    assert (view.holder, view.remaining_s) == (None, 0.0)


async def test_who_is_cut_off_changes_nothing_and_others_go_on() -> None:
    server = MemoryLeaseServer()
    cut, other = MemoryLease(server), MemoryLease(server)
    cut.link = Link.CUT
    for call in (
        cut.read,
        lambda: take(cut, claim_of(KEEPER, 1)),
        lambda: prolong(cut, claim_of(KEEPER, 1)),
        lambda: cut.set_in_sync(claim_of(KEEPER, 1), ["b"], revision=1),
        lambda: cut.release(claim_of(KEEPER, 1)),
    ):
        with pytest.raises(DilocoError) as caught:
            await call()
        assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
    view = await other.read()
    assert (view.holder, view.term, view.in_sync) == (None, 0, None)
    cut.link = Link.UP
    assert (await take(cut, claim_of(KEEPER, 1))).holder == claim_of(KEEPER, 1)


async def test_who_hears_no_answer_has_been_obeyed_all_the_same() -> None:
    server = MemoryLeaseServer()
    mute, other = MemoryLease(server), MemoryLease(server)
    mute.link = Link.MUTE
    with pytest.raises(DilocoError) as caught:
        await take(mute, claim_of(KEEPER, 1))
    assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
    assert (await other.read()).holder == claim_of(KEEPER, 1)


async def test_synchronizers_on_one_server_share_members_term_and_oblivion() -> None:
    server = MemoryLeaseServer()
    first, second = MemoryMembership(server=server), MemoryMembership(server=server)
    granted = await first.grant_incarnation("a", Incarnation(1, 1))
    await first.mark_seeded(1)
    assert [x.incarnation for x in (await second.read_back()).members] == [granted]
    await take(MemoryLease(server), claim_of(KEEPER, 2))
    first.link = Link.MUTE
    with pytest.raises(DilocoError) as caught:
        await first.heartbeat({"a": Incarnation(1, 1)}, 1)
    assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE, "a refusal is lost, too"
    first.link = Link.UP
    with pytest.raises(DilocoError) as caught:
        await first.heartbeat({"a": Incarnation(1, 1)}, 1)
    assert caught.value.reason is Reason.STALE_TERM
    server.empty()
    roll = await second.read_back()
    assert (roll.members, roll.quorum, roll.seeded) == ((), None, False)
    await first.heartbeat({"a": Incarnation(1, 1)}, 1)
    assert [x.learner_id for x in await second.members()] == ["a"]
