"""Retained updates: what brings a watcher from what it holds to what is published."""

from __future__ import annotations

import torch

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.versions import Version
from synchronizer_server.merge.fragment_state import vector_digest
from synchronizer_server.updates import UpdateBook, make_update

NUM_ELEMENTS = 64


class Book:
    """One fragment with published copies that the test chooses."""

    def __init__(self, num_retained: int = 4) -> None:
        self.copy = torch.arange(NUM_ELEMENTS, dtype=torch.float32)
        self.versions = [Version(1, 0, vector_digest(self.copy))]
        self.book = UpdateBook(num_retained)
        self.book.start(self.versions, [self.copy])

    def publish(self, delta: float) -> Version:
        codec = get_codec("bf16")
        payload = codec.encode(torch.full((NUM_ELEMENTS,), delta))
        copy = self.copy + codec.decode(payload, NUM_ELEMENTS)
        version = Version(1, len(self.versions), vector_digest(copy))
        update = make_update(
            0, base=self.versions[-1], result=version, codec="bf16", payload=payload,
            num_elements=NUM_ELEMENTS,
        )  # fmt: skip
        self.book.publish(update, copy)
        self.copy = copy
        self.versions.append(version)
        return version

    def steps(self, held: Version | None) -> list[tuple[int | None, int]]:
        """(global step of the base, None for a full fragment; of the result) of each update."""
        return [
            (u.base.global_step if u.base else None, u.result.global_step)
            for u in self.book.plan(0, held)
        ]


def test_a_watcher_gets_the_chain_from_what_it_holds():
    book = Book()
    book.publish(1.0)
    book.publish(1.0)
    assert book.steps(book.versions[1]) == [(1, 2)]
    assert book.steps(book.versions[2]) == []


def test_the_chain_gives_way_to_the_whole_fragment_where_that_is_no_larger():
    book = Book()
    for _ in range(3):
        book.publish(1.0)
    assert book.steps(book.versions[2]) == [(2, 3)], "one bf16 update is half of fp32"
    assert book.steps(book.versions[1]) == [(None, 3)], "two are as large as the fragment"


def test_an_update_that_changes_nothing_still_moves_the_version():
    """Else the base of every later outer gradient would stay below its own contribution."""
    book = Book()
    moved = book.publish(0.0)
    assert moved.digest == book.versions[0].digest
    assert book.steps(book.versions[0]) == [(0, 1)]
    book.publish(1.0)
    assert book.steps(moved) == [(1, 2)], "not the update that changed nothing once more"


def test_what_is_not_on_our_lineage_is_replaced_even_if_its_number_is_higher():
    book = Book()
    book.publish(1.0)
    assert book.steps(Version(7, 999, b"?" * 32)) == [(None, 1)]
    assert book.steps(None) == [(None, 1)]


def test_what_is_no_longer_retained_is_replaced_and_forgotten():
    book = Book(num_retained=2)
    for _ in range(4):
        book.publish(1.0)
    assert book.steps(book.versions[1]) == [(None, 4)]
    assert book.book.copy_at(0, book.versions[1]) is None
    assert book.book.copy_at(0, book.versions[2]) is not None
