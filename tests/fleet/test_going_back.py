"""Going back to a snapshot on one machine: every store of the run, and every learner's part."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.snapshots import part_name
from decoupled_diloco.versions import Incarnation
from diloco_fleet.going_back import forget_resume, list_snapshots, resume_from
from diloco_fleet.run_files import RunFiles
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.store import DiskStore, Manifest
from synchronizer_server.store.base import RoundStore
from tests.synchronizer.store_scenario import (
    DESCRIPTION,
    RUN,
    begin,
    bits,
    following,
    rounds,
    seed,
    state_of,
    takeover,
)
from tests.synchronizer.test_store_snapshots import name_of


def open_store(files: RunFiles, index: int) -> DiskStore:
    return DiskStore(files.store_of(index), RUN, snapshots=files.snapshots)


def follow(store: RoundStore, count: int) -> None:
    """A standby's store: the same rounds, installed."""
    store.load()
    store.open_run(DESCRIPTION)
    record, fragments = seed()
    store.install(record, fragments)
    for _ in range(count):
        record, fragments = following(record)
        store.install(record, fragments)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


def taken(files: RunFiles) -> RoundRecord:
    """A snapshot of round 5 of which learner b's part is missing; then six more rounds."""
    store = open_store(files, 0)
    cut = rounds(store, begin(store), 5)
    store.pin(name_of(cut))
    (files.snapshots / str(name_of(cut)) / part_name("a")).write_bytes(b"the part of a")
    participants = {"a": Incarnation(1, 1), "b": Incarnation(1, 1)}
    store.keep_snapshot(
        Manifest(
            name=name_of(cut), run_id=RUN, group=0, versions=(), participants=participants,
            left_out={"c": "left"},
        ),
        2,
    )  # fmt: skip
    rounds(store, cut, 6)
    store.close()
    return cut


@pytest.mark.parametrize("standby", [False, True], ids=["alone", "with a standby"])
def test_all_stores_go_back_under_one_term_and_the_parts_are_laid_out(
    files: RunFiles, standby: bool
) -> None:
    cut = taken(files)
    if standby:
        second = open_store(files, 1)
        follow(second, 11)
        begin(second)  # it has led, so its terms are ahead
        second.close()
    said: list[str] = []
    resume_from(files, RUN, "latest", said.append)
    assert "6 newer rounds are given up" in said[0]
    assert said[1].startswith("b: its part ")
    assert files.resume_part("a").read_bytes() == b"the part of a"
    assert not files.resume_part("b").exists()
    for index in (0, 1) if standby else (0,):
        store = open_store(files, index)
        loaded = store.load()
        assert loaded is not None
        assert loaded[0] == takeover(cut, 3 if standby else 2)
        assert bits(loaded[1]) == bits(state_of(cut))
        store.close()
    assert list_snapshots(files) == ["1.5  a, b  left out: c (left)"]
    forget_resume(files)
    forget_resume(files)
    assert not files.resume_part("a").exists()


def test_a_snapshot_that_is_not_there_changes_nothing(files: RunFiles) -> None:
    taken(files)
    with pytest.raises(DilocoError, match=r"there are: 1\.5") as caught:
        resume_from(files, RUN, "4", lambda _: None)
    assert caught.value.reason is Reason.SNAPSHOT_NOT_FOUND
    store = open_store(files, 0)
    loaded = store.load()
    assert loaded is not None
    assert loaded[0].global_step == 11
    store.close()


def test_without_any_the_list_says_so(files: RunFiles) -> None:
    assert list_snapshots(files) == [f"there is no complete snapshot in {files.snapshots}"]


def test_a_run_that_nobody_ever_joined_has_no_snapshot(files: RunFiles) -> None:
    for make in (lambda: None, lambda: open_store(files, 0).close()):
        make()
        with pytest.raises(DilocoError) as caught:
            resume_from(files, RUN, "latest", print)
        assert caught.value.reason is Reason.SNAPSHOT_NOT_FOUND
        assert "no learner of this run has ever joined" in caught.value.message
