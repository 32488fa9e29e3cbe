"""Updates as they come down: staged in wire format, validated whole, applied to the published copy.

An update is decoded to fp32 and added to its base in one separate add, so that every learner ends
with the same bits; base and result are checked by digest, always (design section 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from decoupled_diloco.codecs import CHUNK_BYTES, Stager, get_codec
from decoupled_diloco.codecs.base import bytes_of
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, crosses_half, reach
from decoupled_diloco.layout import Layout
from decoupled_diloco.v1 import synchronizer_pb2, types_pb2
from decoupled_diloco.versions import Version, digest_of
from decoupled_diloco.wire import version_from

LOSSLESS: Final = ("fp32", "fp32+zstd")
"""Codecs in which a whole published copy may come."""

FRAGMENT_BROKEN: Final = frozenset({Reason.DIGEST_MISMATCH, Reason.BASE_MISMATCH})
"""What is held of the fragment cannot be built upon: ask for the whole of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpdate:
    """An update that is complete in wire format; the payload matches its digest.

    Attributes:
        fragment: its index.
        base: version that a delta builds on; None for a whole published copy.
        result: version that results.
        codec: name of the codec.
        num_elements: elements of the fragment.
        payload: the bytes.
    """

    fragment: int
    base: Version | None
    result: Version
    codec: str
    num_elements: int
    payload: memoryview


class UpdateStager:
    """Puts updates together from a stream of headers and chunks; holds one at a time.

    Args:
        layout: fragments that exist and their sizes: no header can claim more memory than theirs.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._header: synchronizer_pb2.UpdateHeader | None = None
        self._stager: Stager | None = None

    def header(self, header: synchronizer_pb2.UpdateHeader) -> None:
        """Starts an update.

        Raises:
            DilocoError: where the header cannot be right, naming the fragment.
        """
        if self._stager is not None:
            raise DilocoError(
                Reason.TRUNCATED, "an update started before the one before it was complete"
            )
        fragment = header.fragment
        if header.group != 0 or fragment >= self._layout.num_fragments:
            raise DilocoError(
                Reason.UNKNOWN_FRAGMENT,
                f"an update of fragment {fragment} in group {header.group}; there are "
                f"{self._layout.num_fragments} fragments in group 0",
            )
        _check_encoding(header, self._layout.fragments[fragment].num_elements)
        codec = get_codec(header.encoding.codec)
        _, most = codec.payload_bounds(header.encoding.num_elements)
        self._stager = Stager(header.encoding.payload_bytes, header.encoding.digest, most)
        self._header = header

    def chunk(self, chunk: types_pb2.Chunk) -> StagedUpdate | None:
        """Adds a chunk; returns the update once it is complete.

        Raises:
            DilocoError: where the chunk is not the next one or the whole does not match.
        """
        if self._stager is None or self._header is None:
            raise DilocoError(Reason.MALFORMED, "a chunk came before the header of its update")
        if not 0 < len(chunk.data) <= CHUNK_BYTES:
            raise DilocoError(
                Reason.MALFORMED, f"a chunk of {len(chunk.data)} bytes; 1 to {CHUNK_BYTES} are due"
            )
        header = self._header
        if crosses_half(self._stager.num_bytes, len(chunk.data), header.encoding.payload_bytes):
            reach(FaultPoint.MID_WATCH)
        self._stager.add(chunk.offset_bytes, chunk.data)
        if self._stager.num_bytes < header.encoding.payload_bytes:
            return None
        payload = self._stager.finish()
        self._stager = self._header = None
        is_delta = header.kind == synchronizer_pb2.UPDATE_KIND_DELTA
        return StagedUpdate(
            fragment=header.fragment,
            base=version_from(header.base) if is_delta else None,
            result=version_from(header.result),
            codec=header.encoding.codec,
            num_elements=header.encoding.num_elements,
            payload=payload,
        )


def apply_update(update: StagedUpdate, held: tuple[Version, torch.Tensor] | None) -> torch.Tensor:
    """Returns the published copy that results, fp32 on the CPU; ``held`` stays as it is.

    Args:
        update: the update.
        held: published copy of the fragment that is held now.

    Raises:
        DilocoError: ``BASE_MISMATCH`` where a delta does not build on what is held,
            ``DIGEST_MISMATCH`` where the result is not what the synchronizer has; or what decoding
            raises. In every case nothing was changed.
    """
    delta = get_codec(update.codec).decode(update.payload, update.num_elements)
    if update.base is None:
        vector = delta
    else:
        if held is None or held[0].digest != update.base.digest:
            here = "nothing" if held is None else str(held[0])
            raise DilocoError(
                Reason.BASE_MISMATCH,
                f"an update of fragment {update.fragment} builds on version {update.base}, but "
                f"{here} is held; the whole fragment is asked for",
                fragment=update.fragment,
            )
        vector = held[1] + delta
    digest = digest_of(bytes_of(vector))
    if digest != update.result.digest:
        raise DilocoError(
            Reason.DIGEST_MISMATCH,
            f"fragment {update.fragment} has checksum {digest[:4].hex()} after the update to "
            f"version {update.result}: it is refused, and the whole fragment is asked for",
            fragment=update.fragment,
        )
    return vector


def _check_encoding(header: synchronizer_pb2.UpdateHeader, num_elements: int) -> None:
    encoding = header.encoding
    if encoding.num_elements != num_elements:
        raise DilocoError(
            Reason.MALFORMED,
            f"an update of fragment {header.fragment} has {encoding.num_elements} elements; the "
            f"fragment has {num_elements}",
        )
    version_from(header.result)
    if header.kind == synchronizer_pb2.UPDATE_KIND_DELTA:
        version_from(header.base)
    elif header.kind != synchronizer_pb2.UPDATE_KIND_FULL:
        raise DilocoError(
            Reason.MALFORMED, f"an update of fragment {header.fragment} is of no known kind"
        )
    elif encoding.codec not in LOSSLESS:
        raise DilocoError(
            Reason.CODEC_MISMATCH,
            f"the whole fragment {header.fragment} comes in codec {encoding.codec!r}; only "
            f"{' and '.join(LOSSLESS)} are lossless",
        )
