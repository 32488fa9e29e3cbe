"""One conformance suite for both stores, and what the disk alone must do."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.synchronize
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store import DiskStore
from tests.synchronizer.store_reopen import Reopen, reopening
from tests.synchronizer.store_scenario import (
    DENORMAL,
    DESCRIPTION,
    RUN,
    SIZES,
    assert_holds,
    begin,
    following,
    rounds,
    seed,
    takeover,
)


@pytest.fixture(params=["memory", "disk", "async"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    with reopening(request.param, tmp_path) as restart:
        yield restart


def test_a_fresh_store_is_empty(reopen: Reopen) -> None:
    store = reopen()
    assert store.load() is None
    assert store.read_run() is None
    assert store.highest_term() == 0


def test_a_restart_gives_back_the_newest_round_bit_for_bit(reopen: Reopen) -> None:
    store = reopen()
    record = begin(store)
    assert_holds(reopen(), record)
    for expected_term in (2, 3, 4):
        store = reopen()
        record = begin(store)
        assert record.term == expected_term
        record = rounds(store, record, 11)
        assert_holds(reopen(), record)
    loaded = reopen().load()
    assert loaded is not None
    assert loaded[1][0].published[0].item() == DENORMAL


def test_a_restart_before_the_first_round_of_a_term_keeps_the_state(reopen: Reopen) -> None:
    record = rounds(store := reopen(), begin(store), 5)
    for _ in range(6):
        record = begin(reopen())
    assert record.term == 7
    assert_holds(store := reopen(), record)
    record = rounds(store, begin(store), 4)
    assert_holds(reopen(), record)


def test_the_description_is_replaced_only_until_the_seed(reopen: Reopen) -> None:
    store = reopen()
    assert store.open_run({"settings": "early"}) == {"settings": "early"}
    assert store.open_run(DESCRIPTION) == DESCRIPTION
    begin(store)
    assert store.open_run({"settings": "late"}) == DESCRIPTION
    assert reopen().read_run() == DESCRIPTION


def test_a_term_that_was_seen_never_begins_again(reopen: Reopen) -> None:
    store = reopen()
    record = begin(store)
    store.load()
    with pytest.raises(DilocoError) as caught:
        store.begin_term(1, takeover(record, 1))
    assert caught.value.reason is Reason.STALE_TERM
    store.begin_term(5, takeover(record, 5))
    store.load()
    with pytest.raises(DilocoError, match="take 6 or higher") as caught:
        store.begin_term(3, takeover(record, 3))
    assert caught.value.reason is Reason.STALE_TERM
    assert store.highest_term() == 5


def test_a_term_without_a_round_counts(reopen: Reopen) -> None:
    store = reopen()
    store.load()
    store.begin_term(4)
    store = reopen()
    assert store.load() is None
    assert store.highest_term() == 4


def test_a_round_of_another_term_is_refused(reopen: Reopen) -> None:
    store = reopen()
    record = begin(store)
    late, fragments = following(record)
    store.load()
    with pytest.raises(DilocoError) as caught:
        store.commit(late, fragments)  # no term has begun since the restart
    assert caught.value.reason is Reason.STALE_TERM
    store.begin_term(2, takeover(record, 2))
    with pytest.raises(DilocoError) as caught:
        store.commit(late, fragments)
    assert caught.value.reason is Reason.STALE_TERM
    assert_holds(store, takeover(record, 2))


def test_committed_tensors_are_copies(reopen: Reopen) -> None:
    store = reopen()
    record = begin(store)
    record, fragments = following(record)
    store.commit(record, fragments)
    for tensors in fragments.values():
        tensors.momentum.fill_(7.0)
    loaded = store.load()
    assert loaded is not None
    loaded[1][0].residual.fill_(7.0)  # and so are the loaded ones: writable, and nobody else's
    assert_holds(store, record)


@pytest.mark.parametrize("shared", ["same tensor", "one buffer"])
def test_tensors_may_share_memory(reopen: Reopen, shared: str) -> None:
    record, fragments = seed()
    zeros = torch.zeros(2, SIZES[0])
    fragments[0] = FragmentState(
        published=fragments[0].published,
        residual=zeros[0],
        momentum=zeros[0] if shared == "same tensor" else zeros[1],
    )
    store = reopen()
    store.load()
    store.open_run(DESCRIPTION)
    store.begin_term(1)
    store.commit(record, fragments)
    loaded = reopen().load()
    assert loaded is not None
    assert loaded[1][0].momentum.tolist() == [0.0] * SIZES[0]


def test_misuse_is_caught_before_anything_is_written(reopen: Reopen) -> None:
    store = reopen()
    record = begin(store)
    after, fragments = following(record)
    other = {(p + 1) % 3: tensors for p, tensors in fragments.items()}
    swapped = {
        p: FragmentState(published=t.momentum, residual=t.residual, momentum=t.published)
        for p, t in fragments.items()
    }
    doubled = {
        p: FragmentState(published=t.published, residual=t.residual.double(), momentum=t.momentum)
        for p, t in fragments.items()
    }
    for wrong in ({}, other, swapped, doubled):
        with pytest.raises(AssertionError):
            store.commit(after, wrong)
    with pytest.raises(AssertionError):
        store.commit(record, seed()[1])  # the same t again
    assert_holds(store, record)


# -- the disk alone -------------------------------------------------------------------------------


def open_disk(path: Path, **options: object) -> DiskStore:
    return DiskStore(path, RUN, **options)  # type: ignore[arg-type]


def names(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def test_the_layout_on_disk_is_the_documented_one(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    rounds(store, begin(store), 1)
    assert names(tmp_path) == {
        "run.json",
        "group-000/lock",
        "group-000/term-00000001/round-0000000000.json",
        "group-000/term-00000001/round-0000000001.json",
        "group-000/term-00000001/fragment-0000-0000000000.safetensors",
        "group-000/term-00000001/fragment-0001-0000000000.safetensors",
        "group-000/term-00000001/fragment-0002-0000000000.safetensors",
        "group-000/term-00000001/fragment-0001-0000000001.safetensors",
    }
    store.close()


@pytest.mark.parametrize("keep_rounds", [1, 2, 4])
def test_retention_keeps_the_last_records_and_every_file_they_name(
    tmp_path: Path, keep_rounds: int
) -> None:
    store = open_disk(tmp_path, keep_rounds=keep_rounds)
    record = rounds(store, begin(store), 20)
    kept = sorted(tmp_path.rglob("round-*.json"))
    assert [int(p.stem[6:]) for p in kept] == list(range(21 - keep_rounds, 21))
    named = set()
    for path in kept:
        for fragment, ref in enumerate(json.loads(path.read_text())["files"]):
            named.add(f"fragment-{fragment:04d}-{ref['global_step']:010d}.safetensors")
    assert {p.name for p in tmp_path.rglob("*.safetensors")} == named
    store.close()
    store = open_disk(tmp_path, keep_rounds=keep_rounds)
    assert_holds(store, record)
    record = rounds(store, begin(store), 1)
    store.close()
    # the new term has merged one fragment: the others still lie in the old one
    store = open_disk(tmp_path, keep_rounds=keep_rounds)
    assert_holds(store, record)
    store.close()


def test_many_restarts_do_not_fill_the_disk(tmp_path: Path) -> None:
    for _ in range(12):
        store = open_disk(tmp_path, keep_rounds=2, keep_terms=3)
        record = rounds(store, begin(store), 4)
        store.close()
    terms = sorted(p.name for p in (tmp_path / "group-000").glob("term-*"))
    assert terms == ["term-00000010", "term-00000011", "term-00000012"]
    assert len(list(tmp_path.rglob("round-*.json"))) == 6
    store = open_disk(tmp_path)
    assert_holds(store, record)
    store.close()


def test_any_kept_record_can_be_gone_back_to(tmp_path: Path) -> None:
    """Moving the newest record away is the remedy that the errors name."""
    store = open_disk(tmp_path)
    made = [begin(store)]
    for _ in range(9):
        made.append(rounds(store, made[-1], 1))
    store.close()
    for back in range(3):
        max(tmp_path.rglob("round-*.json")).unlink()
        store = open_disk(tmp_path)
        assert_holds(store, made[-2 - back])
        store.close()


def test_async_removes_old_rounds_too(tmp_path: Path) -> None:
    store = open_disk(tmp_path, durability="async", keep_rounds=2)
    record = begin(store)
    for _ in range(12):
        record = rounds(store, record, 1)
        assert len(list(tmp_path.rglob("round-*.json"))) <= 4
    store.close()
    store = open_disk(tmp_path)
    assert_holds(store, record)
    store.close()


def _hold(path: str, ready: multiprocessing.synchronize.Event) -> None:
    store = DiskStore(path, RUN)
    begin(store)
    ready.set()
    threading.Event().wait()


def test_a_second_writer_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    """Another process, killed without a chance to clean up."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path), ready))
    process.start()
    try:
        assert ready.wait(120)
        with pytest.raises(DilocoError, match=f"{tmp_path}.*{process.pid}") as caught:
            open_disk(tmp_path)
        assert caught.value.reason is Reason.STORE_LOCKED
    finally:
        process.kill()
        process.join()
    store = open_disk(tmp_path)
    assert_holds(store, seed()[0])
    store.close()


def test_a_second_writer_in_one_process_is_refused_too(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    with pytest.raises(DilocoError, match=str(tmp_path)) as caught:
        open_disk(tmp_path)
    assert caught.value.reason is Reason.STORE_LOCKED
    store.close()
    store.close()
    open_disk(tmp_path).close()


def test_the_store_of_another_run_is_refused(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    begin(store)
    store.close()
    other = DiskStore(tmp_path, "run-2")
    for call in (other.read_run, other.load, lambda: other.open_run(DESCRIPTION)):
        with pytest.raises(DilocoError, match=r"run-1.*run-2") as caught:
            call()
        assert caught.value.reason is Reason.RUN_MISMATCH
    other.close()


def test_a_path_that_is_no_directory_gives_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DilocoError, match="file") as caught:
            open_disk(path)
        assert caught.value.reason is Reason.STORAGE_FAILED
