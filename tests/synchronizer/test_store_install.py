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
from tests.synchronizer.store_faults import open_disk
from tests.synchronizer.store_lineage import differing, follow, history, reason_of
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
