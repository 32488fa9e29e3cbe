"""Data leases against a dumb reference: who has which sample, and what is merged of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leases_kit import ONE, TWO, grant, reloaded

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core.data_records import (
    DataRange,
    check_data,
)
from synchronizer_server.core.leases import DataLease, DataLeases
from synchronizer_server.core.records import ContributionRecord


def contribution(learner_id: str, incarnation: Incarnation, step: int) -> ContributionRecord:
    return ContributionRecord(
        learner_id=learner_id, incarnation=incarnation, base=Version(1, 0, b"a" * 32),
        local_step=step, num_tokens=1, num_steps=1, weight=1.0,
    )  # fmt: skip


def test_ranges_follow_each_other_and_end_with_the_epoch():
    book = DataLeases(length=10, lease_length=4)
    ranges = [grant(book, "a").where for _ in range(4)]
    assert ranges == [
        DataRange(0, 0, 4), DataRange(0, 4, 8), DataRange(0, 8, 10), DataRange(1, 0, 4),
    ]  # fmt: skip


def test_data_without_an_end_has_one_epoch():
    book = DataLeases(length=0, lease_length=4)
    assert [grant(book, "a").where for _ in range(3)][-1] == DataRange(0, 8, 12)


def test_a_repeated_request_gets_the_same_lease():
    book = DataLeases(length=10, lease_length=4)
    first = book.grant("a", ONE, "r")
    assert book.grant("a", ONE, "r") == first
    assert book.grant("b", ONE, "r") != first
    assert book.record.num_issued == 8


def test_a_range_is_merged_up_to_the_lowest_step_contributed_to_any_fragment():
    book = DataLeases(length=10, lease_length=10)
    lease = grant(book, "a")
    for step in range(1, 6):
        book.reported("a", ONE, local_step=step, lease_id=lease.lease_id, position=2 * step)
    assert book.committed([contribution("a", ONE, 4)], 0, 2) == ()
    assert book.committed([contribution("a", ONE, 2)], 1, 2) == (DataRange(0, 0, 4),)
    assert book.committed([contribution("a", ONE, 9)], 1, 2) == (DataRange(0, 4, 8),)
    assert book.record.num_merged == 8
    assert book.totals.leased == 2


def test_the_rest_of_a_dead_learner_comes_first_and_in_order():
    book = DataLeases(length=20, lease_length=4)
    leases = [grant(book, "a"), grant(book, "b"), grant(book, "a")]
    book.reported("a", ONE, local_step=1, lease_id=leases[0].lease_id, position=2)
    assert book.committed([contribution("a", ONE, 1)], 0, 1) == (DataRange(0, 0, 2),)
    assert book.give_back("a", ONE) == 2 + 4
    assert book.give_back("a", ONE) == 0, "once"
    assert book.record.returned == (DataRange(0, 2, 4), DataRange(0, 8, 12))
    assert [grant(book, "b").where for _ in range(3)] == [
        DataRange(0, 2, 4), DataRange(0, 8, 12), DataRange(0, 12, 16),
    ]  # fmt: skip


def test_neighbours_that_are_given_back_become_one_range():
    book = DataLeases(length=0, lease_length=4)
    for i in range(6):
        grant(book, f"l{i}")
    for i in (3, 1, 2):
        book.give_back(f"l{i}", ONE)
    assert book.record.returned == (DataRange(0, 4, 16),)


def test_what_a_lost_incarnation_does_later_moves_nothing():
    book = DataLeases(length=8, lease_length=8)
    lease = grant(book, "a")
    book.give_back("a", ONE)
    book.reported("a", ONE, local_step=1, lease_id=lease.lease_id, position=8)
    assert book.committed([contribution("a", ONE, 1)], 0, 1) == ()
    assert book.record.num_merged == 0


def test_a_process_that_joins_again_keeps_what_it_claims_and_gives_back_what_it_never_saw():
    book = DataLeases(length=40, lease_length=4)
    used_up, in_use, unseen = grant(book, "a"), grant(book, "a"), grant(book, "a")
    again = reloaded(book, length=40, lease_length=4)
    claims = [in_use]
    assert again.why_lost("a", ONE, ONE, claims, may_claim=False) is None
    assert again.joined("a", TWO, ONE, claims) == 4
    assert again.record.returned == (unseen.where,)
    assert [x.lease_id for x in again.leases] == [used_up.lease_id, in_use.lease_id]
    assert {x.incarnation for x in again.leases} == {TWO}


def test_a_lease_handed_out_after_the_last_record_is_claimed_in_time_or_lost():
    book = DataLeases(length=40, lease_length=4)
    grant(book, "b")
    again = reloaded(book, length=40, lease_length=4)
    skipped, late = grant(book, "b"), grant(book, "a")
    assert "not known" in (again.why_lost("a", ONE, None, [late], may_claim=False) or "")
    assert again.why_lost("a", ONE, None, [late], may_claim=True) is None
    again.joined("a", TWO, ONE, [late])
    assert again.record.returned == (skipped.where,), "nobody claims it: it is handed out again"
    assert "another learner" in (again.why_lost("c", ONE, None, [late], may_claim=True) or "")
    assert again.record.next_lease_id == late.lease_id + 1


@pytest.mark.parametrize(
    "claim",
    [
        DataLease(lease_id=2**62, where=DataRange(0, 0, 4)),
        DataLease(lease_id=1, where=DataRange(0, 2**62, 2**62 + 4)),
        DataLease(lease_id=1, where=DataRange(2**62, 0, 4)),
        DataLease(lease_id=1, where=DataRange(0, 0, 41)),
        DataLease(lease_id=1, where=DataRange(0, 38, 42)),
    ],
    ids=["id", "position", "epoch", "size", "end"],
)
def test_a_claim_that_cannot_be_is_refused(claim):
    book = DataLeases(length=40, lease_length=4)
    assert "not known" in (book.why_lost("a", ONE, None, [claim], may_claim=True) or "")


def test_a_process_that_was_fenced_or_silent_has_lost_its_leases():
    book = DataLeases(length=40, lease_length=4)
    lease = grant(book, "a")
    assert "another process" in (book.why_lost("a", ONE, TWO, [lease], may_claim=True) or "")
    book.give_back("a", ONE)
    again = reloaded(book, length=40, lease_length=4)
    assert "silent" in (again.why_lost("a", ONE, ONE, [lease], may_claim=True) or "")


def test_a_book_that_does_not_add_up_is_refused():
    book = DataLeases(length=40, lease_length=4)
    grant(book, "a")
    with pytest.raises(DilocoError, match="does not add up"):
        check_data(book.record, [])
    (lease,) = book.leases
    with pytest.raises(DilocoError, match="two have"):
        check_data(book.record, [lease, lease])


# -- against a dumb reference --------------------------------------------------------------------


@dataclass
class Process:
    """A learner that trains sample after sample and forgets nothing."""

    incarnation: Incarnation
    step: int = 0
    request: str = ""
    leases: list[DataLease] = field(default_factory=list)
    trained: list[tuple[int, int]] = field(default_factory=list)
    at_step: dict[int, int] = field(default_factory=dict)
    contributed: dict[int, int] = field(default_factory=dict)

    def samples(self) -> list[tuple[int, int]]:
        return [(x.where.epoch, i) for x in self.leases for i in range(x.where.start, x.where.stop)]

    def mark(self) -> tuple[int, int]:
        """Lease in use and position in it."""
        left = len(self.trained)
        for lease in self.leases:
            if left <= lease.where.num_samples:
                return lease.lease_id, lease.where.start + left
            left -= lease.where.num_samples
        return 0, 0

    def merged(self, num_fragments: int) -> set[tuple[int, int]]:
        """Samples that are in every fragment, by the record of committed contributions."""
        if len(self.contributed) < num_fragments:
            return set()
        floor = min(self.contributed.values())
        known = [n for step, n in self.at_step.items() if step <= floor]
        return set(self.trained[: max(known, default=0)])


class Reference:
    """Grants, reports, contributions, deaths and restarts in any order, and what must hold."""

    num_fragments = 2

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.length = self.rng.choice((0, 7, 16, 40))
        self.lease_length = self.rng.choice((1, 3, 5, 8))
        self.book = DataLeases(length=self.length, lease_length=self.lease_length)
        self.durable = reloaded(self.book, length=self.length, lease_length=self.lease_length)
        self.processes: dict[str, Process] = {}
        self.merged: Counter[tuple[int, int]] = Counter()
        self.durable_merged = Counter(self.merged)
        self.pending: list[tuple[str, int, int]] = []
        self.lives = 0
        self.term = 1
        self.names = ["a", "b", "c"]

    def incarnation(self) -> Incarnation:
        self.lives += 1
        return Incarnation(self.term, self.lives)

    def act(self) -> None:
        name = self.rng.choice(self.names)
        process = self.processes.get(name)
        if process is None:
            process = self.processes[name] = Process(self.incarnation())
            self.book.joined(name, process.incarnation, None, ())
            return
        actions = (
            (self.lease, 4), (self.train, 8), (self.contribute, 4), (self.commit, 3),
            (self.die, 1), (self.restart, 0.4),
        )  # fmt: skip
        (what,) = self.rng.choices([a for a, _ in actions], [w for _, w in actions])
        what(name, process)
        self.check()

    def lease(self, name: str, process: Process) -> None:
        process.request = process.request or f"{self.rng.random()}"
        lease = self.book.grant(name, process.incarnation, process.request)
        if lease is not None and self.rng.random() < 0.8:  # else the answer is lost
            process.leases.append(lease)
            process.request = ""

    def train(self, name: str, process: Process) -> None:
        samples = process.samples()
        done = len(process.trained)
        process.trained = samples[: done + self.rng.randint(0, 4)]
        process.step += 1
        if self.rng.random() < 0.8:
            process.at_step[process.step] = len(process.trained)
            lease_id, position = process.mark()
            self.book.reported(
                name, process.incarnation, local_step=process.step,
                lease_id=lease_id, position=position,
            )  # fmt: skip

    def contribute(self, name: str, process: Process) -> None:
        step = max(process.step - self.rng.randint(0, 2), 0)
        self.pending.append((name, step, process.incarnation.number))

    def commit(self, _name: str, _process: Process) -> None:
        fragment = self.rng.randrange(self.num_fragments)
        counted = []
        for name, step, number in self.pending:
            process = self.processes.get(name)
            if process is None or process.incarnation.number != number:
                continue
            before = process.contributed.get(fragment, 0)
            process.contributed[fragment] = max(before, step)
            counted.append(contribution(name, process.incarnation, step))
        self.pending.clear()
        before_merged = Counter(self.merged)
        for merged in self.book.committed(counted, fragment, self.num_fragments):
            for i in range(merged.start, merged.stop):
                self.merged[merged.epoch, i] += 1
        really = set().union(*(p.merged(self.num_fragments) for p in self.processes.values()))
        assert set(self.merged - before_merged) <= really, "merged before it was in every fragment"
        self.durable = reloaded(self.book, length=self.length, lease_length=self.lease_length)
        self.durable_merged = Counter(self.merged)

    def die(self, name: str, process: Process) -> None:
        del self.processes[name]
        if self.rng.random() < 0.5:
            unmerged = set(process.samples()) - set(self.merged)
            assert self.book.give_back(name, process.incarnation) >= len(unmerged)
        # else another process joins under its id before anybody noticed

    def restart(self, _name: str, _process: Process) -> None:
        """The synchronizer goes back to its last record; whoever lives claims what it has."""
        self.book, self.merged = self.durable, Counter(self.durable_merged)
        self.durable = reloaded(self.book, length=self.length, lease_length=self.lease_length)
        self.pending.clear()
        self.term += 1
        held = {x.learner_id: x.incarnation for x in self.book.leases}
        for name, process in list(self.processes.items()):
            if self.rng.random() < 0.2:
                continue  # silent
            previous = process.incarnation
            known = held.get(name)
            why = self.book.why_lost(name, previous, known, process.leases, may_claim=True)
            if why is None:
                process.incarnation = self.incarnation()
                self.book.joined(name, process.incarnation, previous, process.leases)
                process.contributed, process.at_step, process.request = {}, {}, ""
            else:
                fresh = self.processes[name] = Process(self.incarnation())
                self.book.joined(name, fresh.incarnation, None, ())
        for name, incarnation in held.items():  # and who is silent has lost its leases
            self.book.give_back(name, incarnation)
        for name, process in list(self.processes.items()):
            if process.incarnation.term != self.term:
                del self.processes[name]

    def check(self) -> None:
        assert max(self.merged.values(), default=1) == 1, "merged twice"
        record = self.book.record
        check_data(record, self.book.leases)
        assert record.num_merged == sum(self.merged.values())
        open_ranges = [
            *(DataRange(x.epoch, x.merged_to, x.stop) for x in self.book.leases), *record.returned,
        ]  # fmt: skip
        waiting = Counter((x.epoch, i) for x in open_ranges for i in range(x.start, x.stop))
        assert not waiting & self.merged, "handed out although it is merged"
        last = record.epoch if self.length else 0
        for epoch in range(last + 1):
            stop = self.length if epoch < last else record.position
            for i in range(stop):
                assert waiting[epoch, i] + self.merged[epoch, i] == 1, "skipped, or there twice"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_no_sample_is_merged_twice_or_skipped_whatever_happens(seed):
    world = Reference(seed)
    for _ in range(150):
        world.act()


def test_the_random_world_sees_epochs_close_samples_returned_and_restarts():
    closed = returned = restarts = 0
    for seed in range(60):
        world = Reference(seed)
        for _ in range(300):
            world.act()
        closed += world.book.record.epoch
        returned += world.book.record.num_returned
        restarts += world.term - 1
    assert min(closed, returned, restarts) > 20
