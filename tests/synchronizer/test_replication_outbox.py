"""Whatever is sent, dropped and cut off on the way, a standby ends with the leader's cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import replication_pb2 as pb
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.replication.messages import Transfer
from synchronizer_server.replication.outbox import MAX_RECORDS, Outbox
from synchronizer_server.store import MemoryStore, RoundStore
from tests.synchronizer.replication_kit import (
    DESCRIPTION,
    LAYOUT,
    Lineage,
    assert_equal,
    store_with,
)

FIRST_HELD = st.sampled_from(["nothing", "seed", "behind", "tail"])
STEPS = st.lists(
    st.sampled_from(["round", "round", "send", "send", "ack", "cut off", "in the middle", "term"]),
    max_size=30,
)


def ack_of(record: RoundRecord) -> pb.ReplicateAck:
    return pb.ReplicateAck(term=record.term, global_step=record.global_step)


class Pair:
    """A leader's lineage and a standby's store, with an outbox between them."""

    def __init__(self, held: str) -> None:
        self.lineage = Lineage()
        self.store: RoundStore = MemoryStore()
        self.store.load()
        self.store.open_run(DESCRIPTION)
        self.unacked: list[RoundRecord] = []
        if held != "nothing":
            store_with(self.lineage, self.store)
        for _ in range(0 if held == "seed" else 2):
            self.lineage.round()
        if held == "tail":  # the store led before, and merged what nobody has
            tail = self.lineage.fork()
            tail.round()
            store_with(tail, self.store)
            self.lineage.take_over(2)
        self.outbox = self.connect()

    def connect(self) -> Outbox:
        self.unacked = []
        loaded = self.store.load()
        versions = loaded[0].versions if loaded is not None else ()
        return Outbox("standby-1", dict(enumerate(versions)), behind=True)

    def send(self, *, whole: bool = True) -> bool:
        transfer = self.outbox.take(self.lineage.whole())
        if transfer is None:
            return False
        if whole:
            self.store.install(transfer.record, transfer.fragments)
        self.unacked.append(transfer.record)
        assert len(self.unacked) <= MAX_RECORDS
        return True

    def ack(self) -> None:
        if self.unacked:
            self.outbox.acked(ack_of(self.unacked.pop(0)))

    def step(self, name: str) -> None:
        match name:
            case "round":
                self.outbox.offer(self.lineage.round())
            case "send":
                self.send()
            case "ack":
                self.ack()
            case "cut off":
                self.outbox = self.connect()
            case "in the middle":
                self.send(whole=False)
                self.outbox = self.connect()
            case "term":
                self.lineage.take_over(self.lineage.record.term + 1)
                self.outbox = self.connect()


@settings(max_examples=30)
@given(held=FIRST_HELD, steps=STEPS)
def test_any_sequence_ends_with_the_leaders_cut(held: str, steps: list[str]) -> None:
    """The store checks every record that it gets, so nothing was left out on the way either."""
    pair = Pair(held)
    for step in steps:
        pair.step(step)
    for _ in range(4 * MAX_RECORDS):
        while pair.unacked:
            pair.ack()
        pair.send()
    assert_equal(pair.store, pair.lineage)


def test_only_what_differs_goes_to_who_is_behind() -> None:
    lineage = Lineage()
    held = dict(enumerate(lineage.record.versions))
    lineage.round()
    outbox = Outbox("standby-1", held, behind=True)
    transfer = outbox.take(lineage.whole())
    assert transfer is not None
    assert transfer.record == lineage.record
    assert set(transfer.fragments) == {lineage.record.fragment}


def test_the_newest_record_goes_to_who_has_every_fragment() -> None:
    """It may be a take-over that the standby has not heard of: its acknowledgement counts."""
    lineage = Lineage()
    outbox = Outbox("standby-1", dict(enumerate(lineage.record.versions)), behind=True)
    lineage.take_over(2)
    transfer = outbox.take(lineage.whole())
    assert transfer is not None
    assert (transfer.record, dict(transfer.fragments)) == (lineage.record, {})


def offered(num_rounds: int) -> tuple[Outbox, Lineage, list[Transfer]]:
    lineage = Lineage()
    outbox = Outbox("standby-1", dict(enumerate(lineage.record.versions)), behind=False)
    made = [lineage.round() for _ in range(num_rounds)]
    for transfer in made:
        outbox.offer(transfer)
    return outbox, lineage, made


def test_records_that_fit_are_sent_in_order() -> None:
    outbox, lineage, made = offered(MAX_RECORDS)
    assert [outbox.take(lineage.whole()) for _ in made] == made


def test_who_falls_behind_gets_one_cut_in_place_of_the_records() -> None:
    outbox, lineage, _ = offered(3 * MAX_RECORDS)
    transfer = outbox.take(lineage.whole())
    assert transfer is not None
    assert transfer.record == lineage.record
    assert set(transfer.fragments) == set(range(LAYOUT.num_fragments))
    assert outbox.take(lineage.whole()) is None
    following = lineage.round()
    outbox.offer(following)
    assert outbox.take(lineage.whole()) == following


def test_nothing_is_sent_while_too_much_is_not_acknowledged() -> None:
    outbox, lineage, made = offered(MAX_RECORDS)
    for _ in made:
        outbox.take(lineage.whole())
    outbox.offer(lineage.round())
    assert outbox.take(lineage.whole()) is None
    outbox.acked(ack_of(made[0].record))
    assert outbox.take(lineage.whole()) is not None


@pytest.mark.parametrize("which", [1, 2, None])
def test_acknowledgements_come_in_order_and_for_what_was_sent(which: int | None) -> None:
    outbox, lineage, made = offered(2)
    outbox.take(lineage.whole())
    outbox.take(lineage.whole())
    if which is None:
        outbox.acked(ack_of(made[0].record))
        outbox.acked(ack_of(made[1].record))
        which = 1
    wrong = made[1].record if which == 1 else Lineage(term=9).record
    with pytest.raises(DilocoError) as caught:
        outbox.acked(ack_of(wrong))
    assert caught.value.reason is Reason.MALFORMED


def test_the_newest_word_of_where_a_standby_stands_is_told_once() -> None:
    outbox, _, _ = offered(0)
    assert outbox.take_state() is None
    outbox.tell(in_sync=True)
    outbox.tell(in_sync=False)
    assert outbox.take_state() is False
    assert outbox.take_state() is None
