"""Snapshots in the stores: one conformance suite, and what the disk alone must do."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.snapshots import MANIFEST, SnapshotName
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.store import Manifest, RoundStore
from tests.synchronizer.store_faults import Crash, failing, open_disk
from tests.synchronizer.store_reopen import Reopen, reopening
from tests.synchronizer.store_scenario import (
    RUN,
    assert_holds,
    begin,
    bits,
    following,
    rounds,
    state_of,
    takeover,
)


@pytest.fixture(params=["memory", "disk", "async"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    with reopening(request.param, tmp_path) as restart:
        yield restart


def name_of(record: RoundRecord) -> SnapshotName:
    return SnapshotName(record.term, record.global_step)


def manifest_of(record: RoundRecord) -> Manifest:
    return Manifest(
        name=name_of(record),
        run_id=RUN,
        group=0,
        versions=tuple(str(version) for version in record.versions),
        participants={"a": Incarnation(1, 1), "b": Incarnation(1, 2)},
        left_out={"c": "gone"},
    )


def snapshot(store: RoundStore, record: RoundRecord, keep: int = 2) -> SnapshotName:
    store.pin(name_of(record))
    store.keep_snapshot(manifest_of(record), keep)
    return name_of(record)


def names(store: RoundStore) -> list[SnapshotName]:
    return [manifest.name for manifest in store.snapshots()]


def go_back(store: RoundStore, name: SnapshotName) -> RoundRecord:
    """As a resume does: the snapshot's cut under a new term."""
    record, fragments = store.go_back(name)
    assert bits(fragments) == bits(state_of(record))
    taken_over = takeover(record, 1 + store.highest_term())
    store.begin_term(taken_over.term, taken_over)
    return taken_over


def test_a_snapshot_brings_its_round_back_long_after_the_store_has_removed_it(
    reopen: Reopen,
) -> None:
    store = reopen()
    cut = rounds(store, begin(store), 5)
    name = snapshot(store, cut)
    newest = rounds(store, cut, 30)
    store = reopen()
    assert_holds(store, newest)
    assert store.snapshots() == [manifest_of(cut)]
    record = go_back(store, name)
    assert record == takeover(cut, 2)
    assert_holds(reopen(), record)


def test_the_run_goes_on_from_there_and_may_go_back_again(reopen: Reopen) -> None:
    store = reopen()
    cut = rounds(store, begin(store), 5)
    name = snapshot(store, cut)
    rounds(store, cut, 9)
    for term in (2, 4, 6, 8):
        record = go_back(store := reopen(), name)
        assert record.term == term
        record = rounds(store, record, 7)
        assert_holds(store := reopen(), record)
        assert begin(store) == takeover(record, term + 1), "an ordinary restart in between"
        record = rounds(store, takeover(record, term + 1), 2)
        assert_holds(reopen(), record)


def test_the_same_step_on_another_lineage_is_another_snapshot(reopen: Reopen) -> None:
    store = reopen()
    first = rounds(store, begin(store), 4)
    snapshot(store, first)
    second = rounds(store, first, 3)
    snapshot(store, second)
    store = reopen()
    again = rounds(store, go_back(store, name_of(first)), 3)
    assert again.global_step == second.global_step
    snapshot(store, again, keep=3)
    assert names(store) == [name_of(first), name_of(second), name_of(again)]
    store = reopen()
    assert go_back(store, name_of(second)).versions == second.versions


def test_only_the_newest_complete_ones_are_kept(reopen: Reopen) -> None:
    record = begin(store := reopen())
    for _ in range(5):
        record = rounds(store, record, 2)
        snapshot(store, record, keep=2)
    assert [name.global_step for name in names(store)] == [8, 10]
    snapshot(store, record := rounds(store, record, 2), keep=1)
    assert names(store) == [name_of(record)]


def test_an_incomplete_one_replaces_nothing_and_is_gone_after_a_restart(reopen: Reopen) -> None:
    store = reopen()
    complete = rounds(store, begin(store), 3)
    snapshot(store, complete)
    pending = rounds(store, complete, 3)
    store.pin(name_of(pending))
    assert names(store) == [name_of(complete)]
    with pytest.raises(DilocoError, match=r"there are: 1\.3") as caught:
        store.go_back(name_of(pending))
    assert caught.value.reason is Reason.SNAPSHOT_NOT_FOUND
    begin(store := reopen())
    assert names(store) == [name_of(complete)]
    go_back(reopen(), name_of(complete))


def test_a_dropped_one_is_gone_and_dropping_it_again_is_fine(reopen: Reopen) -> None:
    store = reopen()
    record = rounds(store, begin(store), 3)
    store.pin(name_of(record))
    store.drop_snapshot(name_of(record))
    store.drop_snapshot(name_of(record))
    assert store.snapshots() == []
    assert_holds(store, record)


def test_going_back_changes_nothing_until_the_term_begins(reopen: Reopen) -> None:
    store = reopen()
    cut = rounds(store, begin(store), 3)
    snapshot(store, cut)
    newest = rounds(store, cut, 4)
    store = reopen()
    store.go_back(name_of(cut))
    assert_holds(reopen(), newest)


# -- the disk alone ------------------------------------------------------------------------------


