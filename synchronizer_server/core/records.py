"""Round records: what the synchronizer persists once per round (design sections 3, 5 and 6).

A record is one complete statement about the run after a round: the version vector, who
contributed, and the counters, shards and leases that a restart needs. It holds no tensors and no
file names; where the tensors are is the store's business.

As JSON a record is strict in both directions: every key present, no other key, every type exact.
Whatever is read back is checked as if a stranger had written it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from decoupled_diloco.versions import DIGEST_BYTES, Incarnation, Version
from synchronizer_server.core.data_records import (
    DataRecord,
    LeaseRecord,
    check_data,
    data_from,
    data_to,
    lease_from,
    lease_to,
)
from synchronizer_server.core.strict_json import (
    Reader,
    canonical_json,
    corrupt,
    incarnation_from,
    incarnation_to,
    read_integer,
    strict_json,
)

RECORD_FORMAT: Final = 3
"""Version of the JSON form; another number is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionRecord:
    """One accepted push.

    Attributes:
        learner_id: who sent it.
        incarnation: the sender's incarnation.
        base: version of the published copy against which the outer gradient was computed.
        local_step: the learner's inner step at the copy.
        num_tokens: tokens behind the outer gradient.
        num_steps: inner steps behind the outer gradient.
        weight: weight in the merge, finite and not negative.
    """

    learner_id: str
    incarnation: Incarnation
    base: Version
    local_step: int
    num_tokens: int
    num_steps: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRecord:
    """One learner that was asked and left out, with the reason code."""

    learner_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord:
    """One learner that an operator asked to leave.

    Attributes:
        learner_id: the learner.
        reason: why, in the operator's words.
        has_left: True once it did.
    """

    learner_id: str
    reason: str
    has_left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """What a run is after a round.

    Attributes:
        run_id: the run.
        group: group of fragments, 0 alone today.
        term: term of leadership that wrote the record.
        global_step: t of the round; 0 is the seed; at the start of a term the t that it took over.
        fragment: the fragment that the round merged; None for the seed and the start of a term.
        versions: the version vector after the round, one version per fragment.
        contributions: accepted pushes in order of accumulation.
        dropped: who was asked and left out.
        incarnations: latest incarnation by learner id.
        shards: data shard by learner id.
        local_steps: highest local step heard of each learner id: where its data goes on.
        quorum: K as an operator set it; 0 where it is that of the settings.
        leases: ranges of data on lease and not merged yet.
        data: all the rest that is known of the training data.
        num_tokens_merged: tokens merged since the seed, of all learners and fragments' rounds.
        tokens_merged_by_learner: the same by learner id.
        tokens_processed_by_learner: tokens reported in all lives, by learner id.
        layout_fingerprint: fingerprint of the layout that the versions belong to.
        rolled_back: why an operator put the fragment back in this round; empty in all others.
        drains: learners that operators asked to leave, and that have not joined again since.
    """

    run_id: str
    group: int
    term: int
    global_step: int
    fragment: int | None
    versions: tuple[Version, ...]
    contributions: tuple[ContributionRecord, ...]
    dropped: tuple[DropRecord, ...]
    incarnations: Mapping[str, Incarnation]
    shards: Mapping[str, int]
    local_steps: Mapping[str, int]
    quorum: int
    leases: tuple[LeaseRecord, ...]
    num_tokens_merged: int
    tokens_merged_by_learner: Mapping[str, int]
    layout_fingerprint: str
    data: DataRecord = field(default_factory=DataRecord)
    tokens_processed_by_learner: Mapping[str, int] = field(default_factory=dict)
    rolled_back: str = ""
    drains: tuple[DrainRecord, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Returns the record as JSON values (digests as hex)."""
        return {
            "format": RECORD_FORMAT,
            "run_id": self.run_id,
            "group": self.group,
            "term": self.term,
            "global_step": self.global_step,
            "fragment": self.fragment,
            "versions": [_version_to(version) for version in self.versions],
            "contributions": [_contribution_to(item) for item in self.contributions],
            "dropped": [{"learner_id": d.learner_id, "reason": d.reason} for d in self.dropped],
            "incarnations": {k: incarnation_to(v) for k, v in self.incarnations.items()},
            "shards": dict(self.shards),
            "local_steps": dict(self.local_steps),
            "quorum": self.quorum,
            "leases": [lease_to(lease) for lease in self.leases],
            "num_tokens_merged": self.num_tokens_merged,
            "tokens_merged_by_learner": dict(self.tokens_merged_by_learner),
            "layout_fingerprint": self.layout_fingerprint,
            "data": data_to(self.data),
            "tokens_processed_by_learner": dict(self.tokens_processed_by_learner),
            "rolled_back": self.rolled_back,
            "drains": [dataclasses.asdict(item) for item in self.drains],
        }

    @classmethod
    def from_dict(cls, value: object) -> RoundRecord:
        """Reads a record from JSON values.

        Raises:
            DilocoError: ``STORE_CORRUPT`` when a key is missing or unknown, a type or format is
                wrong, or the parts contradict each other.
        """
        reader = Reader(value, "record")
        if (found := reader.integer("format")) != RECORD_FORMAT:
            raise corrupt("record.format", f"{found} is not the known format {RECORD_FORMAT}")
        record = cls(
            run_id=reader.text("run_id"),
            group=reader.integer("group"),
            term=reader.integer("term"),
            global_step=reader.integer("global_step"),
            fragment=reader.optional_integer("fragment"),
            versions=reader.sequence("versions", _version_from),
            contributions=reader.sequence("contributions", _contribution_from),
            dropped=reader.sequence("dropped", _drop_from),
            incarnations=reader.mapping("incarnations", incarnation_from),
            shards=reader.mapping("shards", read_integer),
            local_steps=reader.mapping("local_steps", read_integer),
            quorum=reader.integer("quorum"),
            leases=reader.sequence("leases", lease_from),
            num_tokens_merged=reader.integer("num_tokens_merged"),
            tokens_merged_by_learner=reader.mapping("tokens_merged_by_learner", read_integer),
            layout_fingerprint=reader.text("layout_fingerprint"),
            data=reader.nested("data", data_from),
            tokens_processed_by_learner=reader.mapping("tokens_processed_by_learner", read_integer),
            rolled_back=reader.text("rolled_back"),
            drains=reader.sequence("drains", _drain_from),
        )
        reader.done()
        _check_consistent(record)
        return record

    def to_json(self) -> str:
        """Returns the record as canonical JSON: sorted keys, no white space, no NaN."""
        return canonical_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> RoundRecord:
        """Reads what ``to_json`` wrote.

        Raises:
            DilocoError: ``STORE_CORRUPT``, as ``from_dict``, or when it is not JSON at all.
        """
        return cls.from_dict(strict_json(text, "record"))


def _version_to(version: Version) -> dict[str, object]:
    return {
        "term": version.term,
        "global_step": version.global_step,
        "digest": version.digest.hex(),
    }


def _version_from(value: object, where: str) -> Version:
    reader = Reader(value, where)
    term, step = reader.integer("term"), reader.integer("global_step")
    digest = reader.text("digest")
    reader.done()
    # bytes.fromhex forgives white space and capitals; a digest has one spelling
    if len(digest) != 2 * DIGEST_BYTES or not set(digest) <= set("0123456789abcdef"):
        raise corrupt(f"{where}.digest", f"expected {2 * DIGEST_BYTES} lower-case hex digits")
    return Version(term, step, bytes.fromhex(digest))


def _contribution_to(item: ContributionRecord) -> dict[str, object]:
    return {
        "learner_id": item.learner_id,
        "incarnation": incarnation_to(item.incarnation),
        "base": _version_to(item.base),
        "local_step": item.local_step,
        "num_tokens": item.num_tokens,
        "num_steps": item.num_steps,
        "weight": item.weight,
    }


def _contribution_from(value: object, where: str) -> ContributionRecord:
    reader = Reader(value, where)
    contribution = ContributionRecord(
        learner_id=reader.text("learner_id"),
        incarnation=reader.nested("incarnation", incarnation_from),
        base=reader.nested("base", _version_from),
        local_step=reader.integer("local_step"),
        num_tokens=reader.integer("num_tokens"),
        num_steps=reader.integer("num_steps"),
        weight=reader.number("weight"),
    )
    reader.done()
    return contribution


def _drop_from(value: object, where: str) -> DropRecord:
    reader = Reader(value, where)
    drop = DropRecord(learner_id=reader.text("learner_id"), reason=reader.text("reason"))
    reader.done()
    return drop


def _drain_from(value: object, where: str) -> DrainRecord:
    reader = Reader(value, where)
    drain = DrainRecord(
        learner_id=reader.text("learner_id"),
        reason=reader.text("reason"),
        has_left=reader.truth("has_left"),
    )
    reader.done()
    return drain


def _check_consistent(record: RoundRecord) -> None:
    """Refuses a record whose parts contradict each other."""
    check_data(record.data, record.leases)
    if not record.versions:
        raise corrupt("record.versions", "a record needs at least one fragment")
    here = (record.term, record.global_step)
    for fragment, version in enumerate(record.versions):
        if (version.term, version.global_step) > here or version.global_step > record.global_step:
            raise corrupt(f"record.versions[{fragment}]", f"{version} is newer than the record")
    if record.fragment is None:
        return
    if record.fragment >= len(record.versions):
        raise corrupt("record.fragment", f"there are only {len(record.versions)} fragments")
    made = record.versions[record.fragment]
    if (made.term, made.global_step) != here:
        raise corrupt("record.fragment", f"its version {made} is not the one of this round")
