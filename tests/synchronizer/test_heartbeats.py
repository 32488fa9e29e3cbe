"""What a synchronizer tells the membership about its learners, and what it says when it cannot."""

from __future__ import annotations

import logging

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import admin_pb2
from decoupled_diloco.versions import Incarnation
from synchronizer_server.heartbeats import beat, run_heartbeats
from synchronizer_server.membership import Link, MemoryLease, MemoryLeaseServer, MemoryMembership
from tests.synchronizer.fake_learner import PATIENCE_S, make_settings, serving, until
from tests.synchronizer.keepers import MemoryKeeper, claim_of, take

pytestmark = pytest.mark.asyncio


async def test_an_emptied_keeper_knows_learners_and_seed_after_one_heartbeat() -> None:
    membership = MemoryMembership()
    async with serving(membership=membership) as fleet:
        await fleet.seeded("a", "b")
        before = {x.learner_id: x.incarnation for x in await membership.members()}
        assert set(before) == {"a", "b"}
        membership.server.empty()
        await beat(fleet.engine, membership)
        roll = await membership.read_back()
        assert {x.learner_id: x.incarnation for x in roll.members} == before
        assert roll.seeded


async def test_the_quorum_goes_along_where_an_operator_has_set_it() -> None:
    membership = MemoryMembership()
    async with serving(membership=membership) as fleet:
        await fleet.learner("a")
        await beat(fleet.engine, membership)
        assert (await membership.read_back()).quorum is None
        fleet.engine.core.state.quorum += 1
        await beat(fleet.engine, membership)
        assert (await membership.read_back()).quorum == fleet.settings.quorum + 1


async def test_a_quorum_that_the_membership_missed_replaces_the_older_one_it_holds() -> None:
    """Also that of the settings, or the next leader would go by what was before."""
    membership = MemoryMembership()
    async with serving(membership=membership) as fleet:
        quorum = fleet.settings.quorum

        async def set_quorum(number: int) -> None:
            request = admin_pb2.SetQuorumRequest(request_id=f"q{number}", quorum=number)
            await fleet.admin.SetQuorum(request, timeout=PATIENCE_S)

        await set_quorum(quorum + 1)
        membership.link = Link.CUT
        await set_quorum(quorum)
        membership.link = Link.UP
        assert (await membership.read_back()).quorum == quorum + 1
        await beat(fleet.engine, membership)
        assert (await membership.read_back()).quorum == quorum


async def test_before_the_seed_nothing_is_marked() -> None:
    membership = MemoryMembership()
    async with serving(membership=membership) as fleet:
        await fleet.learner("a")
        await beat(fleet.engine, membership)
        assert [x.learner_id for x in await membership.members()] == ["a"]
        assert not await membership.is_seeded()


async def test_who_is_silent_for_too_long_is_removed_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    membership = MemoryMembership(lambda: now)
    async with serving(membership=membership, settings=make_settings()) as fleet:
        await fleet.learner("a")
        await membership.heartbeat({"gone": Incarnation(1, 4)}, 1)
        now += fleet.settings.heartbeat_timeout_s + 1.0
        with caplog.at_level(logging.INFO):
            await beat(fleet.engine, membership)
        assert [x.learner_id for x in await membership.members()] == ["a"]
        assert "gone (1.4) is no member any more: unheard for" in caplog.text


async def test_a_leader_whose_term_is_over_tells_nothing() -> None:
    server = MemoryLeaseServer()
    membership = MemoryMembership(server=server)
    async with serving(membership=membership) as fleet:
        await fleet.learner("a")
        term = fleet.engine.core.state.term
        await take(MemoryLease(server), claim_of(MemoryKeeper(), term + 1))
        server.heard.clear()
        with pytest.raises(DilocoError) as caught:
            await beat(fleet.engine, membership)
        assert caught.value.reason is Reason.STALE_TERM
        assert await membership.members() == []


async def test_a_membership_that_is_away_is_said_once_and_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    membership, probe = MemoryMembership(), MemoryMembership()
    settings = make_settings(heartbeat_interval_s=0.01)
    async with serving(membership=membership, settings=settings) as fleet:
        await fleet.learner("a")
        probe.link = Link.CUT
        fleet.engine.spawn(run_heartbeats(fleet.engine, probe))
        with caplog.at_level(logging.INFO):
            await until(lambda: "MEMBERSHIP_UNAVAILABLE" in caplog.text)
            probe.link = Link.UP
            await until(lambda: "reachable" in caplog.text)
            await until(lambda: "a" in probe.server.heard)
        assert caplog.text.count("MEMBERSHIP_UNAVAILABLE") == 1
