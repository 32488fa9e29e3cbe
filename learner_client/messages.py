"""Values to and from protobuf messages; what comes from outside is checked here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Role, TensorSpec
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import DIGEST_BYTES, Incarnation, Version

_ROLES = {
    Role.EMBEDDING: types_pb2.TENSOR_ROLE_EMBEDDING,
    Role.BODY: types_pb2.TENSOR_ROLE_BODY,
}


def specs_to_proto(tensors: Iterable[TensorSpec]) -> list[types_pb2.TensorSpec]:
    """The model's tensors."""
    return [
        types_pb2.TensorSpec(
            name=spec.name,
            shape=spec.shape,
            dtype=spec.dtype,
            role=_ROLES[spec.role],
            aliases=spec.aliases,
        )
        for spec in tensors
    ]


def version_to_proto(version: Version) -> types_pb2.Version:
    """A version."""
    return types_pb2.Version(
        term=version.term, global_step=version.global_step, digest=version.digest
    )


def version_from_proto(message: types_pb2.Version) -> Version:
    """A version as heard.

    Raises:
        DilocoError: ``MALFORMED`` where the digest is not a SHA-256.
    """
    if len(message.digest) != DIGEST_BYTES:
        raise DilocoError(
            Reason.MALFORMED,
            f"version {message.term}/{message.global_step} has a digest of "
            f"{len(message.digest)} bytes; a SHA-256 has {DIGEST_BYTES}",
        )
    return Version(term=message.term, global_step=message.global_step, digest=bytes(message.digest))


def held_to_proto(held: Mapping[int, Version]) -> list[types_pb2.FragmentVersion]:
    """Versions held, by fragment."""
    return [
        types_pb2.FragmentVersion(fragment=p, version=version_to_proto(held[p]))
        for p in sorted(held)
    ]


def incarnation_to_proto(incarnation: Incarnation) -> types_pb2.Incarnation:
    """An incarnation."""
    return types_pb2.Incarnation(term=incarnation.term, number=incarnation.number)


def incarnation_from_proto(message: types_pb2.Incarnation) -> Incarnation:
    """An incarnation as heard.

    Raises:
        DilocoError: ``MALFORMED`` where none was granted.
    """
    if message.number < 1:
        raise DilocoError(
            Reason.MALFORMED, "the synchronizer granted no incarnation; check its version"
        )
    return Incarnation(message.term, message.number)
