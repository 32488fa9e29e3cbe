"""Proofs between synchronizers that the other side holds the run's key, fresh for every exchange.

A signed claim of leadership is known to every learner and can be repeated by anybody; what is
signed here holds for one stream, or one question, alone.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.claims import Claim, is_signature, sign
from decoupled_diloco.v1 import admin_pb2

NONCE_BYTES: Final = 32

_STANDBY: Final = b"decoupled-diloco replication standby v1"
_LEADER: Final = b"decoupled-diloco replication leader v1"
_STATUS: Final = b"decoupled-diloco synchronizer status v1"


def new_nonce() -> bytes:
    """Random bytes that nobody has signed anything over."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """What both sides of a replication stream sign, each with a purpose of its own.

    Attributes:
        claim: the leader's claim.
        standby_id: id of the standby.
        leader_nonce: drawn by the leader for this stream.
        standby_nonce: drawn by the standby for this stream.
    """

    claim: Claim
    standby_id: str
    leader_nonce: bytes
    standby_nonce: bytes

    def standby_proof(self, key: bytes) -> bytes:
        """What the standby sends in its hello."""
        return sign(key, _STANDBY, *self._fields())

    def leader_proof(self, key: bytes) -> bytes:
        """What the leader sends with the run."""
        return sign(key, _LEADER, *self._fields())

    def proves_standby(self, proof: bytes, key: bytes) -> bool:
        """Whether a standby with our key made it for this stream."""
        return self._is_fresh() and is_signature(proof, key, _STANDBY, *self._fields())

    def proves_leader(self, proof: bytes, key: bytes) -> bool:
        """Whether a leader with our key made it for this stream."""
        return self._is_fresh() and is_signature(proof, key, _LEADER, *self._fields())

    def _is_fresh(self) -> bool:
        return len(self.leader_nonce) == len(self.standby_nonce) == NONCE_BYTES

    def _fields(self) -> tuple[str | int | bytes, ...]:
        claim = self.claim
        ids = (claim.run_id, claim.term, claim.leader_id, self.standby_id)
        return (*ids, self.leader_nonce, self.standby_nonce)


def signed_status(
    status: admin_pb2.GetStatusResponse, key: bytes, nonce: bytes
) -> admin_pb2.GetStatusResponse:
    """What a peer that asks is told: where we stand, signed, and no list of learners."""
    return admin_pb2.GetStatusResponse(
        run_id=status.run_id,
        claim=status.claim,
        role=status.role,
        record_term=status.record_term,
        global_step=status.global_step,
        proof=sign(key, _STATUS, *_status_fields(status, nonce)),
    )


def proves_status(
    status: admin_pb2.GetStatusResponse, key: bytes, *, run_id: str, nonce: bytes
) -> bool:
    """Whether a synchronizer of the run with our key said so, in answer to this nonce."""
    fields = _status_fields(status, nonce)
    return status.run_id == run_id and is_signature(status.proof, key, _STATUS, *fields)


def _status_fields(
    status: admin_pb2.GetStatusResponse, nonce: bytes
) -> tuple[str | int | bytes, ...]:
    claim = status.claim
    position = (status.record_term, status.global_step)
    return (status.run_id, nonce, status.role, *position, claim.term, claim.leader_id)
