"""Round records: what the synchronizer persists once per round (design sections 3, 5 and 6).

A record is one complete statement about the run after a round: the version vector, who
contributed, and the counters, shards and leases that a restart needs. It holds no tensors and no
file names; where the tensors are is the store's business.

As JSON a record is strict in both directions: every key present, no other key, every type exact.
Whatever is read back is checked as if a stranger had written it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import DIGEST_BYTES, Incarnation, Version

RECORD_FORMAT: Final = 1
"""Version of the JSON form; another number is refused."""

_MAX_INTEGER: Final = 2**63 - 1

_T = TypeVar("_T")


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
class LeaseRecord:
    """A range of data leased to one incarnation (design section 6).

    Attributes:
        learner_id: who holds it.
        incarnation: the holder's incarnation.
        start: first position of the range.
        stop: position behind the range.
        merged_to: position up to which the range is merged into every fragment.
    """

    learner_id: str
    incarnation: Incarnation
    start: int
    stop: int
    merged_to: int


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
        leases: ranges of data on lease.
        num_tokens_merged: tokens merged since the seed, of all learners and fragments' rounds.
        tokens_merged_by_learner: the same by learner id.
        layout_fingerprint: fingerprint of the layout that the versions belong to.
        rolled_back: why an operator put the fragment back in this round; empty in all others.
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
    rolled_back: str = ""

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
            "incarnations": {k: _incarnation_to(v) for k, v in self.incarnations.items()},
            "shards": dict(self.shards),
            "local_steps": dict(self.local_steps),
            "quorum": self.quorum,
            "leases": [_lease_to(lease) for lease in self.leases],
            "num_tokens_merged": self.num_tokens_merged,
            "tokens_merged_by_learner": dict(self.tokens_merged_by_learner),
            "layout_fingerprint": self.layout_fingerprint,
            "rolled_back": self.rolled_back,
        }

    @classmethod
    def from_dict(cls, value: object) -> RoundRecord:
        """Reads a record from JSON values.

        Raises:
            DilocoError: ``STORE_CORRUPT`` when a key is missing or unknown, a type or format is
                wrong, or the parts contradict each other.
        """
        reader = _Reader(value, "record")
        if (found := reader.integer("format")) != RECORD_FORMAT:
            raise _corrupt("record.format", f"{found} is not the known format {RECORD_FORMAT}")
        record = cls(
            run_id=reader.text("run_id"),
            group=reader.integer("group"),
            term=reader.integer("term"),
            global_step=reader.integer("global_step"),
            fragment=reader.optional_integer("fragment"),
            versions=reader.sequence("versions", _version_from),
            contributions=reader.sequence("contributions", _contribution_from),
            dropped=reader.sequence("dropped", _drop_from),
            incarnations=reader.mapping("incarnations", _incarnation_from),
            shards=reader.mapping("shards", _integer),
            local_steps=reader.mapping("local_steps", _integer),
            quorum=reader.integer("quorum"),
            leases=reader.sequence("leases", _lease_from),
            num_tokens_merged=reader.integer("num_tokens_merged"),
            tokens_merged_by_learner=reader.mapping("tokens_merged_by_learner", _integer),
            layout_fingerprint=reader.text("layout_fingerprint"),
            rolled_back=reader.text("rolled_back"),
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


def canonical_json(value: object) -> str:
    """Returns ``value`` as JSON with sorted keys and no white space.

    Raises:
        ValueError: for a NaN or an infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def strict_json(text: str | bytes, where: str) -> object:
    """Parses JSON without the leniency of ``json``: no repeated keys, no NaN, no infinity.

    Raises:
        DilocoError: ``STORE_CORRUPT``, naming ``where``.
    """

    def refuse_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice")
        return result

    def refuse_constant(name: str) -> object:
        raise ValueError(f"{name} is not a number")

    try:
        parsed: object = json.loads(
            text, object_pairs_hook=refuse_repeats, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise _corrupt(where, f"not valid JSON ({error})") from error
    return parsed


def _corrupt(where: str, what: str) -> DilocoError:
    return DilocoError(Reason.STORE_CORRUPT, f"{where}: {what}", field=where)


class _Reader:
    """Takes the keys of one JSON object, each exactly once."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise _corrupt(where, f"expected an object, found {type(value).__name__}")
        self._left: dict[str, object] = dict(value)
        self._where = where

    def _take(self, key: str) -> tuple[object, str]:
        if key not in self._left:
            raise _corrupt(self._where, f"key {key!r} is missing")
        return self._left.pop(key), f"{self._where}.{key}"

    def integer(self, key: str) -> int:
        return _integer(*self._take(key))

    def optional_integer(self, key: str) -> int | None:
        value, where = self._take(key)
        return None if value is None else _integer(value, where)

    def number(self, key: str) -> float:
        value, where = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _corrupt(where, f"expected a number, found {type(value).__name__}")
        if not math.isfinite(value) or value < 0:
            raise _corrupt(where, f"{value} is not finite and at least 0")
        return float(value)

    def text(self, key: str) -> str:
        value, where = self._take(key)
        if not isinstance(value, str):
            raise _corrupt(where, f"expected text, found {type(value).__name__}")
        return value

    def nested(self, key: str, read: Callable[[object, str], _T]) -> _T:
        return read(*self._take(key))

    def sequence(self, key: str, read: Callable[[object, str], _T]) -> tuple[_T, ...]:
        value, where = self._take(key)
        if not isinstance(value, list):
            raise _corrupt(where, f"expected a list, found {type(value).__name__}")
        return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(value))

    def mapping(self, key: str, read: Callable[[object, str], _T]) -> dict[str, _T]:
        value, where = self._take(key)
        if not isinstance(value, dict):
            raise _corrupt(where, f"expected an object, found {type(value).__name__}")
        return {name: read(item, f"{where}.{name}") for name, item in value.items()}

    def done(self) -> None:
        if self._left:
            raise _corrupt(self._where, f"unknown key {min(self._left)!r}")


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _corrupt(where, f"expected an integer, found {type(value).__name__}")
    if not 0 <= value <= _MAX_INTEGER:
        raise _corrupt(where, "integer out of range")
    return value


def _version_to(version: Version) -> dict[str, object]:
    return {
        "term": version.term,
        "global_step": version.global_step,
        "digest": version.digest.hex(),
    }


def _version_from(value: object, where: str) -> Version:
    reader = _Reader(value, where)
    term, step = reader.integer("term"), reader.integer("global_step")
    digest = reader.text("digest")
    reader.done()
    # bytes.fromhex forgives white space and capitals; a digest has one spelling
    if len(digest) != 2 * DIGEST_BYTES or not set(digest) <= set("0123456789abcdef"):
        raise _corrupt(f"{where}.digest", f"expected {2 * DIGEST_BYTES} lower-case hex digits")
    return Version(term, step, bytes.fromhex(digest))


def _incarnation_to(incarnation: Incarnation) -> dict[str, object]:
    return {"term": incarnation.term, "number": incarnation.number}


def _incarnation_from(value: object, where: str) -> Incarnation:
    reader = _Reader(value, where)
    incarnation = Incarnation(reader.integer("term"), reader.integer("number"))
    reader.done()
    return incarnation


def _contribution_to(item: ContributionRecord) -> dict[str, object]:
    return {
        "learner_id": item.learner_id,
        "incarnation": _incarnation_to(item.incarnation),
        "base": _version_to(item.base),
        "local_step": item.local_step,
        "num_tokens": item.num_tokens,
        "num_steps": item.num_steps,
        "weight": item.weight,
    }


def _contribution_from(value: object, where: str) -> ContributionRecord:
    reader = _Reader(value, where)
    contribution = ContributionRecord(
        learner_id=reader.text("learner_id"),
        incarnation=reader.nested("incarnation", _incarnation_from),
        base=reader.nested("base", _version_from),
        local_step=reader.integer("local_step"),
        num_tokens=reader.integer("num_tokens"),
        num_steps=reader.integer("num_steps"),
        weight=reader.number("weight"),
    )
    reader.done()
    return contribution


def _drop_from(value: object, where: str) -> DropRecord:
    reader = _Reader(value, where)
    drop = DropRecord(learner_id=reader.text("learner_id"), reason=reader.text("reason"))
    reader.done()
    return drop


def _lease_to(lease: LeaseRecord) -> dict[str, object]:
    return {
        "learner_id": lease.learner_id,
        "incarnation": _incarnation_to(lease.incarnation),
        "start": lease.start,
        "stop": lease.stop,
        "merged_to": lease.merged_to,
    }


def _lease_from(value: object, where: str) -> LeaseRecord:
    reader = _Reader(value, where)
    lease = LeaseRecord(
        learner_id=reader.text("learner_id"),
        incarnation=reader.nested("incarnation", _incarnation_from),
        start=reader.integer("start"),
        stop=reader.integer("stop"),
        merged_to=reader.integer("merged_to"),
    )
    reader.done()
    if not lease.start <= lease.merged_to <= lease.stop:
        raise _corrupt(where, "merged_to lies outside the range")
    return lease


def _check_consistent(record: RoundRecord) -> None:
    """Refuses a record whose parts contradict each other."""
    if not record.versions:
        raise _corrupt("record.versions", "a record needs at least one fragment")
    here = (record.term, record.global_step)
    for fragment, version in enumerate(record.versions):
        if (version.term, version.global_step) > here or version.global_step > record.global_step:
            raise _corrupt(f"record.versions[{fragment}]", f"{version} is newer than the record")
    if record.fragment is None:
        return
    if record.fragment >= len(record.versions):
        raise _corrupt("record.fragment", f"there are only {len(record.versions)} fragments")
    made = record.versions[record.fragment]
    if (made.term, made.global_step) != here:
        raise _corrupt("record.fragment", f"its version {made} is not the one of this round")
