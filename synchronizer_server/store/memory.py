"""The store's twin in memory, for tests and scripted fleets: same rules, nothing durable."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from decoupled_diloco.snapshots import SnapshotName
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.base import (
    RunDescription,
    check_begin,
    check_commit,
    check_install,
    snapshot_missing,
)
from synchronizer_server.store.manifest import Manifest


class MemoryStore:
    """A ``RoundStore`` that lives as long as the object: keep it across a simulated restart."""

    def __init__(self) -> None:
        self._run: RunDescription | None = None
        self._highest_term = 0
        self._term: int | None = None
        self._tip: RoundRecord | None = None
        self._fragments: dict[int, FragmentState] = {}
        self._pinned: dict[SnapshotName, tuple[RoundRecord, dict[int, FragmentState]]] = {}
        self._manifests: dict[SnapshotName, Manifest] = {}
        self._gone_back: tuple[RoundRecord, dict[int, FragmentState]] | None = None

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
        self._term = self._gone_back = None
        if self._tip is None:
            return None
        return self._tip, {p: tensors.clone() for p, tensors in self._fragments.items()}

    def begin_term(self, term: int, record: RoundRecord | None = None) -> None:
        """See ``RoundStore.begin_term``."""
        tip = self._tip if self._gone_back is None else self._gone_back[0]
        check_begin(term, record, tip=tip, highest_term=self._highest_term)
        if self._gone_back is not None:
            self._tip, fragments = self._gone_back
            self._fragments = {p: tensors.clone() for p, tensors in fragments.items()}
            self._gone_back = None
        for name in [name for name in self._pinned if name not in self._manifests]:
            self.drop_snapshot(name)
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

    def pin(self, name: SnapshotName) -> None:
        """See ``RoundStore.pin``."""
        assert self._tip is not None, "a cut is a committed round"
        assert (self._tip.term, self._tip.global_step) == (name.term, name.global_step), name
        fragments = {p: tensors.clone() for p, tensors in self._fragments.items()}
        self._pinned[name] = (self._tip, fragments)

    def keep_snapshot(self, manifest: Manifest, keep: int) -> None:
        """See ``RoundStore.keep_snapshot``."""
        self._manifests[manifest.name] = manifest
        kept = set(sorted(self._manifests)[-keep:]) | {manifest.name}
        for name in list(self._pinned):
            if name not in kept:
                self.drop_snapshot(name)

    def drop_snapshot(self, name: SnapshotName) -> None:
        """See ``RoundStore.drop_snapshot``."""
        self._pinned.pop(name, None)
        self._manifests.pop(name, None)

    def snapshots(self) -> list[Manifest]:
        """See ``RoundStore.snapshots``."""
        return [self._manifests[name] for name in sorted(self._manifests)]

    def go_back(self, name: SnapshotName) -> tuple[RoundRecord, dict[int, FragmentState]]:
        """See ``RoundStore.go_back``."""
        if name not in self._manifests:
            raise snapshot_missing(name, self.snapshots())
        self._term = None
        record, fragments = self._pinned[name]
        self._gone_back = (record, fragments)
        return record, {p: tensors.clone() for p, tensors in fragments.items()}

    def close(self) -> None:
        """See ``RoundStore.close``."""
        self._term = None