def test_rounds_given_up_stay_on_the_disk(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    cut = rounds(store, begin(store), 3)
    snapshot(store, cut)
    newest = rounds(store, cut, 4)
    rounds(store, go_back(store, name_of(cut)), 5)
    store.close()
    (tmp_path / "group-000" / "term-00000002").rename(tmp_path / "elsewhere")
    assert_holds(store := open_disk(tmp_path), newest)
    store.close()


def test_without_hard_links_the_files_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    store = open_disk(tmp_path)
    cut = rounds(store, begin(store), 3)
    monkeypatch.setattr(os, "link", refuse)
    name = snapshot(store, cut)
    rounds(store, cut, 9)
    go_back(store, name)
    store.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
@pytest.mark.parametrize("kind", ["round", "fragment", MANIFEST])
def test_a_damaged_one_is_refused_and_the_store_goes_on_without_it(
    tmp_path: Path, kind: str, damage: str
) -> None:
    store = open_disk(tmp_path)
    cut = rounds(store, begin(store), 5)
    name = snapshot(store, cut)
    newest = rounds(store, cut, 9)
    directory = tmp_path / "snapshots" / str(name)
    path = next(p for p in sorted(directory.iterdir()) if p.name.startswith(kind))
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flip":
        content[len(content) // 2] ^= 1
    if damage != "lose":
        path.write_bytes(content if damage == "flip" else content[:-1])
    store.close()
    store = open_disk(tmp_path)
    with pytest.raises(DilocoError) as caught:
        store.go_back(name)
    expected = {
        "round": {Reason.STORE_CORRUPT},
        "fragment": {Reason.STORE_CORRUPT, Reason.STORE_LOST},
        MANIFEST: {Reason.SNAPSHOT_NOT_FOUND},
    }
    assert caught.value.reason in expected[kind]
    assert_holds(store, newest)
    store.close()


def test_it_helps_where_what_is_newer_is_damaged(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    cut = rounds(store, begin(store), 5)
    name = snapshot(store, cut)
    newest = rounds(store, cut, 9)
    for path in (tmp_path / "group-000").rglob(f"*-{newest.global_step:010d}.*"):
        path.write_bytes(b"")
    store.close()
    store = open_disk(tmp_path)
    with pytest.raises(DilocoError):
        store.load()
    record = go_back(store, name)
    store.close()
    assert_holds(store := open_disk(tmp_path), record)
    store.close()


OPERATIONS = ["replace", "fsync", "unlink", "link", "mkdir", "rmdir"]


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_crash_at_any_file_operation_leaves_the_complete_ones_before_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, after_effect: bool
) -> None:
    crashes = 0
    for at in range(1, 1000):
        path = tmp_path / str(at)
        store = open_disk(path)
        first = rounds(store, begin(store), 2)
        snapshot(store, first)
        second = rounds(store, first, 6)
        with failing(monkeypatch, operation, at, Crash(), after=after_effect) as calls:
            try:
                snapshot(store, second, keep=1)
            except Crash:
                crashes += 1
        store.close()
        store = open_disk(path)
        assert_holds(store, second)
        there = names(store)
        if calls[0] < at:
            assert there == [name_of(second)]
            store.close()
            break
        assert there in (
            [name_of(first)],
            [name_of(first), name_of(second)],
            [name_of(second)],
        )
        record = begin(store)
        left = {p.name for p in (path / "snapshots").iterdir()}
        assert left == {str(name) for name in there}, "leftovers are cleaned at the start"
        for name in there:
            assert store.go_back(name)[0].global_step == name.global_step
        store.load()
        begin(store)
        assert record.global_step == second.global_step
        store.close()
    assert crashes == at - 1
    assert crashes > 0


@pytest.mark.parametrize("operation", ["replace", "fsync", "link"])
def test_a_full_disk_fails_the_snapshot_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    failures = 0
    for at in range(1, 1000):
        store = open_disk(tmp_path / str(at))
        first = rounds(store, begin(store), 2)
        snapshot(store, first)
        second = rounds(store, first, 2)
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with failing(monkeypatch, operation, at, error, after=False) as calls:
            try:
                snapshot(store, second)
            except DilocoError as refused:
                assert refused.reason is Reason.DISK_FULL  # noqa: PT017 - it may go through
                failures += 1
        if calls[0] < at:
            store.close()
            break
        if name_of(second) not in names(store):
            store.drop_snapshot(name_of(second))
            assert names(store) == [name_of(first)]
        assert_holds(store, second)
        begin(store)
        record, fragments = following(takeover(second, 2))
        store.commit(record, fragments)
        store.close()
    assert failures > 0


@pytest.mark.parametrize("operation", ["replace", "fsync", "link", "mkdir"])
def test_a_crash_while_going_back_leaves_the_newest_round_or_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    for at in range(1, 1000):
        path = tmp_path / str(at)
        store = open_disk(path)
        cut = rounds(store, begin(store), 2)
        snapshot(store, cut)
        newest = rounds(store, cut, 9)
        store.close()
        store = open_disk(path)
        crash = failing(monkeypatch, operation, at, Crash(), after=False)
        with contextlib.suppress(Crash), crash as calls:
            go_back(store, name_of(cut))
        store.close()
        store = open_disk(path)
        loaded = store.load()
        assert loaded is not None
        assert loaded[0] in (newest, takeover(cut, 2))
        assert_holds(store, loaded[0])
        going_on = go_back(store, name_of(cut))
        assert_holds(store, going_on)
        store.close()
        if calls[0] < at:
            break
    assert at > 1


@pytest.mark.parametrize("text", ["", "1", "1.", "01.2", "1.2.3", "-1.2", "1.2 ", "../1.2", "a.b"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(DilocoError, match="names no snapshot"):
        SnapshotName.parse(text)


def test_a_name_reads_as_it_is_written() -> None:
    assert SnapshotName.parse("12.3400") == SnapshotName(12, 3400)
    assert str(SnapshotName(12, 3400)) == "12.3400"
    assert SnapshotName(2, 5) > SnapshotName(1, 900), "a later term has gone back"
