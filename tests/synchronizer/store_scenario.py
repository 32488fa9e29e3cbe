"""A small scripted run for the tests of the stores: three fragments, rounds with known tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core.records import ContributionRecord, DropRecord, RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store import RoundStore

RUN = "run-1"
SIZES = (5, 1, 64)
DESCRIPTION: dict[str, object] = {"tensors": [{"name": "w", "shape": [70]}], "settings": {"K": 1}}
DENORMAL = 2.0**-149

Fragments = dict[int, FragmentState]


def tensors_of(fragment: int, term: int, global_step: int) -> FragmentState:
    """Random tensors with denormals, negative zero and extremes, fixed by the arguments."""
    generator = torch.Generator().manual_seed(fragment + 10 * term + 1000 * global_step)
    drawn = torch.randn(3, SIZES[fragment], generator=generator)
    drawn[:, 0] = torch.tensor([DENORMAL, -0.0, 3.4028234e38])
    return FragmentState(published=drawn[0], residual=drawn[1], momentum=drawn[2])


def version_of(tensors: FragmentState, term: int, global_step: int) -> Version:
    digest = hashlib.sha256(tensors.published.numpy().tobytes()).digest()
    return Version(term, global_step, digest)


def seed(term: int = 1) -> tuple[RoundRecord, Fragments]:
    fragments = {p: tensors_of(p, term, 0) for p in range(len(SIZES))}
    record = RoundRecord(
        run_id=RUN,
        group=0,
        term=term,
        global_step=0,
        fragment=None,
        versions=tuple(version_of(fragments[p], term, 0) for p in range(len(SIZES))),
        contributions=(),
        dropped=(),
        incarnations={"a": Incarnation(term, 1)},
        shards={"a": 0},
        local_steps={"a": 7},
        quorum=1,
        leases=(),
        num_tokens_merged=0,
        tokens_merged_by_learner={},
        layout_fingerprint="f" * 64,
    )
    return record, fragments


def takeover(record: RoundRecord, term: int) -> RoundRecord:
    return replace(record, term=term, fragment=None, contributions=(), dropped=())


def following(record: RoundRecord) -> tuple[RoundRecord, Fragments]:
    """The round after ``record``."""
    term, t = record.term, record.global_step + 1
    fragment = t % len(SIZES)
    tensors = tensors_of(fragment, term, t)
    versions = list(record.versions)
    contribution = ContributionRecord(
        learner_id="a",
        incarnation=record.incarnations["a"],
        base=versions[fragment],
        local_step=24 * t,
        num_tokens=768,
        num_steps=24,
        weight=768**2 / 24 / 7,
    )
    versions[fragment] = version_of(tensors, term, t)
    made = replace(
        record,
        global_step=t,
        fragment=fragment,
        versions=tuple(versions),
        contributions=(contribution,),
        dropped=(DropRecord(learner_id="b", reason="TOO_LATE"),),
        num_tokens_merged=record.num_tokens_merged + 768,
        tokens_merged_by_learner={"a": record.num_tokens_merged + 768},
    )
    return made, {fragment: tensors}


def begin(store: RoundStore) -> RoundRecord:
    """Seeds a fresh store in term 1, or takes an old one over in the next term."""
    loaded = store.load()
    term = 1 + store.highest_term()
    store.open_run(DESCRIPTION)
    if loaded is None:
        store.begin_term(term)
        record, fragments = seed(term)
        store.commit(record, fragments)
        return record
    record = takeover(loaded[0], term)
    store.begin_term(term, record)
    return record


def rounds(store: RoundStore, record: RoundRecord, count: int) -> RoundRecord:
    for _ in range(count):
        record, fragments = following(record)
        store.commit(record, fragments)
    return record


def state_of(record: RoundRecord) -> Fragments:
    """What a store must give back for ``record``: the tensors of its version vector."""
    return {
        p: tensors_of(p, version.term, version.global_step)
        for p, version in enumerate(record.versions)
    }


def bits(fragments: Mapping[int, FragmentState]) -> dict[int, dict[str, bytes]]:
    return {
        p: {name: tensor.numpy().tobytes() for name, tensor in tensors.named().items()}
        for p, tensors in fragments.items()
    }


def assert_holds(store: RoundStore, record: RoundRecord) -> None:
    """The store gives back exactly this record, with its tensors bit for bit."""
    loaded = store.load()
    assert loaded is not None
    assert loaded[0] == record
    assert bits(loaded[1]) == bits(state_of(record))
