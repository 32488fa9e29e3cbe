"""The store's twin in memory, for tests and scripted fleets: same rules, nothing durable."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.base import (
    RunDescription,
    check_begin,
    check_commit,
    check_install,
)


class MemoryStore:
    """A ``RoundStore`` that lives as long as the object: keep it across a simulated restart."""

    def __init__(self) -> None:
        self._run: RunDescription | None = None
        self._highest_term = 0
        self._term: int | None = None
        self._tip: RoundRecord | None = None
        self._fragments: dict[int, FragmentState] = {}

    def read_run(self) -> RunDescription | None:
        """See ``RoundStore.read_run``."""
        return copy.deepcopy(self._run)

    def open_run(self, description: RunDescription) -> RunDescription:
        """See ``RoundStore.open_run``."""
        if self._run is None or self._tip is None:
            self._run = copy.deepcopy(description)
        return copy.deepcopy(self._run)

    def highest_term(self) -> int:
        """See ``RoundStore.highest_term``."""
        return self._highest_term

    def load(self) -> tuple[RoundRecord, dict[int, FragmentState]] | None:
        """See ``RoundStore.load``. Ends the term that was current, as a restart does."""
        self._term = None
        if self._tip is None:
            return None
        return self._tip, {p: tensors.clone() for p, tensors in self._fragments.items()}

    def begin_term(self, term: int, record: RoundRecord | None = None) -> None:
        """See ``RoundStore.begin_term``."""
        check_begin(term, record, tip=self._tip, highest_term=self._highest_term)
        self._term = term
        self._highest_term = max(self._highest_term, term)
        if record is not None:
            self.commit(record, {})

    def commit(
        self, record: RoundRecord, fragments: Mapping[int, FragmentState], *, force: bool = False
    ) -> None:
        """See ``RoundStore.commit``; there is nothing to force."""
        del force
        assert self._run is not None, "open_run comes before the first record"
        check_commit(record, fragments, term=self._term, tip=self._tip)
        self._fragments.update({p: tensors.clone() for p, tensors in fragments.items()})
        self._tip = record

    def install(self, record: RoundRecord, fragments: Mapping[int, FragmentState]) -> None:
        """See ``RoundStore.install``."""
        assert self._run is not None, "open_run comes before the first record"
        changed = check_install(record, fragments, tip=self._tip, highest_term=self._highest_term)
        self._term = None
        if changed is None:
            return
        self._highest_term = record.term
        self._fragments.update({p: tensors.clone() for p, tensors in changed.items()})
        self._tip = record

    def flush(self) -> None:
        """See ``RoundStore.flush``."""

    def close(self) -> None:
        """See ``RoundStore.close``."""
        self._term = None
