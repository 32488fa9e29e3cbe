"""Crashes, damage and full disks: what was committed is found again, or refused by name."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.store import DiskStore
from synchronizer_server.store.envelope import (
    Durability,
    decode_fragment,
    decode_record,
    encode_fragment,
    encode_record,
)
from tests.synchronizer.store_scenario import (
    DESCRIPTION,
    RUN,
    assert_holds,
    begin,
    following,
    rounds,
    seed,
    takeover,
)

OPERATIONS = ["replace", "fsync", "unlink", "mkdir"]


class Crash(BaseException):
    """The process ends here; no handler of ours may run."""


@contextlib.contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, operation: str, at: int, error: BaseException, *, after: bool
) -> Iterator[list[int]]:
    """Lets the n-th call of one file operation fail, before or after it took effect.

    Yields the number of calls so far, so that a test can tell when n is beyond the last call.
    """
    real = getattr(os, operation)
    calls = [0]

    def fake(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] != at:
            return real(*args, **kwargs)
        if after:
            with contextlib.suppress(FileNotFoundError):
                real(*args, **kwargs)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fake)
        yield calls


def open_disk(path: Path, durability: Durability = "disk", keep_rounds: int = 2) -> DiskStore:
    return DiskStore(path, RUN, durability=durability, keep_rounds=keep_rounds)


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


@contextlib.contextmanager
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Logs what is forced out and what gets its name, in order."""
    log: list[str] = []
    fsync, rename = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        log.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def logged_replace(source: Path, target: Path) -> None:
        log.append(f"name {target.name}")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", logged_fsync)
        patch.setattr(os, "replace", logged_replace)
        yield log


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


# -- damage ---------------------------------------------------------------------------------------


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


def refused(store: DiskStore, reason: Reason, file: Path) -> None:
    with pytest.raises(DilocoError, match="restore it from a backup") as caught:
        store.load()
    assert caught.value.reason is reason
    assert str(file) in caught.value.message


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


# -- async: a crash of the machine ----------------------------------------------------------------


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
