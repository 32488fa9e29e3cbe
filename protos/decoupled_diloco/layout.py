"""The layout: which part of which tensor lies in which fragment (design 4, paper 4).

Every process of a run computes the layout on its own and must get the same one, so it depends on
nothing but the set of tensors (not their order) and the settings. ``fingerprint`` proves it.

Fragments are of one role, because the role decides how a fragment is merged. Here this layout
departs from the paper, whose fragment 0 holds everything outside the transformer blocks: with the
strategies ``layer`` and ``tensor`` fragment 0 holds the embedding role alone, and other tensors
without a block (a final norm, an untied output head) join the smallest body fragment. A model
without embeddings keeps the paper's fragment 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from math import prod
from typing import Final

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.partition import cut_evenly, fill_smallest, share_bins

DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of every dtype that a layout accepts, by torch's name without ``torch.``."""

_FINGERPRINT_FORMAT: Final = "layout/1"
"""Changes whenever the same tensors and settings give other fragments than before."""


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
            raise _impossible("a tensor has an empty name; give every parameter a name", self.name)
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise _impossible(
                f"tensor {self.name!r} has dtype {self.dtype!r}; only {known} can be merged, "
                "so convert it or exclude it from training",
                self.name,
            )
        if self.role not in tuple(Role):
            raise _impossible(
                f"tensor {self.name!r} has role {self.role!r}; a role is one of {', '.join(Role)}",
                self.name,
            )
        if any(size < 1 for size in self.shape):
            raise _impossible(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Tensors, and the fragments that hold each of their elements exactly once.

    Attributes:
        tensors: in canonical order (dotted names, integer components by value).
        fragments: by index; all non-empty.
        strategy: how the fragments were made.
        fingerprint: SHA-256 (hex) over names, shapes, dtypes, roles, aliases, strategy and P. The
            same in every process and Python version.
    """

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    strategy: Strategy
    fingerprint: str = field(init=False)
    _by_name: dict[str, TensorSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {spec.name: spec for spec in self.tensors}
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(
            self, "fingerprint", _fingerprint(self.tensors, self.strategy, len(self.fragments))
        )

    @property
    def num_fragments(self) -> int:
        """P, the number of fragments that there are (at most the number asked for)."""
        return len(self.fragments)

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements, tied tensors counted once."""
        return sum(spec.num_elements for spec in self.tensors)

    def tensor(self, name: str) -> TensorSpec:
        """Returns the tensor with this name (not an alias); ``KeyError`` where there is none."""
        return self._by_name[name]


def build_layout(
    tensors: Sequence[TensorSpec], *, strategy: Strategy, num_fragments: int, overlap: int
) -> Layout:
    """Spreads the tensors over at most ``num_fragments`` fragments.

    P is ``num_fragments`` or as many as model and strategy allow, whichever is less. Bounds, where
    mean is a role's size over the number of its fragments: ``balanced`` body fragments hold at most
    4/3 of the bytes of the best possible partition; ``sub-tensor`` fragments hold at most mean plus
    one granule (row, or column of a 2-d embedding) of elements.

    Args:
        tensors: in any order, tied tensors once.
        strategy: see ``Strategy``.
        num_fragments: P as set.
        overlap: tau, the rounds in flight, each of another fragment; P must exceed it.

    Raises:
        UsageError: ``LAYOUT_IMPOSSIBLE``: no tensors, a name twice, or P not above ``overlap``.
    """
    _check_names(tensors)
    ordered = sorted(tensors, key=_natural_key)
    by_role = {
        role: specs
        for role in (Role.EMBEDDING, Role.BODY)
        if (specs := [spec for spec in ordered if spec.role == role])
    }
    if num_fragments < len(by_role):
        raise _impossible(
            f"num_fragments = {num_fragments} is too small: the model has tensors of "
            f"{len(by_role)} roles ({', '.join(by_role)}), which need a fragment each; "
            f"set num_fragments to at least {max(len(by_role), overlap + 1)}"
        )
    if strategy is Strategy.SUB_TENSOR:
        bins = _cut_roles(by_role, num_fragments)
    else:
        bins = _whole_tensors(by_role, strategy, num_fragments)
    _check_overlap(len(bins), strategy, num_fragments, overlap)
    fragments = tuple(
        Fragment(index=index, role=role, pieces=tuple(pieces))
        for index, (role, pieces) in enumerate(bins)
    )
    return Layout(tensors=tuple(ordered), fragments=fragments, strategy=strategy)


def first_difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str | None:
    """Returns a sentence on the first tensor that differs and how; None where none does.

    "First" is in canonical order of names. "here" in the sentence is ``ours``, "there" ``theirs``.
    """
    here = {spec.name: spec for spec in ours}
    there = {spec.name: spec for spec in theirs}
    for spec in sorted((here | there).values(), key=_natural_key):
        name = spec.name
        if name not in there:
            return f"tensor {name!r} of shape {spec.shape} is missing there{_tied(name, theirs)}"
        if name not in here:
            return f"tensor {name!r} of shape {spec.shape} is extra there{_tied(name, ours)}"
        for what in ("shape", "dtype", "role", "aliases"):
            our_value, their_value = getattr(here[name], what), getattr(there[name], what)
            if our_value != their_value:
                return f"tensor {name!r} has {what} {our_value} here and {their_value} there"
    return None


_Bins = list[tuple[Role, list[Piece]]]


def _impossible(message: str, tensor: str | None = None) -> UsageError:
    details = {} if tensor is None else {"tensor": tensor}
    return UsageError(Reason.LAYOUT_IMPOSSIBLE, message, **details)


def _tied(name: str, specs: Sequence[TensorSpec]) -> str:
    """Explains a name that one side has as a tensor and the other as an alias."""
    for spec in specs:
        if name in spec.aliases:
            return f" as a tensor of its own: one side ties it to {spec.name!r}, the other does not"
    return ""


def _check_names(tensors: Sequence[TensorSpec]) -> None:
    if not tensors:
        raise _impossible("the model has no trainable tensors; set requires_grad on some")
    seen: set[str] = set()
    for spec in tensors:
        for name in (spec.name, *spec.aliases):
            if name in seen:
                raise _impossible(
                    f"tensor {name!r} is listed twice; list a tied tensor once, with aliases", name
                )
            seen.add(name)


def _check_overlap(found: int, strategy: Strategy, num_fragments: int, overlap: int) -> None:
    if found > overlap:
        return
    need = f"overlap = {overlap} needs at least {overlap + 1} fragments"
    if num_fragments <= overlap:
        raise _impossible(f"{need}, but num_fragments = {num_fragments}; raise it or lower overlap")
    finer = [Strategy.TENSOR, Strategy.BALANCED, Strategy.SUB_TENSOR]
    if strategy in finer:
        finer = finer[finer.index(strategy) + 1 :]
    other = f", or try strategy {' or '.join(repr(str(s)) for s in finer)}" if finer else ""
    raise _impossible(
        f"{need}, but this model with strategy {str(strategy)!r} gives only {found}; "
        f"set overlap to at most {found - 1}{other}"
    )


def _fingerprint(tensors: Iterable[TensorSpec], strategy: Strategy, num_fragments: int) -> str:
    rows = [[t.name, list(t.shape), t.dtype, str(t.role), list(t.aliases)] for t in tensors]
    text = json.dumps(
        [_FINGERPRINT_FORMAT, str(strategy), num_fragments, rows], separators=(",", ":")
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _number(component: str) -> int | None:
    """The value of a component of a dotted name that is an integer."""
    # Longer runs of digits are no index, and int() may refuse them.
    is_index = component.isascii() and component.isdecimal() and len(component) <= 18
    return int(component) if is_index else None


def _natural_key(spec: TensorSpec) -> tuple[list[tuple[int, str]], str]:
    """Orders ``h.2`` before ``h.10``; a total order, since the name itself breaks ties."""
    parts = spec.name.split(".")
    numbers = [(_number(part), part) for part in parts]
    return [(-1 if n is None else n, part) for n, part in numbers], spec.name


def _block_of(spec: TensorSpec) -> tuple[str, int] | None:
    """The transformer block: the first integer component of the name, with what precedes it."""
    parts = spec.name.split(".")
    for index, part in enumerate(parts):
        number = _number(part)
        if number is not None:
            return ".".join(parts[:index]), number
    return None


def _whole(spec: TensorSpec) -> Piece:
    stop = spec.shape[0] if spec.shape else 1
    return Piece(tensor=spec.name, dim=0, start=0, stop=stop, shape=spec.shape)


def _whole_tensors(
    by_role: dict[Role, list[TensorSpec]], strategy: Strategy, num_fragments: int
) -> _Bins:
    """Embedding in fragment 0, the body over the others, no tensor cut."""
    embedding, body = by_role.get(Role.EMBEDDING, []), by_role.get(Role.BODY, [])
    num_bins = num_fragments - bool(embedding)
    body_bins: list[list[int]] = []
    if body and strategy is Strategy.BALANCED:
        body_bins = [[] for _ in range(min(num_bins, len(body)))]
        _fill(body_bins, body, range(len(body)))
    elif body:
        body_bins = _strided(
            body, num_bins, by_block=strategy is Strategy.LAYER, head=not embedding
        )
    bins: _Bins = [(Role.EMBEDDING, [_whole(spec) for spec in embedding])] if embedding else []
    bins.extend((Role.BODY, [_whole(body[i]) for i in sorted(held)]) for held in body_bins)
    return bins


def _fill(bins: list[list[int]], body: list[TensorSpec], items: Iterable[int]) -> None:
    """By bytes descending, then name, each into the smallest bin so far."""
    ordered = sorted(items, key=lambda i: (-body[i].num_bytes, body[i].name))
    fill_smallest(bins, ordered, [spec.num_bytes for spec in body])


def _strided(
    body: list[TensorSpec], num_bins: int, *, by_block: bool, head: bool
) -> list[list[int]]:
    """Blocks, or the tensors of blocks, by stride; what has no block into a bin of its own in front
    (``head``, where no embedding takes that place) or else into the smallest bins.
    """
    loose: list[int] = []
    units: dict[object, list[int]] = {}
    for index, spec in enumerate(body):
        block = _block_of(spec)
        if block is None:
            loose.append(index)
        else:
            units.setdefault(block if by_block else index, []).append(index)
    own_head = head and bool(loose) and bool(units) and num_bins > 1
    num_strides = max(1, min(num_bins - own_head, len(units)))
    bins: list[list[int]] = [[] for _ in range(num_strides)]
    for index, unit in enumerate(units.values()):
        bins[index % num_strides].extend(unit)
    if own_head:
        return [loose, *bins]
    _fill(bins, body, loose)
    return bins


def _cut_dim(spec: TensorSpec) -> int:
    """The output dimension: columns of an embedding table, rows of everything else."""
    return 1 if spec.role is Role.EMBEDDING and len(spec.shape) == 2 else 0


def _num_granules(spec: TensorSpec) -> int:
    return spec.shape[_cut_dim(spec)] if spec.shape else 1


def _cut_roles(by_role: dict[Role, list[TensorSpec]], num_fragments: int) -> _Bins:
    """Shares the fragments out between the roles by size, then cuts each role evenly.

    Sizes are in elements, not bytes: what a fragment costs on the wire depends on the codec, not
    on the dtype in which the model keeps it.
    """
    sizes = [[spec.num_elements for spec in specs] for specs in by_role.values()]
    granules = [[_num_granules(spec) for spec in specs] for specs in by_role.values()]
    limits = [sum(numbers) for numbers in granules]
    counts = share_bins([sum(s) for s in sizes], limits, min(num_fragments, sum(limits)))
    bins: _Bins = []
    for index, (role, specs) in enumerate(by_role.items()):
        for run in cut_evenly(sizes[index], granules[index], counts[index]):
            bins.append((role, [_piece(specs[s.item], s.start, s.stop) for s in run]))
    return bins


def _piece(spec: TensorSpec, start: int, stop: int) -> Piece:
    if stop - start == _num_granules(spec):
        return _whole(spec)
    dim = _cut_dim(spec)
    shape = (*spec.shape[:dim], stop - start, *spec.shape[dim + 1 :])
    return Piece(tensor=spec.name, dim=dim, start=start, stop=stop, shape=shape)
