"""What a layout is made of: tensors, their roles, pieces and fragments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import prod
from typing import Final

from decoupled_diloco.errors import Reason, UsageError

DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of every dtype that a layout accepts, by torch's name without ``torch.``."""


class Role(StrEnum):
    """What a tensor is to the merge: embeddings are averaged, the body is merged by RDA."""

    EMBEDDING = "embedding"
    BODY = "body"


class Strategy(StrEnum):
    """How the tensors are spread over the fragments (paper section 4)."""

    LAYER = "layer"
    TENSOR = "tensor"
    BALANCED = "balanced"
    SUB_TENSOR = "sub-tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One trainable tensor of the model. Tied tensors are one spec; ``aliases`` are the rest.

    Attributes:
        name: dotted name of the parameter.
        shape: shape of the whole tensor; ``()`` for a scalar.
        dtype: a key of ``DTYPE_BYTES``.
        role: decides the fragment and the merge method.
        aliases: further names of the same tensor, kept sorted.

    Raises:
        UsageError: ``LAYOUT_IMPOSSIBLE``, naming the tensor, where a field cannot be right.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = Role.BODY
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "aliases", tuple(sorted(self.aliases)))
        if not self.name or "" in self.aliases:
            raise impossible("a tensor has an empty name; give every parameter a name", self.name)
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise impossible(
                f"tensor {self.name!r} has dtype {self.dtype!r}; only {known} can be merged, "
                "so convert it or exclude it from training",
                self.name,
            )
        if self.role not in tuple(Role):
            raise impossible(
                f"tensor {self.name!r} has role {self.role!r}; a role is one of {', '.join(Role)}",
                self.name,
            )
        if any(size < 1 for size in self.shape):
            raise impossible(
                f"tensor {self.name!r} of shape {self.shape} has no elements; "
                "remove it or exclude it from training",
                self.name,
            )

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in its own dtype."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a tensor that lies in a fragment: ``tensor.narrow(dim, start, stop - start)``.

    Attributes:
        tensor: name of the tensor.
        dim: dimension along which the tensor is cut; 0 for a whole tensor.
        start: first index along ``dim``.
        stop: index after the last along ``dim``; 1 for a scalar.
        shape: shape of the piece; ``()`` for a scalar, which is taken whole.
    """

    tensor: str
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the piece."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Number of rows for norms by row: ``shape[0]`` from two dimensions on, else 1."""
        return self.shape[0] if len(self.shape) >= 2 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The unit of merging: pieces of one role, laid end to end as one flat fp32 vector.

    Attributes:
        index: p, from 0.
        role: role of every piece.
        pieces: in the order of the vector; each is flattened row-major.
    """

    index: int
    role: Role
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        """Length of the fragment's vector."""
        return sum(piece.num_elements for piece in self.pieces)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Element offset of each piece in the fragment's vector."""
        ends = accumulate((piece.num_elements for piece in self.pieces), initial=0)
        return tuple(ends)[:-1]


def impossible(message: str, tensor: str | None = None) -> UsageError:
    """The error for a model that cannot be laid out."""
    details = {} if tensor is None else {"tensor": tensor}
    return UsageError(Reason.LAYOUT_IMPOSSIBLE, message, **details)
