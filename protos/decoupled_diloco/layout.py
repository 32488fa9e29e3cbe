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
from typing import Final

from decoupled_diloco.parts import (
    DTYPE_BYTES,
    Fragment,
    Piece,
    Role,
    Strategy,
    TensorSpec,
    impossible,
)
from decoupled_diloco.strategies import cut_roles, natural_key, whole_tensors

__all__ = [
    "DTYPE_BYTES",
    "Fragment",
    "Layout",
    "Piece",
    "Role",
    "Strategy",
    "TensorSpec",
    "build_layout",
    "first_difference",
]

_FINGERPRINT_FORMAT: Final = "layout/1"
"""Changes whenever the same tensors and settings give other fragments than before."""


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
    ordered = sorted(tensors, key=natural_key)
    by_role = {
        role: specs
        for role in (Role.EMBEDDING, Role.BODY)
        if (specs := [spec for spec in ordered if spec.role == role])
    }
    if num_fragments < len(by_role):
        raise impossible(
            f"num_fragments = {num_fragments} is too small: the model has tensors of "
            f"{len(by_role)} roles ({', '.join(by_role)}), which need a fragment each; "
            f"set num_fragments to at least {max(len(by_role), overlap + 1)}"
        )
    if strategy is Strategy.SUB_TENSOR:
        bins = cut_roles(by_role, num_fragments)
    else:
        bins = whole_tensors(by_role, strategy, num_fragments)
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
    for spec in sorted((here | there).values(), key=natural_key):
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


def _tied(name: str, specs: Sequence[TensorSpec]) -> str:
    """Explains a name that one side has as a tensor and the other as an alias."""
    for spec in specs:
        if name in spec.aliases:
            return f" as a tensor of its own: one side ties it to {spec.name!r}, the other does not"
    return ""


def _check_names(tensors: Sequence[TensorSpec]) -> None:
    if not tensors:
        raise impossible("the model has no trainable tensors; set requires_grad on some")
    seen: set[str] = set()
    for spec in tensors:
        for name in (spec.name, *spec.aliases):
            if name in seen:
                raise impossible(
                    f"tensor {name!r} is listed twice; list a tied tensor once, with aliases", name
                )
            seen.add(name)


def _check_overlap(found: int, strategy: Strategy, num_fragments: int, overlap: int) -> None:
    if found > overlap:
        return
    need = f"overlap = {overlap} needs at least {overlap + 1} fragments"
    if num_fragments <= overlap:
        raise impossible(f"{need}, but num_fragments = {num_fragments}; raise it or lower overlap")
    finer = [Strategy.TENSOR, Strategy.BALANCED, Strategy.SUB_TENSOR]
    if strategy in finer:
        finer = finer[finer.index(strategy) + 1 :]
    other = f", or try strategy {' or '.join(repr(str(s)) for s in finer)}" if finer else ""
    raise impossible(
        f"{need}, but this model with strategy {str(strategy)!r} gives only {found}; "
        f"set overlap to at most {found - 1}{other}"
    )


def _fingerprint(tensors: Iterable[TensorSpec], strategy: Strategy, num_fragments: int) -> str:
    rows = [[t.name, list(t.shape), t.dtype, str(t.role), list(t.aliases)] for t in tensors]
    text = json.dumps(
        [_FINGERPRINT_FORMAT, str(strategy), num_fragments, rows], separators=(",", ":")
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()
