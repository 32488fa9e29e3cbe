"""Metrics of processes that lead and follow in turn, and of what a take-over would lose."""

from __future__ import annotations

import pytest

from decoupled_diloco.v1 import admin_pb2 as pb
from synchronizer_server.metrics import Metrics, source_of
from tests.synchronizer.fake_learner import serving, until
from tests.synchronizer.test_metrics import Scrape, Values, scraped
from tests.synchronizer.test_node_begins import DeafLease, Keeper, keeper

__all__ = ["keeper"]

pytestmark = pytest.mark.asyncio

ALONE: frozenset[tuple[str, str]] = frozenset()


def shown(process) -> Values:
    return scraped(Metrics(source_of(process.node, process.board, process.election, "run")))


async def test_who_leads_and_who_follows_say_so_and_a_take_over_turns_it_round(
    keeper: Keeper,
) -> None:
    first, _ = keeper.process("first")
    second, _ = keeper.process("second")
    keeper.names(first)
    keeper.start(first)
    await until(lambda: first.leads)
    keeper.start(second)
    await until(lambda: shown(second)["diloco_term", ALONE] == 5)
    leading, following = shown(first), shown(second)
    assert leading["diloco_leader", ALONE] == 1
    assert leading["diloco_term", ALONE] == 5
    assert leading["diloco_lease_held", ALONE] == 1
    assert leading["diloco_standbys_in_sync", ALONE] == 0
    assert following["diloco_leader", ALONE] == 0
    assert following["diloco_run_state", frozenset({("state", "following")})] == 1
    wait = frozenset({("subject", "leadership"), ("reason", "following")})
    assert following["diloco_waits", wait] == 1
    assert ("diloco_rounds_total", ALONE) not in following
    first.stopping.set()
    await until(lambda: shown(first)["diloco_leader", ALONE] == 0)
    assert ("diloco_run_state", frozenset({("state", "starting")})) in shown(first)
    assert shown(first)["diloco_run_state", frozenset({("state", "starting")})] == 0


async def test_a_keeper_that_does_not_answer_is_shown_by_who_follows_too(keeper: Keeper) -> None:
    process, lease = keeper.process("deaf", lease=DeafLease)
    keeper.names()
    keeper.start(process)
    await until(lambda: shown(process)["diloco_lease_keeper_up", ALONE] == 1)

    async def silent() -> object:
        return await lease.renew()  # type: ignore[call-arg]

    lease.deaf = "altogether"  # type: ignore[attr-defined]
    lease.read = silent  # type: ignore[assignment, method-assign]
    await until(lambda: shown(process)["diloco_lease_keeper_up", ALONE] == 0)
    assert shown(process)["diloco_leader", ALONE] == 0


async def test_standbys_are_shown_with_what_they_lack() -> None:
    replication = pb.ReplicationStatus(
        mode="one",
        unsafe_rounds=3,
        lease_held=True,
        lease_seconds=2.5,
        replicas=[
            pb.ReplicaStatus(standby_id="x", connected=True, in_sync=True, acked_global_step=9),
            pb.ReplicaStatus(standby_id="y", connected=False, acked_global_step=7),
        ],
    )
    status = pb.GetStatusResponse(role="leading", global_step=10, replication=replication)
    async with serving() as fleet:
        scrape = Scrape(fleet, status)
    assert scrape("diloco_standbys") == 2
    assert scrape("diloco_standbys_in_sync") == 1
    assert scrape("diloco_standby_lag_rounds", standby="x") == 1
    assert scrape("diloco_standby_lag_rounds", standby="y") == 3
    assert scrape("diloco_standby_connected", standby="y") == 0
    assert scrape("diloco_unsafe_rounds") == 3
    assert scrape("diloco_lease_held") == 1
    assert scrape("diloco_lease_seconds") == 2.5


async def test_leased_data_is_shown_as_the_status_has_it() -> None:
    data = pb.DataStatus(
        mode="leases", epoch=2, num_free=10, num_leased=5, num_merged=100, num_returned=3
    )
    status = pb.GetStatusResponse(role="leading", data=data)
    async with serving() as fleet:
        scrape = Scrape(fleet, status)
    assert scrape("diloco_data_epoch") == 2
    assert scrape("diloco_data_samples", state="free") == 10
    assert scrape("diloco_data_samples", state="leased") == 5
    assert scrape("diloco_data_merged_total") == 100
    assert scrape("diloco_data_returned_total") == 3
