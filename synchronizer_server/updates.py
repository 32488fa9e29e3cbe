"""Updates for watchers: encoded once, kept for those that lag (design section 5, Watch)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from decoupled_diloco.codecs import Payload, get_codec, iter_chunks, payload_digest
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import version_to

FULL_CODEC = "fp32"
"""Full fragments are lossless."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One update of a fragment, as every watcher gets it.

    Attributes:
        fragment: the fragment.
        base: version on which it builds; None for a full fragment.
        result: version that results.
        codec: how the payload is encoded.
        payload_bytes: size of the payload.
        messages: header (without clock) and chunks, built once and sent to all.
    """

    fragment: int
    base: Version | None
    result: Version
    codec: str
    payload_bytes: int
    messages: tuple[pb.WatchResponse, ...]


def make_update(
    fragment: int, *, base: Version | None, result: Version, codec: str, payload: Payload,
    num_elements: int,
) -> Update:  # fmt: skip
    """Builds the messages of an update."""
    kind = pb.UPDATE_KIND_FULL if base is None else pb.UPDATE_KIND_DELTA
    header = pb.UpdateHeader(
        kind=kind,
        fragment=fragment,
        base=version_to(base) if base is not None else None,
        result=version_to(result),
        encoding=types_pb2.Encoding(
            codec=codec,
            num_elements=num_elements,
            payload_bytes=len(payload),
            digest=payload_digest(payload),
        ),
    )
    chunks, offset = [], 0
    for data in iter_chunks(payload):
        chunk = types_pb2.Chunk(offset_bytes=offset, data=bytes(data))
        chunks.append(pb.WatchResponse(chunk=chunk))
        offset += len(data)
    return Update(
        fragment=fragment,
        base=base,
        result=result,
        codec=codec,
        payload_bytes=len(payload),
        messages=(pb.WatchResponse(header=header), *chunks),
    )


@dataclass(slots=True)
class _Shelf:
    version: Version
    published: torch.Tensor
    chain: deque[Update]
    copies: dict[bytes, torch.Tensor] = field(default_factory=dict)
    full: Update | None = None


class UpdateBook:
    """Published copies and retained updates of every fragment.

    Args:
        num_retained: updates kept per fragment.
    """

    def __init__(self, num_retained: int) -> None:
        self._num_retained = num_retained
        self._shelves: list[_Shelf] = []

    def start(self, versions: Sequence[Version], published: Sequence[torch.Tensor]) -> None:
        """Begins with these published copies (fp32, one vector per fragment)."""
        self._shelves = [
            _Shelf(v, copy, deque(maxlen=self._num_retained))
            for v, copy in zip(versions, published, strict=True)
        ]

    @property
    def num_fragments(self) -> int:
        """Fragments that are published; 0 before the seed."""
        return len(self._shelves)

    def version(self, fragment: int) -> Version:
        """The published version."""
        return self._shelves[fragment].version

    def versions(self) -> tuple[Version, ...]:
        """The published version of every fragment."""
        return tuple(s.version for s in self._shelves)

    def published(self, fragment: int) -> torch.Tensor:
        """The published copy, fp32 [n]; never changed in place."""
        return self._shelves[fragment].published

    def copy_at(self, fragment: int, version: Version) -> torch.Tensor | None:
        """The published copy at a retained version, for outer gradients on an older base."""
        shelf = self._shelves[fragment]
        if version.digest == shelf.version.digest:
            return shelf.published
        return shelf.copies.get(version.digest)

    def publish(self, update: Update, published: torch.Tensor) -> None:
        """Puts out a new version; a full one replaces all before it: no chain leads to it."""
        shelf = self._shelves[update.fragment]
        if update.base is None:
            shelf.chain.clear()
            shelf.copies.clear()
            shelf.version, shelf.published, shelf.full = update.result, published, update
            return
        assert update.base == shelf.version, "updates follow one another"
        shelf.copies[shelf.version.digest] = shelf.published
        shelf.chain.append(update)
        kept = {u.base.digest for u in shelf.chain if u.base is not None}
        shelf.copies = {d: copy for d, copy in shelf.copies.items() if d in kept}
        shelf.version, shelf.published, shelf.full = update.result, published, None

    def plan(self, fragment: int, held: Version | None) -> list[Update]:
        """What brings a watcher that holds ``held`` to the published version.

        The chain of retained updates where there is one and it is smaller, else the full
        fragment. A version that is not on our lineage is replaced, even if its number is higher.
        """
        shelf = self._shelves[fragment]
        if held == shelf.version:
            # The whole version, not its digest alone: an update that changes nothing still moves
            # the base that the next outer gradient names.
            return []
        chain = _chain_from(shelf, held) if held is not None else []
        if chain and sum(u.payload_bytes for u in chain) < shelf.published.numel() * 4:
            return chain
        return [self._full(fragment)]

    def _full(self, fragment: int) -> Update:
        shelf = self._shelves[fragment]
        if shelf.full is None:
            payload = get_codec(FULL_CODEC).encode(shelf.published)
            shelf.full = make_update(
                fragment,
                base=None,
                result=shelf.version,
                codec=FULL_CODEC,
                payload=payload,
                num_elements=shelf.published.numel(),
            )
        return shelf.full


def _chain_from(shelf: _Shelf, held: Version) -> list[Update]:
    """Retained updates that build on what is held; empty where there are none."""
    chain = list(shelf.chain)
    starts = [i for i, update in enumerate(chain) if update.base == held]
    if not starts:
        starts = [
            i for i, u in enumerate(chain) if u.base is not None and u.base.digest == held.digest
        ]
    return chain[starts[-1] :] if starts else []
