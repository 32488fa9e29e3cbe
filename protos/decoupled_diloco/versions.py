"""Versions and incarnations: the two names that order everything (design section 5)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

DIGEST_BYTES: Final = 32


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of ``data`` (contiguous): digest of payloads, and of published copies as fp32."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True, order=True)
class Incarnation:
    """One life of a learner. Granted at Join, fenced by every later one of the same learner.

    Attributes:
        term: term of leadership that granted it.
        number: counts the lives of this learner id, from 1, over all terms.
    """

    term: int
    number: int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of one fragment's published copy.

    Attributes:
        term: term of leadership in which it was published.
        global_step: global step t that made it; 0 is the seed.
        digest: SHA-256 of the published copy (little-endian fp32). Two copies with the same digest
            are the same version, whatever their numbers; a number alone proves nothing.
    """

    term: int
    global_step: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.term}/{self.global_step}#{self.digest[:4].hex()}"
