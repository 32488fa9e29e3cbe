"""A leader and its standbys over gRPC: catching up, keeping up, acknowledging, being cut off."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.replication.outbox import MAX_RECORDS
from synchronizer_server.store import DiskStore, MemoryStore, RoundStore
from tests.synchronizer.fake_learner import until
from tests.synchronizer.replication_kit import (
    DESCRIPTION,
    SETTINGS,
    Lineage,
    Scripted,
    Standby,
    assert_equal,
    leading,
    serve,
    store_with,
    stream_of,
)

pytestmark = pytest.mark.asyncio


def lineage_of(rounds: int = 4) -> Lineage:
    lineage = Lineage()
    for _ in range(rounds):
        lineage.round()
    return lineage


def started(store: RoundStore, what: str, lineage: Lineage) -> RoundStore:
    """A store in one of the states in which a standby may start."""
    match what:
        case "behind":
            store_with(Lineage(), store)
        case "equal":
            store_with(lineage, store)
        case "divergent":  # it led in term 1 and merged on, while a standby took over
            tail = lineage.fork()
            tail.round()
            tail.round()
            store_with(tail, store)
            lineage.take_over(2)
            lineage.round()
    return store


@pytest.mark.parametrize("what", ["empty", "behind", "equal", "divergent"])
@pytest.mark.parametrize("kind", ["memory", "disk"])
async def test_a_standby_catches_up_and_keeps_up(what: str, kind: str, tmp_path: Path) -> None:
    lineage = lineage_of()
    store: RoundStore = MemoryStore()
    if kind == "disk":
        store = DiskStore(tmp_path, SETTINGS.run_id, durability="standby", keep_rounds=2)
    started(store, what, lineage)
    standby = Standby(store)
    async with leading(lineage, term=lineage.record.term) as led:
        async with standby.following(led.address):
            records = []
            for number in range(6):
                if number:
                    led.send(lineage.round())
                await until(lambda: led.heard.has_acked("standby-1", lineage.record))
                await standby.has(lineage)
                records.append(lineage.record)
        acks = [entry for entry in led.heard.log if entry[0] == "acked"]
        assert acks == [("acked", "standby-1", r.term, r.global_step) for r in records]
        await until(lambda: led.heard.log[-1] == ("lost", "standby-1"))
        assert led.heard.log[0] == ("connected", "standby-1")
    assert standby.errors == []
    store.close()


async def test_a_standby_takes_over_with_what_it_got(tmp_path: Path) -> None:
    lineage = lineage_of()
    standby = Standby(DiskStore(tmp_path, SETTINGS.run_id))
    async with leading(lineage) as led, standby.following(led.address):
        await standby.has(lineage)
    transfer = lineage.take_over(2)
    standby.store.begin_term(2, transfer.record)
    following = lineage.round()
    standby.store.commit(following.record, following.fragments)
    assert_equal(standby.store, lineage)
    assert standby.store.read_run() == DESCRIPTION
    standby.store.close()


async def test_a_standby_that_is_there_before_the_first_learner_gets_the_seed() -> None:
    standby = Standby()
    async with leading() as led, standby.following(led.address):
        await until(lambda: standby.follower.streaming)
        assert standby.follower.description is None
        assert led.leader is not None
        led.leader.describe(DESCRIPTION)
        await until(lambda: standby.follower.description == DESCRIPTION)
        lineage = Lineage()
        led.send(lineage.whole())
        await standby.has(lineage)
        led.send(lineage.round())
        await standby.has(lineage)
    assert standby.errors == []


async def test_a_standby_follows_the_next_leader() -> None:
    lineage = lineage_of()
    standby = Standby()
    async with leading(lineage) as led, standby.following(led.address):
        await standby.has(lineage)
        old, led.leader = led.leader, None
        assert old is not None
        old.close(DilocoError(Reason.NOT_LEADING, "another leads"))
        await until(lambda: standby.errors)
        assert {error.reason for error in standby.errors} == {Reason.NOT_LEADING}
        new = led.next_leader(term=2)
        new.describe(DESCRIPTION)
        led.send(lineage.take_over(2))
        await standby.has(lineage)
        led.send(lineage.round())
        await standby.has(lineage)
        assert standby.follower.claim is not None
        assert standby.follower.claim.term == 2


async def test_a_tensor_that_is_cut_off_in_the_middle_leaves_nothing_behind() -> None:
    before, lineage = Lineage(), lineage_of(1)
    messages = stream_of(lineage)
    assert len(messages[3].chunk.data) == 2**20  # the first of two chunks
    standby = Standby(store_with(before))
    async with serve(Scripted(messages[:4], waits=False)) as address:
        error = await standby.follow_once(address)
    assert error.reason is Reason.UNAVAILABLE
    assert_equal(standby.store, before)
    async with leading(lineage) as led, standby.following(led.address):
        await standby.has(lineage)


async def test_a_damaged_chunk_ends_the_stream_and_the_next_one_brings_the_record() -> None:
    before, lineage = Lineage(), lineage_of(1)
    damaged = stream_of(lineage)
    chunk = damaged[3].chunk
    chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
    standby = Standby(store_with(before))
    service = Scripted(damaged, stream_of(lineage))
    async with serve(service) as address:
        error = await standby.follow_once(address)
        assert error.reason is Reason.CORRUPT
        assert service.acks == []
        assert_equal(standby.store, before)
        assert not standby.follower.streaming
        async with standby.following(address):
            await standby.has(lineage)
            await until(lambda: service.acks == [(1, 1)])


async def test_a_header_that_claims_too_much_is_refused_before_its_first_chunk() -> None:
    lineage = lineage_of(1)
    messages = stream_of(lineage)
    messages[2].tensor.encoding.payload_bytes = 2**40
    standby = Standby()
    async with serve(Scripted(messages[:3])) as address:
        assert (await standby.follow_once(address)).reason is Reason.OVERSIZED
    assert standby.store.load() is None
    standby.runner.close()


class HeldStore(MemoryStore):
    """Installs wait until they are let through, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.error: DilocoError | None = None
        self.num_asked = 0

    def install(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> None:
        self.num_asked += 1
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        super().install(record, fragments)


async def test_nothing_is_acknowledged_before_it_is_persisted() -> None:
    lineage = lineage_of(1)
    store = HeldStore()
    standby = Standby(store)
    async with leading(lineage) as led, standby.following(led.address):
        await until(lambda: store.num_asked == 1)
        assert led.heard.log == [("connected", "standby-1")]
        assert standby.follower.persisted is None
        store.gate.set()
        await until(lambda: led.heard.has_acked("standby-1", lineage.record))
        assert_equal(store, lineage)


async def test_a_standby_whose_disk_is_slow_hears_where_it_stands() -> None:
    """Or it would take the leader for dead."""
    lineage = lineage_of(1)
    store = HeldStore()
    standby = Standby(store)
    async with leading(lineage) as led, standby.following(led.address):
        await until(lambda: store.num_asked == 1)
        assert led.leader is not None
        for _ in range(MAX_RECORDS):
            led.send(lineage.round())
        for in_sync in (True, False):
            led.leader.tell_state("standby-1", in_sync)
            await until(lambda: standby.follower.in_sync == in_sync)  # noqa: B023 - awaited at once
        assert standby.follower.persisted is None
        store.gate.set()
        await standby.has(lineage)


async def test_a_record_that_is_being_written_when_the_stream_ends_counts_in_the_next() -> None:
    """The next leader does not have it: what differs from it is asked for."""
    lineage = lineage_of(1)
    store = HeldStore()
    store.gate.set()
    standby = Standby(store)
    async with leading(lineage) as led, standby.following(led.address):
        await standby.has(lineage)
        store.gate.clear()
        led.send(lineage.fork().round())
        await until(lambda: store.num_asked == 2)
        old, new = led.leader, led.next_leader(term=2)
        assert old is not None
        new.describe(DESCRIPTION)
        led.send(lineage.take_over(2))
        old.close(DilocoError(Reason.NOT_LEADING, "another leads"))
        await until(lambda: standby.errors)
        store.gate.set()
        await standby.has(lineage)
    assert [error.reason for error in standby.errors] == [Reason.NOT_LEADING]


async def test_what_could_not_be_persisted_is_not_acknowledged_and_comes_again() -> None:
    lineage = lineage_of(1)
    store = HeldStore()
    store.gate.set()
    store.error = DilocoError(Reason.DISK_FULL, "no space left on the disk")
    standby = Standby(store)
    async with leading(lineage) as led, standby.following(led.address):
        await until(lambda: len(standby.errors) >= 2)
        assert {error.reason for error in standby.errors} == {Reason.DISK_FULL}
        assert not [entry for entry in led.heard.log if entry[0] == "acked"]
        store.error = None
        await standby.has(lineage)
        await until(lambda: led.heard.has_acked("standby-1", lineage.record))


async def test_a_slow_standby_gets_a_cut_and_holds_up_neither_leader_nor_others() -> None:
    lineage = lineage_of(1)
    store = HeldStore()
    slow, quick = Standby(store), Standby(standby_id="standby-2")
    async with (
        leading(lineage) as led,
        slow.following(led.address),
        quick.following(led.address),
    ):
        await until(lambda: store.num_asked == 1)
        num_rounds = 5 * MAX_RECORDS
        for _ in range(num_rounds):
            led.send(lineage.round())
            await quick.has(lineage)
        store.gate.set()
        await slow.has(lineage)
        await until(lambda: led.heard.has_acked("standby-1", lineage.record))
        acks = [e[3] for e in led.heard.log if e[:2] == ("acked", "standby-1")]
        assert acks == sorted(acks)
        assert len(acks) <= 2 * MAX_RECORDS + 2
        assert len([e for e in led.heard.log if e[:2] == ("acked", "standby-2")]) > num_rounds / 2


async def test_a_standby_hears_where_it_stands_and_remembers_it() -> None:
    lineage = lineage_of(1)
    standby = Standby()
    follower = standby.follower
    async with leading(lineage) as led:
        async with standby.following(led.address):
            await standby.has(lineage)
            assert led.leader is not None
            led.leader.tell_state("nobody", True)
            for in_sync in (True, False, True):
                led.leader.tell_state("standby-1", in_sync)
                await until(lambda: follower.in_sync == in_sync)  # noqa: B023 - awaited at once
        assert follower.in_sync  # a leader that dies leaves its last word behind
        assert not follower.streaming


async def test_a_standby_counts_as_behind_again_with_every_new_stream() -> None:
    lineage = lineage_of(1)
    standby = Standby(store_with(lineage))
    async with leading(lineage) as led, standby.following(led.address):
        await until(lambda: led.heard.has_acked("standby-1", lineage.record))
        assert led.leader is not None
        led.leader.tell_state("standby-1", True)
        await until(lambda: standby.follower.in_sync)
        old = led.leader
        led.next_leader(term=1).describe(DESCRIPTION)
        led.send(lineage.whole())
        old.close(DilocoError(Reason.NOT_LEADING, "another leads"))
        await until(lambda: not standby.follower.in_sync)
        assert standby.follower.streaming
