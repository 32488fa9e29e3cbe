"""A leader's lineage of records, and what a standby's store does with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.store import RoundStore
from tests.synchronizer.store_scenario import (
    DESCRIPTION,
    Fragments,
    following,
    seed,
    state_of,
    takeover,
)


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


def reason_of(call: Callable[[], object]) -> Reason:
    with pytest.raises(DilocoError) as caught:
        call()
    return caught.value.reason
