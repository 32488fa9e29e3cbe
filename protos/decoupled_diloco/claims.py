"""Claims of leadership: who says that it leads a run, signed so that learners can relay it.

Only synchronizers hold the key. A learner compares terms and passes claims on; a synchronizer
obeys a claim only after `Claim.is_signed_with`.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace

from decoupled_diloco.v1 import types_pb2

_PURPOSE = b"decoupled-diloco leadership v1"


def sign(key: bytes, purpose: bytes, *fields: str | int | bytes) -> bytes:
    """HMAC-SHA-256 over a purpose and fields, each with its length.

    Args:
        key: the key.
        purpose: what is signed: no signature of one kind is good as one of another.
        fields: what is said.
    """
    encoded = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    # Lengths keep one field from reading as another.
    text = b"".join(len(field).to_bytes(8, "big") + field for field in (purpose, *encoded))
    return hmac.new(key, text, hashlib.sha256).digest()


def is_signature(signature: bytes, key: bytes, purpose: bytes, *fields: str | int | bytes) -> bool:
    """Whether `sign` made it with this key; without a key nothing is believed."""
    return bool(key) and hmac.compare_digest(signature, sign(key, purpose, *fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of leadership.

    Attributes:
        run_id: run that is led.
        term: term of leadership, from 1; 0 where nobody has led yet.
        leader_id: random id of the leading process.
        signature: HMAC-SHA-256 over the fields above; empty where it is not signed.
    """

    run_id: str
    term: int
    leader_id: str
    signature: bytes = b""

    def signed_with(self, key: bytes) -> Claim:
        """The same claim, signed; as it is where there is no key."""
        return replace(self, signature=sign(key, _PURPOSE, *self._fields())) if key else self

    def is_signed_with(self, key: bytes) -> bool:
        """Whether a holder of the key made it; without a key nothing is believed."""
        return is_signature(self.signature, key, _PURPOSE, *self._fields())

    def _fields(self) -> tuple[str, int, str]:
        return self.run_id, self.term, self.leader_id

    def to_proto(self) -> types_pb2.LeadershipClaim:
        """The claim as a message."""
        return types_pb2.LeadershipClaim(
            run_id=self.run_id,
            term=self.term,
            leader_id=self.leader_id,
            signature=self.signature,
        )


def claim_from(message: types_pb2.LeadershipClaim) -> Claim:
    """Reads a claim from anywhere; nothing about it is believed yet."""
    return Claim(
        run_id=message.run_id,
        term=message.term,
        leader_id=message.leader_id,
        signature=message.signature,
    )
