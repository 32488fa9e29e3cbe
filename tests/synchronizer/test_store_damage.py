"""Damaged, missing and misnamed files: what cannot be right is refused by name."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.store.envelope import (
    decode_fragment,
    decode_record,
    encode_fragment,
    encode_record,
)
from tests.synchronizer.store_faults import open_disk, refused
from tests.synchronizer.store_scenario import DESCRIPTION, assert_holds, begin, rounds


@pytest.fixture
def closed_store(tmp_path: Path) -> tuple[Path, RoundRecord]:
    """A store after a take-over and a round: the newest cut spans two terms."""
    for _ in range(2):
        store = open_disk(tmp_path)
        record = rounds(store, begin(store), 1)
        store.close()
    return tmp_path, record


def files_of_the_cut(path: Path) -> list[Path]:
    newest = max(path.rglob("round-*.json"))
    terms = path / "group-000"
    return [
        newest,
        terms / "term-00000001" / "fragment-0000-0000000000.safetensors",
        terms / "term-00000001" / "fragment-0001-0000000001.safetensors",
        terms / "term-00000002" / "fragment-0002-0000000002.safetensors",
    ]


@pytest.mark.parametrize("index", range(4))
def test_a_flipped_bit_in_any_file_of_the_cut_is_refused(
    closed_store: tuple[Path, RoundRecord], index: int
) -> None:
    path, record = closed_store
    file = files_of_the_cut(path)[index]
    whole = file.read_bytes()
    drawn = random.Random(index)
    positions = {0, 1, 8, 9, len(whole) - 1, *drawn.sample(range(len(whole)), 40)}
    store = open_disk(path)
    for position in sorted(positions):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << drawn.randrange(8)
        file.write_bytes(damaged)
        refused(store, Reason.STORE_CORRUPT, file)
    for damaged in (b"", whole[:-1], whole[: len(whole) // 2], whole + b"\n", whole * 2):
        file.write_bytes(damaged)
        refused(store, Reason.STORE_CORRUPT, file)
    file.write_bytes(whole)
    assert_holds(store, record)  # refusing has changed nothing
    store.close()


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_missing_fragment_is_a_lost_store(
    closed_store: tuple[Path, RoundRecord], index: int
) -> None:
    path, _ = closed_store
    file = files_of_the_cut(path)[index]
    file.unlink()
    store = open_disk(path)
    refused(store, Reason.STORE_LOST, file)
    store.close()


def test_fragments_without_any_record_are_a_lost_store(
    closed_store: tuple[Path, RoundRecord],
) -> None:
    path, _ = closed_store
    for record in path.rglob("round-*.json"):
        record.unlink()
    store = open_disk(path)
    with pytest.raises(DilocoError, match="restore the records") as caught:
        store.load()
    assert caught.value.reason is Reason.STORE_LOST
    store.close()


def test_a_record_under_another_name_is_refused(closed_store: tuple[Path, RoundRecord]) -> None:
    path, _ = closed_store
    newest = files_of_the_cut(path)[0]
    renamed = newest.with_name("round-0000000009.json")
    newest.rename(renamed)
    store = open_disk(path)
    refused(store, Reason.STORE_CORRUPT, renamed)
    store.close()


def test_a_damaged_or_missing_description_is_refused(
    closed_store: tuple[Path, RoundRecord],
) -> None:
    path, _ = closed_store
    run = path / "run.json"
    whole = run.read_bytes()
    store = open_disk(path)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        run.write_bytes(damaged)
        with pytest.raises(DilocoError, match=r"run\.json is damaged") as caught:
            store.read_run()
        assert caught.value.reason is Reason.STORE_CORRUPT
    run.unlink()
    for call in (store.read_run, lambda: store.open_run(DESCRIPTION)):
        with pytest.raises(DilocoError, match=r"run\.json is missing") as caught:
            call()
        assert caught.value.reason is Reason.STORE_LOST
    assert not run.exists()
    store.close()


def test_a_published_copy_that_is_not_its_version_is_refused(
    closed_store: tuple[Path, RoundRecord],
) -> None:
    """File and record agree with each other, and both are wrong."""
    path, _ = closed_store
    newest, *_, file = files_of_the_cut(path)
    envelope = decode_record(newest.read_bytes())
    tensors = decode_fragment(file.read_bytes())
    tensors.published[0] = 1.0
    data = encode_fragment(tensors, envelope.record, 2)
    file.write_bytes(data)
    ref = replace(envelope.files[2], num_bytes=len(data), sha256=sha256(data).hexdigest())
    newest.write_bytes(encode_record(replace(envelope, files=(*envelope.files[:2], ref))))
    store = open_disk(path)
    refused(store, Reason.STORE_CORRUPT, file)
    store.close()


def test_damage_in_an_older_record_stops_nothing(
    closed_store: tuple[Path, RoundRecord], caplog: pytest.LogCaptureFixture
) -> None:
    path, record = closed_store
    oldest = min(path.rglob("round-*.json"))
    oldest.write_bytes(b"")
    store = open_disk(path)
    assert_holds(store, record)
    assert str(oldest) in caplog.text
    store.close()
