"""Round records as JSON: exact both ways, and strict about whatever is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core.data_records import DataRange, DataRecord, LeaseRecord, WentBack
from synchronizer_server.core.records import (
    ContributionRecord,
    DrainRecord,
    DropRecord,
    RoundRecord,
)

naturals = st.integers(0, 2**63 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
incarnations = st.builds(Incarnation, naturals, naturals)
versions = st.builds(Version, naturals, naturals, st.binary(min_size=32, max_size=32))
contributions = st.builds(
    ContributionRecord,
    learner_id=names,
    incarnation=incarnations,
    base=versions,
    local_step=naturals,
    num_tokens=naturals,
    num_steps=naturals,
    weight=st.floats(0, allow_nan=False, allow_infinity=False),
)


@st.composite
def data_and_leases(draw: st.DrawFn) -> tuple[DataRecord, tuple[LeaseRecord, ...]]:
    """Pieces of the data, each merged, given back or on lease; then what was never leased."""
    length = draw(st.integers(0, 50))
    stop = draw(st.integers(0, 3 * length + 50))
    epoch, position = divmod(stop, length) if length else (0, stop)
    leased, returned, num_merged = [], [], 0
    for e in range(epoch + 1):
        last = length if e < epoch else position
        cuts = sorted(draw(st.sets(st.integers(1, last - 1), max_size=3)) if last > 1 else ())
        for start, end in pairwise([0, *cuts, last]):
            what = draw(st.sampled_from(["merged", "returned", "leased"]))
            if what == "merged" or start == end:
                num_merged += end - start
            elif what == "returned":
                returned.append(DataRange(e, start, end))
            else:
                merged_to = draw(st.integers(start, end - 1))
                num_merged += merged_to - start
                leased.append(
                    LeaseRecord(
                        learner_id=draw(names), incarnation=draw(incarnations),
                        lease_id=draw(naturals), epoch=e, start=start, stop=end,
                        merged_to=merged_to,
                    )
                )  # fmt: skip
    data = DataRecord(
        length=length, epoch=epoch, position=position, next_lease_id=draw(naturals),
        num_merged=num_merged, num_returned=draw(naturals), returned=tuple(returned),
        lost=draw(st.dictionaries(names, incarnations, max_size=2)),
        went_back=draw(st.none() | st.builds(
            WentBack, snapshot=names, term=naturals,
            awaited=st.dictionaries(names, incarnations, max_size=2),
        )),
    )  # fmt: skip
    return data, tuple(leased)


@st.composite
def records(draw: st.DrawFn) -> RoundRecord:
    term, t = draw(naturals), draw(naturals)
    count = draw(st.integers(1, 4))
    fragment = draw(st.none() | st.integers(0, count - 1))
    older = st.builds(
        Version,
        st.integers(0, term),
        st.integers(0, t),
        st.binary(min_size=32, max_size=32),
    )
    data, leased = draw(data_and_leases())
    made = [draw(older) for _ in range(count)]
    if fragment is not None:
        made[fragment] = Version(term, t, made[fragment].digest)
    return RoundRecord(
        run_id=draw(names),
        group=draw(naturals),
        term=term,
        global_step=t,
        fragment=fragment,
        versions=tuple(made),
        contributions=tuple(draw(st.lists(contributions, max_size=3))),
        dropped=tuple(
            draw(st.lists(st.builds(DropRecord, learner_id=names, reason=names), max_size=2))
        ),
        incarnations=draw(st.dictionaries(names, incarnations, max_size=3)),
        shards=draw(st.dictionaries(names, naturals, max_size=3)),
        local_steps=draw(st.dictionaries(names, naturals, max_size=3)),
        quorum=draw(naturals),
        leases=leased,
        num_tokens_merged=draw(naturals),
        tokens_merged_by_learner=draw(st.dictionaries(names, naturals, max_size=3)),
        layout_fingerprint=draw(names),
        data=data,
        tokens_processed_by_learner=draw(st.dictionaries(names, naturals, max_size=3)),
        drains=tuple(
            draw(
                st.lists(
                    st.builds(DrainRecord, learner_id=names, reason=names, has_left=st.booleans()),
                    max_size=2,
                )
            )
        ),
    )


EXAMPLE = RoundRecord(
    run_id="run-1",
    group=0,
    term=2,
    global_step=7,
    fragment=1,
    versions=(Version(1, 6, b"a" * 32), Version(2, 7, b"b" * 32)),
    contributions=(
        ContributionRecord(
            learner_id="a",
            incarnation=Incarnation(1, 3),
            base=Version(1, 5, b"c" * 32),
            local_step=168,
            num_tokens=768,
            num_steps=24,
            weight=0.1,
        ),
    ),
    dropped=(DropRecord(learner_id="b", reason="TOO_LATE"),),
    incarnations={"a": Incarnation(1, 3)},
    shards={"a": 0},
    local_steps={"a": 7},
    quorum=1,
    leases=(
        LeaseRecord(
            learner_id="a",
            incarnation=Incarnation(1, 3),
            lease_id=4,
            epoch=1,
            start=0,
            stop=9,
            merged_to=4,
        ),
    ),
    num_tokens_merged=768,
    tokens_merged_by_learner={"a": 768},
    layout_fingerprint="f",
    data=DataRecord(
        length=20,
        epoch=1,
        position=11,
        next_lease_id=5,
        num_merged=24,
        num_returned=3,
        returned=(DataRange(1, 9, 11),),
        lost={"b": Incarnation(1, 1)},
        went_back=WentBack(snapshot="1.3", term=2, awaited={"c": Incarnation(1, 3)}),
    ),
    tokens_processed_by_learner={"a": 800},
    drains=(DrainRecord(learner_id="b", reason="new disk", has_left=False),),
)


@given(records())
def test_a_record_survives_json_exactly(record: RoundRecord) -> None:
    text = record.to_json()
    assert RoundRecord.from_json(text) == record
    assert RoundRecord.from_json(text.encode()) == record
    assert RoundRecord.from_json(text).to_json() == text


def test_json_is_canonical_whatever_the_order_of_maps() -> None:
    one = replace(EXAMPLE, shards={"a": 0, "b": 1})
    two = replace(EXAMPLE, shards={"b": 1, "a": 0})
    assert one.to_json() == two.to_json()


def refused(text: str | bytes, match: str) -> None:
    with pytest.raises(DilocoError, match=match) as caught:
        RoundRecord.from_json(text)
    assert caught.value.reason is Reason.STORE_CORRUPT


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every value inside a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(value: Any, inside: Any, key: Any) -> None:
    inside[key] = value


def changed(path: tuple[Any, ...], change: Any) -> str:
    whole = json.loads(EXAMPLE.to_json())
    inside = whole
    for key in path[:-1]:
        inside = inside[key]
    change(inside, path[-1])
    return json.dumps(whole)


MAPS = {
    "incarnations",
    "shards",
    "local_steps",
    "tokens_merged_by_learner",
    "tokens_processed_by_learner",
}
WENT_BACK = ("data", "went_back")
PLACES = list(places(json.loads(EXAMPLE.to_json())))
WRONG: list[Any] = [None, True, "x", -1, 2**63, 1.5, [], {}, [1], {"x": None}, math.nan, math.inf]


def is_lawful(path: tuple[Any, ...], original: Any, value: Any) -> bool:
    """The few values of the list above that a record may have in a place."""
    if isinstance(original, str) and isinstance(value, str):
        return path[-1] != "digest"  # any text is a name
    return (
        (path[-1] == "weight" and value in (1.5, 2**63) and value is not True)
        or (path in (("contributions",), ("dropped",), ("drains",)) and value == [])
        or (path[-1] == "has_left" and value is True)
        or (path in (("data", "lost"), (*WENT_BACK, "awaited")) and value == {})
        or (path == WENT_BACK and value is None)
        or (len(path) == 1 and path[0] in MAPS and value == {})
        or (path == ("fragment",) and value is None)
    )


@pytest.mark.parametrize("path", PLACES, ids=str)
def test_a_value_of_another_type_is_refused_and_named(path: tuple[Any, ...]) -> None:
    original = json.loads(EXAMPLE.to_json())
    for key in path:
        original = original[key]
    for value in WRONG:
        if not is_lawful(path, original, value):
            refused(changed(path, partial(put, value)), "record")


@pytest.mark.parametrize("path", [p for p in PLACES if isinstance(p[-1], str)], ids=str)
def test_a_missing_or_renamed_key_is_refused_and_named(path: tuple[Any, ...]) -> None:
    is_learner = path[:-1] in {("data", "lost"), (*WENT_BACK, "awaited")}
    if (len(path) == 2 and path[0] in MAPS) or is_learner:
        return  # keys of maps are learners
    refused(changed(path, lambda inside, key: inside.pop(key)), rf"key '{path[-1]}' is missing")
    refused(changed(path, lambda inside, _: put(1, inside, "extra")), "'extra'")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ("null", "expected an object"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a":1,"a":2}', "a key stands twice"),
        ('{"format":NaN}', "NaN is not a number"),
        ('{"format":' + "9" * 5000 + "}", "not valid JSON"),
        ('{"format":1}', "not the known format"),
    ],
    ids=range(10),
)
def test_what_is_no_record_is_refused(text: str | bytes, match: str) -> None:
    refused(text, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"versions": ()}, "at least one fragment"),
        ({"fragment": 2}, "only 2 fragments"),
        ({"fragment": 0}, "not the one of this round"),
        ({"term": 1}, "newer than the record"),
        ({"global_step": 6, "fragment": None}, "newer than the record"),
        ({"versions": (Version(1, 9, b"a" * 32), EXAMPLE.versions[1])}, "newer than the record"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes: dict[str, Any], match: str) -> None:
    refused(replace(EXAMPLE, **changes).to_json(), match)


def test_a_lease_merged_outside_its_range_is_refused() -> None:
    (lease,) = EXAMPLE.leases
    bad = replace(EXAMPLE, leases=(replace(lease, merged_to=lease.stop + 1),))
    refused(bad.to_json(), r"leases\[0\]: merged_to")


@pytest.mark.parametrize(
    "digest", ["A" * 64, "a" * 63, "a" * 66, " " + "a" * 63, "a " * 32, "é" * 64]
)
def test_a_digest_has_one_spelling(digest: str) -> None:
    text = changed(("versions", 0, "digest"), partial(put, digest))
    refused(text, r"versions\[0\]\.digest")


def test_a_weight_that_is_no_number_is_never_written() -> None:
    bad = replace(EXAMPLE.contributions[0], weight=math.nan)
    with pytest.raises(ValueError, match="Out of range"):
        replace(EXAMPLE, contributions=(bad,)).to_json()
