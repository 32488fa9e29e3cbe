"""LeaseData over the wire, and learners beyond the plan."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fake_learner import PATIENCE_S, FakeLearner, Fleet, make_settings, refusal, serving, until

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from synchronizer_server import joining
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.core.state import CoreState
from synchronizer_server.store.memory import MemoryStore

pytestmark = pytest.mark.asyncio

LEASES = {"data_mode": "leases", "data_length": 40, "data_lease_length": 10}


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with serving(settings=make_settings(**LEASES)) as served:
        yield served


def request_of(learner: FakeLearner, request_id: str) -> pb.LeaseDataRequest:
    return pb.LeaseDataRequest(
        learner_id=learner.learner_id, incarnation=learner.incarnation, request_id=request_id
    )


async def lease(fleet: Fleet, learner: FakeLearner, request_id: str) -> tuple[int, int, int, int]:
    got = await fleet.stub.LeaseData(request_of(learner, request_id), timeout=PATIENCE_S)
    return got.lease_id, got.epoch, got.start, got.stop


async def refused(fleet: Fleet, request: pb.LeaseDataRequest) -> DilocoError:
    return await refusal(fleet.stub.LeaseData(request, timeout=PATIENCE_S))


def core_of(fleet: Fleet) -> CoreState:
    return fleet.engine.core.state


async def test_ranges_go_to_whoever_asks_and_a_repeated_request_is_one(fleet):
    a, b = await fleet.learner("a"), await fleet.learner("b")
    assert await lease(fleet, a, "1") == (1, 0, 0, 10)
    assert await lease(fleet, b, "1") == (2, 0, 10, 20)
    assert await lease(fleet, a, "1") == (1, 0, 0, 10)
    assert await lease(fleet, a, "2") == (3, 0, 20, 30)
    status = await fleet.status()
    assert status.data.mode == "leases"
    assert (status.data.num_free, status.data.num_leased, status.data.num_merged) == (10, 30, 0)
    (first, _) = status.learners
    assert (first.data_position, first.data_stop) == (0, 10)


async def test_a_run_with_fixed_shards_says_what_to_do():
    async with serving(settings=make_settings()) as fleet:
        learner = await fleet.learner("a")
        error = await refused(fleet, request_of(learner, "1"))
        assert error.reason is Reason.CONFIG_CONFLICT
        assert "data_mode = leases" in error.message
        assert (await fleet.status()).data.mode == "shards"


async def test_strangers_and_requests_that_make_no_sense_get_nothing(fleet):
    learner = await fleet.learner("a")
    stranger = FakeLearner(fleet, "nobody")
    stranger.incarnation = learner.incarnation
    assert (await refused(fleet, request_of(stranger, "1"))).reason is Reason.UNKNOWN_LEARNER
    assert (await refused(fleet, request_of(learner, ""))).reason is Reason.MALFORMED
    assert core_of(fleet).data.record.num_issued == 0


async def test_who_was_silent_for_too_long_gives_back_its_data_and_is_told_so():
    settings = make_settings(
        **LEASES, heartbeat_timeout_s=0.3, heartbeat_interval_s=0.1, num_learners=1
    )
    async with serving(settings=settings) as fleet:
        learner = await fleet.learner("a")
        await lease(fleet, learner, "1")
        found = core_of(fleet).roster.find("a")
        await until(lambda: found.lease_lost)
        assert found.state is LearnerState.GONE
        assert core_of(fleet).data.record.num_returned == 10
        assert (await refused(fleet, request_of(learner, "2"))).reason is Reason.LEASE_LOST
        old = learner.incarnation
        await learner.join(request_id=learner.request_id)
        assert learner.incarnation.number == old.number + 1, "the same process gets a new life"


async def test_claims_after_a_restart_are_kept_and_nothing_is_leased_before():
    store = MemoryStore()
    settings = make_settings(**LEASES, num_learners=1)
    async with serving(settings=settings, store=store) as fleet:
        (learner,) = await fleet.seeded("a")
        await lease(fleet, learner, "1")
        before = learner.incarnation
    claim = pb.DataLease(lease_id=1, epoch=0, start=0, stop=10)
    async with serving(settings=settings, store=store) as fleet:
        assert core_of(fleet).term == 2
        again = FakeLearner(fleet, "a")
        await again.join(previous_incarnation=before, leases=[claim])
        (kept,) = core_of(fleet).data.leases
        assert (kept.lease_id, kept.start, kept.stop) == (1, 0, 10)
        error = await refused(fleet, request_of(again, "2"))
        assert error.reason is Reason.STARTING
        core_of(fleet).claims_until = 0.0
        assert (await lease(fleet, again, "2"))[2:] == (10, 20)
        other = FakeLearner(fleet, "b")
        error = await refusal(other.join(previous_incarnation=before, leases=[claim]))
        assert error.reason is Reason.LEASE_LOST
        members = await fleet.membership.members()
        assert [x.learner_id for x in members] == ["a"], "who is refused leaves nothing behind"


@pytest.mark.parametrize(
    "claim",
    [
        pb.DataLease(lease_id=0, start=0, stop=1),
        pb.DataLease(lease_id=1, start=5, stop=5),
        pb.DataLease(lease_id=1, start=0, stop=2**64 - 1),
        pb.DataLease(lease_id=2**64 - 1, start=0, stop=1),
    ],
    ids=str,
)
async def test_a_claim_that_is_no_lease_is_refused(fleet, claim):
    learner = FakeLearner(fleet, "a")
    assert (await refusal(learner.join(leases=[claim]))).reason is Reason.MALFORMED
    many = [pb.DataLease(lease_id=i + 1, start=0, stop=1) for i in range(2049)]
    assert (await refusal(learner.join(leases=many))).reason is Reason.MALFORMED


async def test_any_number_of_learners_may_join_where_data_is_leased(fleet):
    joined = [await fleet.learner(f"l{i}") for i in range(6)]
    assert sorted(x.joined.shard for x in joined) == list(range(6))


async def test_with_fixed_shards_one_more_than_planned_is_told_about_leases():
    async with serving(settings=make_settings(num_learners=1)) as fleet:
        await fleet.learner("a")
        error = await refusal(FakeLearner(fleet, "b").join())
        assert error.reason is Reason.NO_SHARD_LEFT
        assert "data_mode = leases" in error.message


async def test_the_number_of_learner_ids_is_bounded(fleet, monkeypatch):
    monkeypatch.setattr(joining, "MAX_LEARNERS", 2)
    for name in ("a", "b"):
        await fleet.learner(name)
    error = await refusal(FakeLearner(fleet, "c").join())
    assert error.reason is Reason.NO_SHARD_LEFT
    assert "2 learner ids" in error.message
    await fleet.learner("a")
