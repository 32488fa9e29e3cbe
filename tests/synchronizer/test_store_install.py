"""What a standby writes: another process's records, whatever its own store held before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store import DiskStore, MemoryStore, RoundStore
from tests.synchronizer.store_faults import Crash, failing, logged, open_disk
from tests.synchronizer.store_scenario import (
    DESCRIPTION,
    RUN,
    Fragments,
    assert_holds,
    begin,
    following,
    rounds,
    seed,
    state_of,
    takeover,
)

Reopen = Callable[[], RoundStore]


@pytest.fixture(params=["memory", "disk", "standby", "async"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Gives the store as a restarted synchronizer finds it; the one before is closed."""
    opened: list[RoundStore] = []

    def restart() -> RoundStore:
        if opened:
            opened[-1].close()
        if request.param == "memory":
            opened.append(opened[-1] if opened else MemoryStore())
        else:
            store = DiskStore(tmp_path / "store", RUN, durability=request.param, keep_rounds=2)
            opened.append(store)
        return opened[-1]

    yield restart
    if opened:
        opened[-1].close()


def history(num_terms: int = 3, rounds_each: int = 4) -> list[RoundRecord]:
    """Every record of a leader's lineage, take-overs included."""
    made = [seed()[0]]
    for term in range(2, num_terms + 2):
        for _ in range(rounds_each):
            made.append(following(made[-1])[0])
        made.append(takeover(made[-1], term))
    return made


def differing(record: RoundRecord, held: RoundRecord | None) -> Fragments:
    """The tensors that must come with a record."""
    return {
        p: tensors
        for p, tensors in state_of(record).items()
        if held is None or held.versions[p] != record.versions[p]
    }


def follow(store: RoundStore, record: RoundRecord) -> None:
    """Installs a record on top of what the store holds."""
    loaded = store.load()
    store.open_run(DESCRIPTION)
    store.install(record, differing(record, loaded[0] if loaded else None))


def reason_of(call: Callable[[], None]) -> Reason:
    with pytest.raises(DilocoError) as caught:
        call()
    return caught.value.reason


def test_an_empty_store_takes_any_record_of_a_lineage(reopen: Reopen) -> None:
    record = history()[-2]
    follow(reopen(), record)
    assert_holds(reopen(), record)
    assert reopen().highest_term() == record.term


def test_records_that_come_one_by_one_are_kept_one_by_one(reopen: Reopen) -> None:
    store = reopen()
    held: RoundRecord | None = None
    store.load()
    store.open_run(DESCRIPTION)
    for record in history():
        store.install(record, differing(record, held))
        held = record
    assert_holds(reopen(), record)


def test_a_store_that_is_many_rounds_behind_catches_up_in_one_step(reopen: Reopen) -> None:
    made = history()
    follow(reopen(), made[1])
    store = reopen()
    follow(store, made[-3])
    assert_holds(reopen(), made[-3])


def test_a_tail_that_the_leader_does_not_have_is_given_up(reopen: Reopen) -> None:
    """The old leader merged on after its standby had taken over at an earlier round."""
    store = reopen()
    shared = rounds(store, begin(store), 4)
    rounds(store, shared, 3)  # at t = 5, 6, 7, never published
    final = following(takeover(shared, 2))[0]
    final = following(final)[0]
    store = reopen()
    follow(store, final)
    assert_holds(store, final)
    assert_holds(reopen(), final)
    final = rounds(store := reopen(), begin(store), 5)
    assert final.term == 3
    assert_holds(reopen(), final)


def test_a_take_over_follows_an_install(reopen: Reopen) -> None:
    """On the same object and on a new one."""
    record = history()[-2]
    store = reopen()
    follow(store, record)
    for fresh in (False, True):
        if fresh:
            store = reopen()
            loaded = store.load()
            assert loaded is not None
            record = loaded[0]
        record = takeover(record, record.term + 1)
        store.begin_term(record.term, record)
        record = rounds(store, record, 4)
        assert_holds(store, record)


def test_installing_ends_the_term_that_was_current(reopen: Reopen) -> None:
    """A leader that was deposed follows with the same store, and commits nothing more."""
    store = reopen()
    record = rounds(store, begin(store), 2)
    other = following(takeover(record, 2))[0]
    store.install(other, differing(other, record))
    late, fragments = following(record)
    assert reason_of(lambda: store.commit(late, fragments)) is Reason.STALE_TERM
    assert_holds(store, other)


def test_a_record_that_the_store_has_changes_nothing(reopen: Reopen) -> None:
    made = history(1)
    store = reopen()
    follow(store, made[0])
    for record in made[1:4]:
        follow(store, record)
    for again in made[1:4]:
        store.install(again, {})
        assert_holds(store, made[3])


def test_fragments_that_need_not_come_are_not_taken(reopen: Reopen) -> None:
    made = history(1)
    store = reopen()
    follow(store, made[0])
    everything = state_of(made[1])
    kept = next(p for p in everything if made[0].versions[p] == made[1].versions[p])
    everything[kept] = replace(everything[kept], residual=everything[kept].residual + 1)
    store.install(made[1], everything)
    assert_holds(reopen(), made[1])


