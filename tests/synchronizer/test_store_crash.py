"""Crashes and full disks: what was committed is found again, and a failed step is undone."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.store import DiskStore
from tests.synchronizer.store_faults import Crash, failing, logged, open_disk
from tests.synchronizer.store_scenario import (
    DESCRIPTION,
    assert_holds,
    begin,
    following,
    rounds,
    seed,
    takeover,
)

OPERATIONS = ["replace", "fsync", "unlink", "mkdir"]


def act(store: DiskStore, before: RoundRecord | None, after: RoundRecord) -> None:
    """The commit, seed or start of a term that makes ``after`` the newest record."""
    if after.fragment is not None:
        assert before is not None
        store.commit(*following(before))
    elif after.global_step == 0 and after.term == 1:
        store.open_run(DESCRIPTION)
        store.begin_term(1)
        store.commit(*seed())
    else:
        store.begin_term(after.term, after)


def failure_of(call: Callable[[], None]) -> DilocoError | None:
    try:
        call()
    except DilocoError as error:
        return error
    return None


def prepare(store: DiskStore, scenario: str) -> tuple[RoundRecord | None, RoundRecord]:
    """Brings a store to the brink of one step; returns the newest record before and after it."""
    if scenario == "seed":
        store.load()
        return None, seed()[0]
    # enough rounds that a commit also removes old ones
    before = rounds(store, begin(store), 5)
    if scenario == "round":
        return before, following(before)[0]
    store.load()
    return before, takeover(before, 2)


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("scenario", ["seed", "round", "takeover"])
def test_a_crash_at_any_file_operation_leaves_the_record_before_or_after(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    operation: str,
    after_effect: bool,
) -> None:
    """And the run goes on from there, in the next term, without a trace of the crash."""
    crashes = 0
    for at in range(1, 1000):
        path = tmp_path / str(at)
        store = open_disk(path)
        before, after = prepare(store, scenario)
        with failing(monkeypatch, operation, at, Crash(), after=after_effect) as calls:
            try:
                act(store, before, after)
            except Crash:
                crashes += 1
        store.close()
        store = open_disk(path)
        loaded = store.load()
        if calls[0] < at:
            assert loaded is not None
            assert loaded[0] == after  # it went through: every operation has had its crash
            store.close()
            break
        if loaded is None:
            assert before is None
            assert store.highest_term() <= 1
        else:
            assert loaded[0] in (before, after)
            assert_holds(store, loaded[0])
        going_on = rounds(store, begin(store), 3)
        assert_holds(store, going_on)
        assert not list(path.rglob("*.tmp"))
        store.close()
    assert crashes == at - 1
    assert (crashes > 0) == (operation != "mkdir" or scenario != "round")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("operation", ["replace", "fsync"])
@pytest.mark.parametrize("scenario", ["seed", "round", "takeover"])
def test_a_failed_step_is_undone_and_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, operation: str, code: int
) -> None:
    for at in range(1, 1000):
        path = tmp_path / str(at)
        store = open_disk(path)
        before, after = prepare(store, scenario)
        error = OSError(code, os.strerror(code))
        with failing(monkeypatch, operation, at, error, after=False) as calls:
            failure = failure_of(lambda: act(store, before, after))  # noqa: B023 - called at once
        if calls[0] < at:
            assert failure is None
            assert at > 1
            store.close()
            return
        assert failure is not None
        full = code in (errno.ENOSPC, errno.EDQUOT)
        assert failure.reason is (Reason.DISK_FULL if full else Reason.STORAGE_FAILED)
        assert str(path) in failure.message
        # what another process would find now is the record before
        store.close()
        store = open_disk(path)
        loaded = store.load()
        assert (loaded[0] if loaded else None) == before
        assert not list(path.rglob("*.tmp"))
        store.close()
    pytest.fail("it never went through")


def test_a_record_gets_its_name_only_after_everything_it_names_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash of the machine asks for, and a crash of the process cannot show."""
    store = open_disk(tmp_path)
    record, fragments = following(begin(store))
    with logged(monkeypatch) as log:
        store.commit(record, fragments)
    store.close()
    fragment, round_record = "fragment-0001-0000000001.safetensors", "round-0000000001.json"
    assert log == [
        f"fsync {fragment}.tmp",
        f"name {fragment}",
        "fsync term-00000001",
        f"fsync {round_record}.tmp",
        f"name {round_record}",
        "fsync term-00000001",
    ]


def test_the_same_store_goes_on_after_a_failed_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(tmp_path)
    record = begin(store)
    num_failed = 0
    for at in range(1, 7):
        after, fragments = following(record)
        error = OSError(errno.ENOSPC, "No space left on device")
        with failing(monkeypatch, "fsync", at, error, after=False) as calls:
            try:
                store.commit(after, fragments)
            except DilocoError:
                num_failed += 1
        if calls[0] >= at:
            store.commit(after, fragments)  # the same round again
        record = after
    assert num_failed == 4  # fragment, its directory, record, its directory
    assert_holds(store, record)
    store.close()


def test_a_commit_whose_record_could_not_be_taken_back_is_replaced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(tmp_path)
    record, fragments = following(begin(store))
    eio = OSError(errno.EIO, "Input/output error")
    with (
        failing(monkeypatch, "fsync", 4, eio, after=False),
        failing(monkeypatch, "unlink", 2, eio, after=False),
        pytest.raises(DilocoError) as caught,
    ):
        store.commit(record, fragments)
    assert caught.value.reason is Reason.STORAGE_FAILED
    store.commit(record, fragments)
    assert_holds(store, record)
    store.close()


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    """A real refusal by the kernel: the message says where and how many bytes."""
    store = open_disk(tmp_path)
    record, fragments = following(begin(store))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(
            DilocoError, match=r"no room for \d{3} bytes at .*fragment-0001"
        ) as caught:
            store.commit(record, fragments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.reason is Reason.DISK_FULL
    assert int(caught.value.details["needed_bytes"]) > 100
    assert not list(tmp_path.rglob("*.tmp"))
    store.commit(record, fragments)
    assert_holds(store, record)
    store.close()


def test_trouble_with_old_rounds_does_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_disk(tmp_path)
    record = rounds(store, begin(store), 5)
    after, fragments = following(record)
    eacces = OSError(errno.EACCES, "Permission denied")
    with failing(monkeypatch, "unlink", 2, eacces, after=False) as calls:
        store.commit(after, fragments)
    assert calls[0] >= 2
    assert "old rounds could not be removed" in caplog.text
    record = rounds(store, after, 1)
    assert len(list(tmp_path.rglob("round-*.json"))) == 2  # the next commit caught up
    assert_holds(store, record)
    store.close()
