"""Payloads in chunks: cut for sending, staged in wire format on arrival (design section 5)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from decoupled_diloco.codecs.base import Payload
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import digest_of

CHUNK_BYTES: Final = 1024 * 1024
"""Bytes per chunk; 256 KiB to 4 MiB measure alike, less and more are slower."""


def payload_digest(payload: Payload) -> bytes:
    """SHA-256 of a payload, as its header states it."""
    return digest_of(payload)


def iter_chunks(payload: Payload, offset: int = 0) -> Iterator[memoryview]:
    """Yields the payload from byte ``offset`` on in views of at most ``CHUNK_BYTES``, in order.

    Raises:
        DilocoError: ``OFFSET_MISMATCH`` at once where ``offset`` is outside the payload.
    """
    if not 0 <= offset <= len(payload):
        raise DilocoError(
            Reason.OFFSET_MISMATCH,
            f"cannot resume at byte {offset} of a payload of {len(payload)} bytes; start at 0",
            offset=offset,
            expected=0,
        )
    view = memoryview(payload)
    return (view[at : at + CHUNK_BYTES] for at in range(offset, len(view), CHUNK_BYTES))


class Stager:
    """Collects one payload in wire format, in one buffer; nothing is decoded before it is whole.

    A sender that was cut off resumes at ``num_bytes``. Not for several threads at a time.

    Args:
        expected_bytes: size that the header claims.
        digest: SHA-256 that the header claims.
        max_bytes: the most that may be claimed (the codec's upper bound); checked before the buffer
            is allocated.

    Raises:
        DilocoError: ``OVERSIZED`` where more is claimed, ``MALFORMED`` for a negative size.
    """

    def __init__(self, expected_bytes: int, digest: bytes, max_bytes: int) -> None:
        if expected_bytes < 0:
            raise DilocoError(
                Reason.MALFORMED, f"a header claims a payload of {expected_bytes} bytes"
            )
        if expected_bytes > max_bytes:
            raise _oversized(expected_bytes, max_bytes)
        self._buffer = memoryview(bytearray(expected_bytes))
        self._digest = digest
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes received so far: the offset of the next chunk."""
        return self._num_bytes

    def add(self, offset: int, data: Payload) -> None:
        """Takes the next chunk.

        A refused chunk changes nothing: the right one may follow.

        Raises:
            DilocoError: ``OFFSET_MISMATCH`` where ``offset`` is not ``num_bytes`` (which the detail
                ``expected`` carries), ``OVERSIZED`` where the chunk ends past the claimed size.
        """
        if offset != self._num_bytes:
            raise DilocoError(
                Reason.OFFSET_MISMATCH,
                f"chunk at byte {offset}, but {self._num_bytes} bytes are here; "
                f"resume at byte {self._num_bytes}",
                offset=offset,
                expected=self._num_bytes,
            )
        end = offset + len(data)
        if end > len(self._buffer):
            raise _oversized(end, len(self._buffer))
        self._buffer[offset:end] = data
        self._hash.update(data)
        self._num_bytes = end

    def finish(self) -> memoryview:
        """Returns the whole payload, read-only, once it is complete and matches its digest.

        Raises:
            DilocoError: ``TRUNCATED`` (more chunks may still follow) or ``CORRUPT``.
        """
        if self._num_bytes < len(self._buffer):
            raise DilocoError(
                Reason.TRUNCATED,
                f"payload ends at byte {self._num_bytes} of {len(self._buffer)}; resume there",
                num_bytes=self._num_bytes,
                expected=len(self._buffer),
            )
        if self._hash.digest() != self._digest:
            raise DilocoError(
                Reason.CORRUPT,
                f"payload of {len(self._buffer)} bytes does not match its digest; send it again",
                num_bytes=len(self._buffer),
            )
        return self._buffer.toreadonly()


def _oversized(num_bytes: int, limit: int) -> DilocoError:
    return DilocoError(
        Reason.OVERSIZED,
        f"payload of at least {num_bytes} bytes, but at most {limit} are due; "
        "check that both ends use one layout and one codec",
        num_bytes=num_bytes,
        limit=limit,
    )
