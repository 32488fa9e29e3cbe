"""Between messages and values, for both sides. What comes in is checked here, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout, Role, TensorSpec
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import DIGEST_BYTES, Incarnation, Version

MAX_COUNT: Final = 2**53
"""Steps, terms and tokens above that cannot be, and no record could keep their sums."""

INNER_STATE_CODEC: Final = "safetensors"
"""How inner state is encoded on its way from a donor to a recovering learner."""

_INNER_STATE_RATIO: Final = 16
_INNER_STATE_NAMES_BYTES: Final = 1 << 20

_ROLES: Final = {
    Role.EMBEDDING: types_pb2.TENSOR_ROLE_EMBEDDING,
    Role.BODY: types_pb2.TENSOR_ROLE_BODY,
}


def malformed(what: str) -> DilocoError:
    """The error for a message that cannot be right."""
    return DilocoError(Reason.MALFORMED, f"{what}; check the versions of both ends")


def check_count(number: int, what: str) -> int:
    """Returns a counter from outside that can be right.

    Raises:
        DilocoError: MALFORMED.
    """
    if number > MAX_COUNT:
        raise malformed(f"{what} is {number}, at most {MAX_COUNT} can be")
    return number


def inner_state_limit(layout: Layout) -> int:
    """The most bytes of inner state that can be meant, as safetensors: 16 x the parameters in fp32.

    AdamW keeps 2 x; a small model's names may take more than its tensors.
    """
    return 4 * layout.num_parameters * _INNER_STATE_RATIO + _INNER_STATE_NAMES_BYTES


def incarnation_from(message: types_pb2.Incarnation) -> Incarnation:
    """Reads an incarnation; one that nobody granted has number 0 and is never current."""
    return Incarnation(message.term, message.number)


def incarnation_to(incarnation: Incarnation) -> types_pb2.Incarnation:
    """Writes an incarnation."""
    return types_pb2.Incarnation(term=incarnation.term, number=incarnation.number)


def version_from(message: types_pb2.Version) -> Version:
    """Reads a version.

    Raises:
        DilocoError: MALFORMED where the digest has another size, or a number cannot be.
    """
    check_count(message.term, "a version's term")
    check_count(message.global_step, "a version's global step")
    if len(message.digest) != DIGEST_BYTES:
        raise malformed(f"a version's digest has {len(message.digest)} bytes, not {DIGEST_BYTES}")
    return Version(message.term, message.global_step, message.digest)


def version_to(version: Version) -> types_pb2.Version:
    """Writes a version."""
    return types_pb2.Version(
        term=version.term, global_step=version.global_step, digest=version.digest
    )


def held_from(messages: Iterable[types_pb2.FragmentVersion], limit: int) -> dict[int, Version]:
    """Reads what somebody holds, by fragment; fragments from ``limit`` on are not ours."""
    return {m.fragment: version_from(m.version) for m in messages if m.fragment < limit}


def held_to(held: Mapping[int, Version]) -> list[types_pb2.FragmentVersion]:
    """Writes what somebody holds, by fragment."""
    return [
        types_pb2.FragmentVersion(fragment=fragment, version=version_to(held[fragment]))
        for fragment in sorted(held)
    ]


def tensors_from(messages: Iterable[types_pb2.TensorSpec]) -> list[TensorSpec]:
    """Reads the tensors of a model.

    Raises:
        DilocoError: MALFORMED for an unknown role; what `TensorSpec` refuses.
    """
    roles = {wire: role for role, wire in _ROLES.items()}
    found = []
    for message in messages:
        role = roles.get(message.role)
        if role is None:
            raise malformed(f"tensor {message.name!r} has role {message.role}")
        found.append(
            TensorSpec(
                name=message.name,
                shape=tuple(message.shape),
                dtype=message.dtype,
                role=role,
                aliases=tuple(message.aliases),
            )
        )
    return found


def tensors_to(tensors: Iterable[TensorSpec]) -> list[types_pb2.TensorSpec]:
    """Writes the tensors of a model."""
    return [
        types_pb2.TensorSpec(
            name=t.name, shape=t.shape, dtype=t.dtype, role=_ROLES[t.role], aliases=t.aliases
        )
        for t in tensors
    ]
