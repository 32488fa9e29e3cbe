"""Every round record that was ever persisted, and which follows which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from decoupled_diloco.versions import Version, digest_of
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState

Key = tuple[int, int]
"""(term, global step) of a record."""

Span = tuple[int, int, int, int]
"""Inner steps of process ``[0]`` on fragment ``[1]`` after step ``[2]``, up to ``[3]``."""


def fingerprint(state: FragmentState) -> bytes:
    """Digest of all three tensors."""
    tensors = state.named().values()
    return digest_of(b"".join(t.contiguous().numpy().tobytes() for t in tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record in its lineage."""

    record: RoundRecord
    parent: Key | None
    work: tuple[Span, ...]


class Lineages:
    """What was persisted, anywhere."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.tips: dict[str, Key] = {}
        self.states: dict[tuple[int, Version], bytes] = {}

    def add(self, store: str, record: RoundRecord, work: tuple[Span, ...]) -> None:
        """A store has a new record on top of what it had."""
        key, parent = (record.term, record.global_step), self.tips.get(store)
        known = self.entries.get(key)
        assert known is None, f"two records of term and t {key}"
        if parent is None:
            assert record.global_step == 0, "a lineage begins with the seed"
        else:
            steps = 0 if record.fragment is None else 1
            assert record.global_step == parent[1] + steps, f"{key} does not follow {parent}"
            assert record.term >= parent[0], f"{key} follows {parent}"
        self.entries[key] = Entry(record=record, parent=parent, work=work)
        self.tips[store] = key

    def install(self, store: str, record: RoundRecord) -> None:
        """A standby keeps a record that another store has."""
        key = (record.term, record.global_step)
        known = self.entries.get(key)
        assert known is not None, f"{store} installs {key}, which nobody persisted"
        assert known.record == record, f"{store} installs another {key}"
        if key > self.tips.get(store, (0, -1)):
            self.tips[store] = key

    def line(self, key: Key | None) -> Iterator[tuple[Key, Entry]]:
        """A record and all before it, newest first."""
        while key is not None:
            entry = self.entries[key]
            yield key, entry
            key = entry.parent

    def is_on(self, key: Key, tip: Key | None) -> bool:
        """Whether a record is the tip, or before it."""
        return any(key == other for other, _ in self.line(tip))

    def check_states(
        self, versions: tuple[Version, ...], states: Mapping[int, FragmentState]
    ) -> None:
        """Restored tensors are those of the version, bit for bit, all three of them."""
        for fragment, version in enumerate(versions):
            known = self.states[fragment, version]
            assert fingerprint(states[fragment]) == known, f"fragment {fragment} is not {version}"

    def check_work(self, tip: Key | None) -> int:
        """No inner step is merged twice into one fragment; returns how many were merged."""
        merged: dict[tuple[int, int], set[int]] = {}
        total = 0
        for key, entry in self.line(tip):
            for uid, fragment, first, last in entry.work:
                known = merged.setdefault((uid, fragment), set())
                steps = set(range(first + 1, last + 1))
                assert not known & steps, f"merged twice, the second time before {key}: {steps}"
                known |= steps
                total += len(steps)
        return total