def test_a_lower_term_is_refused(reopen: Reopen) -> None:
    store = reopen()
    record = history()[-1]
    follow(store, record)
    stale = following(replace(record, term=record.term - 1))[0]
    assert reason_of(lambda: follow(store, stale)) is Reason.STALE_TERM
    assert_holds(reopen(), record)


def test_a_term_that_began_here_without_a_round_counts(reopen: Reopen) -> None:
    store = reopen()
    store.load()
    store.open_run(DESCRIPTION)
    store.begin_term(4)
    assert reason_of(lambda: follow(store, seed()[0])) is Reason.STALE_TERM
    follow(store, seed(4)[0])
    assert_holds(reopen(), seed(4)[0])


def unfit(record: RoundRecord, fragments: Fragments) -> list[tuple[str, RoundRecord, Fragments]]:
    """Records and fragments that do not make a cut on top of the record before, and the word."""
    (p,) = fragments
    tensors = fragments[p]
    swapped = FragmentState(
        published=tensors.momentum, residual=tensors.residual, momentum=tensors.published
    )
    double = replace(tensors, residual=tensors.residual.double())
    others = tuple(replace(v, term=0) if i != p else v for i, v in enumerate(record.versions))
    return [
        ("did not come", record, {}),
        ("did not come", replace(record, versions=others), fragments),
        ("is not", record, {p: swapped}),
        ("float64", record, {p: double}),
        ("layout_fingerprint", replace(record, layout_fingerprint="0" * 64), fragments),
        ("run_id", replace(record, run_id="another"), fragments),
        ("group", replace(record, group=1), fragments),
        ("2 fragments", replace(record, versions=record.versions[:2]), fragments),
    ]


def test_what_does_not_make_a_complete_cut_is_refused_and_named(reopen: Reopen) -> None:
    store = reopen()
    before = history(1)[2]
    follow(store, before)
    for word, record, fragments in unfit(*following(before)):
        with pytest.raises(DilocoError, match=word) as caught:
            store.install(record, fragments)
        assert caught.value.reason is Reason.STORE_CORRUPT
        assert_holds(store, before)


def test_another_record_of_the_same_term_and_step_is_refused(reopen: Reopen) -> None:
    store = reopen()
    record = history(1)[2]
    follow(store, record)
    other = replace(record, num_tokens_merged=record.num_tokens_merged + 1)
    assert reason_of(lambda: store.install(other, state_of(other))) is Reason.STORE_CORRUPT
    assert_holds(reopen(), record)


# -- the disk alone -------------------------------------------------------------------------------


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
    assert reason_of(store.load) is Reason.STORE_LOST  # type: ignore[arg-type]
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
    before = rounds(store, begin(store), 5)
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
        going_on = rounds(store, begin(store), 3)
        assert_holds(store, going_on)
        assert not list(path.rglob("*.tmp"))
        store.close()
        if calls[0] < at:
            assert at > 1
            return
    pytest.fail("it never went through")


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
            assert reason_of(store.load) is Reason.STORE_CORRUPT  # type: ignore[arg-type]
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
    assert reason_of(store.load) is Reason.STORE_CORRUPT  # type: ignore[arg-type]
    store.close()


# -- any sequence ---------------------------------------------------------------------------------

STEPS = st.lists(
    st.sampled_from(["round", "depose", "install", "skip", "restart", "take over"]), max_size=25
)


def play(store: RoundStore, restart: Callable[[], RoundStore], steps: list[str]) -> None:
    """A store that leads and follows in turn, beside a lineage kept as a plain value."""
    store.load()
    store.open_run(DESCRIPTION)
    tip, held, leads = seed()[0], None, False
    for step in steps:
        match step:
            case "round" if leads:
                tip = held = rounds(store, tip, 1)
            case "depose":  # it may lead on alone for a while: a tail that nobody has
                after = following(takeover(tip, tip.term + 1))[0]
                if leads:
                    held = rounds(store, tip, 1)
                tip, leads = after, False
            case "skip" if not leads:
                tip = following(tip)[0]
            case "install" if not leads:
                store.install(tip, differing(tip, held))
                held = tip
            case "restart":
                store, leads = restart(), False
                loaded = store.load()
                assert (loaded[0] if loaded else None) == held
            case "take over" if held == tip and held is not None:
                tip = held = takeover(tip, 1 + store.highest_term())
                store.begin_term(tip.term, tip)
                leads = True
    if not leads and (held is None or tip.term > held.term):
        store.install(tip, differing(tip, held))
        held = tip
    if held is not None:
        assert_holds(store, held)


@settings(max_examples=60)
@given(steps=STEPS)
def test_any_sequence_of_leading_and_following_keeps_the_newest_cut(steps: list[str]) -> None:
    memory = MemoryStore()
    play(memory, lambda: memory, steps)
    with tempfile.TemporaryDirectory() as scratch:
        opened = [open_disk(Path(scratch), durability="standby")]

        def restart() -> RoundStore:
            opened[-1].close()
            opened.append(open_disk(Path(scratch), durability="standby"))
            return opened[-1]

        play(opened[0], restart, steps)
        opened[-1].close()
