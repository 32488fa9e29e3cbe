"""Durability ``async``: a crash of the machine costs the rounds that were not complete, no more."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from decoupled_diloco.errors import Reason
from tests.synchronizer.store_faults import Crash, failing, logged, open_disk, refused
from tests.synchronizer.store_scenario import assert_holds, begin, rounds


@pytest.mark.parametrize("torn", ["record", "record empty", "fragment", "fragment missing"])
@pytest.mark.parametrize("count", [1, 2])
def test_async_goes_back_over_torn_rounds_and_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: str, count: int
) -> None:
    store = open_disk(tmp_path, "async", keep_rounds=4)
    made = [begin(store)]
    for _ in range(3):
        made.append(rounds(store, made[-1], 1))
    store.close()
    for record in made[-count:]:
        t = record.global_step
        name = "round-*" if torn.startswith("record") else "fragment-*-*"
        (file,) = tmp_path.rglob(f"{name}{t:010d}.*")
        if torn == "fragment missing":
            file.unlink()
        else:
            size = 0 if torn == "record empty" else file.stat().st_size // 2
            os.truncate(file, size)
    store = open_disk(tmp_path)  # whatever the setting is now: the files say how they were written
    with caplog.at_level(logging.WARNING):
        assert_holds(store, made[-1 - count])
    for record in made[-count:]:
        assert f"round {record.global_step} of term 1 was not complete" in caplog.text
    record = rounds(store, begin(store), 4)
    assert record.global_step == made[-1 - count].global_step + 4
    store.close()
    store = open_disk(tmp_path)
    assert_holds(store, record)
    store.close()


def test_async_still_refuses_damage_in_the_seed_or_the_start_of_a_term(tmp_path: Path) -> None:
    store = open_disk(tmp_path, "async")
    begin(store)
    store.close()
    store = open_disk(tmp_path, "async")
    begin(store)
    store.close()
    store = open_disk(tmp_path, "async")
    for file in sorted(tmp_path.rglob("round-*.json"), reverse=True):
        os.truncate(file, file.stat().st_size // 2)
        refused(store, Reason.STORE_CORRUPT, file)
        file.unlink()  # the remedy: back to the record before
    store.close()


def test_async_never_goes_back_over_the_start_of_a_term(tmp_path: Path) -> None:
    """A damaged fragment under it is damage, although its round was left to the kernel once."""
    store = open_disk(tmp_path, "async", keep_rounds=4)
    rounds(store, begin(store), 3)
    store.close()
    store = open_disk(tmp_path, "async", keep_rounds=4)
    begin(store)
    (file,) = tmp_path.rglob("fragment-*-0000000003.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    refused(store, Reason.STORE_CORRUPT, file)
    store.close()


def test_a_take_over_forces_out_what_an_async_term_left_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record counts as complete for good, so everything that it names must be on the disk."""
    store = open_disk(tmp_path, "async")
    record = rounds(store, begin(store), 2)
    store.close()
    store = open_disk(tmp_path, "async")
    with logged(monkeypatch) as log:
        begin(store)
    store.close()
    name = log.index(f"name round-{record.global_step:010d}.json")
    for fragment, version in enumerate(record.versions):
        file = f"fragment-{fragment:04d}-{version.global_step:010d}.safetensors"
        assert f"fsync {file}" in log[:name]


def test_async_forces_nothing_out_in_most_rounds_and_what_it_keeps_before_it_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(tmp_path, "async")
    record = begin(store)
    counts = []
    for _ in range(8):
        with failing(monkeypatch, "fsync", 0, Crash(), after=False) as calls:
            record = rounds(store, record, 1)
        counts.append(calls[0])
    assert counts.count(0) >= 4
    assert sum(counts) > 0
    store.close()
