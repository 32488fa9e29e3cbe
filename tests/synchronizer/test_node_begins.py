"""Synchronizer processes that win the lease: what they tell the keeper, and whom, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.membership import MemoryLease
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import until
from tests.synchronizer.node_kit import Keeper, keeping


class FullDisk(MemoryStore):
    """No term can be begun while it is full."""

    full = True

    def begin_term(self, term: int, record: object = None) -> None:
        if self.full:
            raise DilocoError(Reason.DISK_FULL, "no room for the first record of the term")
        super().begin_term(term, record)  # type: ignore[arg-type]


class DeafLease(MemoryLease):
    """A keeper that does not answer who says which stores are in sync."""

    deaf = True

    async def set_in_sync(self, *args: object, **kwargs: object) -> bool:
        if self.deaf:
            raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "the keeper does not answer")
        return await super().set_in_sync(*args, **kwargs)  # type: ignore[arg-type]

    async def renew(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        if self.deaf == "altogether":
            raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "the keeper does not answer")
        return await super().renew(*args, **kwargs)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def keeper(tmp_path: Path) -> AsyncIterator[Keeper]:
    async with keeping(tmp_path) as made:
        yield made


pytestmark = pytest.mark.asyncio


async def test_who_has_no_room_to_begin_gives_the_lease_back_and_another_one_leads(
    keeper: Keeper,
) -> None:
    store = FullDisk()
    full, _ = keeper.process("full", store=store)
    other, _ = keeper.process("other")
    keeper.names(full, other)
    keeper.start(full)
    await until(lambda: "lets another store in sync lead: DISK_FULL" in full.waits[1])
    assert keeper.server.in_sync == {full.identity.store_id, other.identity.store_id}
    assert keeper.server.lease is None
    keeper.start(other)
    await until(lambda: other.leads)
    assert keeper.server.in_sync == {other.identity.store_id}
    assert not full.leads


async def test_who_alone_is_in_sync_begins_as_soon_as_there_is_room(keeper: Keeper) -> None:
    store = FullDisk()
    alone, _ = keeper.process("alone", store=store)
    keeper.names(alone)
    keeper.start(alone)
    await until(lambda: keeper.server.term > 4)
    store.full = False
    await until(lambda: alone.leads)
    assert keeper.server.in_sync == {alone.identity.store_id}


async def test_a_term_is_served_once_the_keeper_was_told_and_the_wait_says_so(
    keeper: Keeper,
) -> None:
    waiting, lease = keeper.process("waiting", lease=DeafLease)
    other, _ = keeper.process("other")
    keeper.names(waiting, other)
    keeper.start(waiting)
    await until(
        lambda: waiting.waits[0] == "beginning" and "confirms who is in sync" in waiting.waits[1]
    )
    assert not waiting.leads
    assert keeper.server.in_sync == {waiting.identity.store_id, other.identity.store_id}
    lease.deaf = False  # type: ignore[attr-defined]
    await until(lambda: waiting.leads)
    assert keeper.server.in_sync == {waiting.identity.store_id}


async def test_a_process_that_loses_the_keeper_before_it_has_begun_makes_way(
    keeper: Keeper,
) -> None:
    cut_off, lease = keeper.process("cut-off", lease=DeafLease)
    lease.deaf = "altogether"  # type: ignore[attr-defined]
    other, _ = keeper.process("other")
    keeper.names(cut_off, other)
    keeper.start(cut_off)
    await until(lambda: keeper.server.term > 4)
    keeper.start(other)
    await until(lambda: other.leads)
    assert not cut_off.leads
    assert keeper.server.in_sync == {other.identity.store_id}
