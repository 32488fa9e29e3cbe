"""What a standby leaves on the disk: old terms untouched, crashes survived, forced rounds safe."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.store import DiskStore
from tests.synchronizer.store_faults import Crash, failing, logged, open_disk
from tests.synchronizer.store_lineage import differing, follow, history, reason_of
from tests.synchronizer.store_scenario import (
    DESCRIPTION,
    assert_holds,
    begin,
    following,
    rounds,
    seed,
    state_of,
    takeover,
)


def files_below(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*.*") if file.is_file()}


def test_files_of_an_older_term_are_never_replaced(tmp_path: Path) -> None:
    """Also where the leader's lineage has another fragment of the same t."""
    store = open_disk(tmp_path)
    shared = rounds(store, begin(store), 4)
    rounds(store, shared, 1)
    term_1 = tmp_path / "group-000" / "term-00000001"
    before = files_below(term_1)
    record = following(takeover(shared, 2))[0]
    follow(store, record)
    after = files_below(term_1)
    assert set(after) <= set(before)
    assert all(before[file] == after[file] for file in after)
    assert_holds(store, record)
    store.close()


def test_two_histories_of_one_term_are_refused(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    store.load()
    store.open_run(DESCRIPTION)
    made = history(1)
    store.install(made[1], state_of(made[1]))
    (p,) = following(made[0])[1]
    forged_state = replace(state_of(made[1])[p], published=state_of(made[1])[p].published + 1)
    forged_version = replace(made[1].versions[p], digest=forged_state.digest())
    versions = tuple(forged_version if i == p else v for i, v in enumerate(made[2].versions))
    forged = replace(made[2], versions=versions)
    with pytest.raises(DilocoError, match="two histories") as caught:
        store.install(forged, state_of(made[2]) | {p: forged_state})
    assert caught.value.reason is Reason.STORE_CORRUPT
    assert_holds(store, made[1])
    store.close()


def test_another_runs_record_is_refused_by_an_empty_store(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    other = replace(seed()[0], run_id="another")
    assert reason_of(lambda: follow(store, other)) is Reason.RUN_MISMATCH
    assert store.load() is None
    store.close()


def test_records_lost_after_a_first_install_are_told(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    follow(store, history()[-3])
    store.close()
    for record in tmp_path.rglob("round-*.json"):
        record.unlink()
    store = open_disk(tmp_path)
    assert reason_of(store.load) is Reason.STORE_LOST
    store.close()


def test_retention_goes_on_under_installs(tmp_path: Path) -> None:
    store = open_disk(tmp_path, keep_rounds=2)
    store.load()
    store.open_run(DESCRIPTION)
    held: RoundRecord | None = None
    for record in history(num_terms=6, rounds_each=9):
        store.install(record, differing(record, held))
        held = record
        assert len(list(tmp_path.rglob("round-*.json"))) <= 6
        assert len(list((tmp_path / "group-000").glob("term-*"))) <= 5
    assert_holds(store, record)
    store.close()


OPERATIONS = ["replace", "fsync", "unlink", "mkdir"]


def prepare(path: Path, scenario: str) -> tuple[DiskStore, RoundRecord | None, RoundRecord]:
    """A store on the brink of an install; the newest record before and after it."""
    store = open_disk(path, durability="standby" if scenario == "behind" else "disk")
    if scenario == "empty":
        return store, None, history()[-3]
    before = rounds(store, begin(store), 3)
    after = following(takeover(before, 2))[0]
    if scenario == "divergent":
        before = rounds(store, before, 2)
    else:
        after = following(following(after)[0])[0]
    return store, before, after


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("scenario", ["empty", "behind", "divergent"])
def test_a_crash_at_any_file_operation_leaves_the_cut_before_or_after(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    operation: str,
    after_effect: bool,
) -> None:
    """And the same record can be installed then."""
    for at in range(1, 1000):
        path = tmp_path / str(at)
        store, before, after = prepare(path, scenario)
        crashed = False
        with failing(monkeypatch, operation, at, Crash(), after=after_effect) as calls:
            try:
                follow(store, after)
            except Crash:
                crashed = True
        store.close()
        store = open_disk(path)
        loaded = store.load()
        assert (loaded[0] if loaded else None) in ((before, after) if crashed else (after,))
        if loaded is not None:
            assert_holds(store, loaded[0])
        follow(store, after)
        assert_holds(store, after)
        going_on = rounds(store, begin(store), 1)
        assert_holds(store, going_on)
        assert not list(path.rglob("*.tmp"))
        store.close()
        if calls[0] < at:
            assert at > 1
            return
    pytest.fail("it never went through")


ADVANCE = st.sampled_from(["round", "several", "term"])
CRASH = st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 16), st.booleans())


def advanced(record: RoundRecord, how: str) -> RoundRecord:
    if how == "term":
        record = takeover(record, record.term + 1)
    for _ in range(4 if how == "several" else 1):
        record = following(record)[0]
    return record


@settings(max_examples=40)
@given(steps=st.lists(st.tuples(ADVANCE, CRASH), max_size=8), data=st.data())
def test_a_standby_that_crashes_again_and_again_ends_with_the_leaders_cut(
    steps: list[tuple[str, tuple[str, int, bool]]], data: st.DataObject
) -> None:
    durability = data.draw(st.sampled_from(["disk", "standby"]))
    tip = seed()[0]
    with tempfile.TemporaryDirectory() as scratch:
        store, held = open_disk(Path(scratch), durability), None
        for how, (operation, at, after_effect) in steps:
            tip = advanced(tip, how)
            crash = Crash()
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
                with failing(patch, operation, at, crash, after=after_effect):
                    follow(store, tip)
                held = tip
            store.close()
            store = open_disk(Path(scratch), durability)
            loaded = store.load()
            if loaded is None:
                assert held is None
                continue
            assert loaded[0] in (held, tip)
            assert_holds(store, loaded[0])
            held = loaded[0]
        follow(store, tip)
        assert_holds(store, tip)
        store.close()


def test_a_forced_round_takes_with_it_what_its_cut_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(tmp_path, durability="standby", keep_rounds=8)
    record = begin(store)
    with logged(monkeypatch) as log:
        record = rounds(store, record, 2)
    assert not [line for line in log if line.startswith("fsync")]
    record, fragments = following(record)
    with logged(monkeypatch) as log:
        store.commit(record, fragments, force=True)
    named = log.index("name round-0000000003.json")
    forced = [line.removeprefix("fsync ").removesuffix(".tmp") for line in log[:named]]
    for fragment, t in ((0, 3), (1, 1), (2, 2)):
        assert f"fragment-{fragment:04d}-{t:010d}.safetensors" in forced
    assert "round-0000000003.json" in forced
    assert log[-1] == "fsync term-00000001"
    with logged(monkeypatch) as log:
        record = rounds(store, record, 1)
    assert not [line for line in log if line.startswith("fsync")]
    store.close()


def damage_newest(path: Path) -> None:
    max(path.rglob("round-*.json")).write_bytes(b"")


def test_a_forced_round_is_never_passed_over(tmp_path: Path) -> None:
    """One that was left to the kernel is: it may be torn."""
    for force in (False, True):
        path = tmp_path / str(force)
        store = open_disk(path, durability="standby", keep_rounds=8)
        before = rounds(store, begin(store), 2)
        after, fragments = following(before)
        store.commit(after, fragments, force=force)
        store.close()
        (p,) = fragments
        next(path.rglob(f"fragment-{p:04d}-0000000003.safetensors")).write_bytes(b"")
        store = open_disk(path, durability="standby")
        if force:
            assert reason_of(store.load) is Reason.STORE_CORRUPT
        else:
            assert_holds(store, before)
        store.close()


def test_a_torn_round_after_a_forced_one_is_passed_over(tmp_path: Path) -> None:
    store = open_disk(tmp_path, durability="standby", keep_rounds=8)
    forced, fragments = following(begin(store))
    store.commit(forced, fragments, force=True)
    rounds(store, forced, 1)
    store.close()
    damage_newest(tmp_path)
    store = open_disk(tmp_path, durability="standby")
    assert_holds(store, forced)
    store.close()


def test_the_first_record_of_a_term_is_forced_out_and_never_passed_over(tmp_path: Path) -> None:
    """Going back behind it would go back to another lineage."""
    store = open_disk(tmp_path, durability="standby", keep_rounds=8)
    shared = rounds(store, begin(store), 1)
    rounds(store, shared, 1)
    follow(store, following(takeover(shared, 2))[0])
    store.close()
    damage_newest(tmp_path)
    store = open_disk(tmp_path, durability="standby")
    assert reason_of(store.load) is Reason.STORE_CORRUPT
    store.close()


def take_all(path: Path) -> None:
    shutil.rmtree(path)


def take_the_terms(path: Path) -> None:
    for term in path.glob("group-*/term-*"):
        shutil.rmtree(term)


def take_a_fragment(path: Path) -> None:
    max(path.rglob("fragment-0001-*.safetensors")).unlink()


def put_a_copy_in_its_place(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    shutil.rmtree(path)
    copy.rename(path)


@pytest.mark.parametrize(
    "take", [take_all, take_the_terms, take_a_fragment, put_a_copy_in_its_place]
)
def test_nothing_is_built_on_a_store_that_was_taken_away(
    tmp_path: Path, take: Callable[[Path], None]
) -> None:
    """A record on top of it would name files that nobody has."""
    path = tmp_path / "store"
    store = open_disk(path)
    record = rounds(store, begin(store), 2)
    take(path)
    before = files_below(path)
    works: list[Callable[[], object]] = [
        lambda: store.commit(*following(record)),
        lambda: store.begin_term(2, takeover(record, 2)),
        lambda: store.install(takeover(record, 2), state_of(record)),
        lambda: store.open_run(DESCRIPTION),
    ]
    for work in works:
        assert reason_of(work) is Reason.STORE_REMOVED
    assert files_below(path) == before
    store.close()


def test_what_was_taken_away_is_not_read_as_an_empty_store(tmp_path: Path) -> None:
    store = open_disk(tmp_path / "store")
    begin(store)
    take_all(tmp_path / "store")
    assert reason_of(store.load) is Reason.STORE_REMOVED
    store.close()


def test_a_store_that_is_put_back_goes_on(tmp_path: Path) -> None:
    """A volume that was away for a moment."""
    path = tmp_path / "store"
    store = open_disk(path)
    record = rounds(store, begin(store), 2)
    path.rename(tmp_path / "away")
    round_, fragments = following(record)
    assert reason_of(lambda: store.commit(round_, fragments)) is Reason.STORE_REMOVED
    (tmp_path / "away").rename(path)
    store.commit(round_, fragments)
    assert_holds(store, round_)
    store.close()
