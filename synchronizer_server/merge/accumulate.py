"""Merging contributions into one outer gradient: weighted average and RDA (paper section 2).

RDA (radial-directional averaging) keeps the length of one learner's outer gradient where a plain
average of nearly orthogonal vectors would shrink it: per unit (a tensor, a fragment or a row),

    merged = (sum w*|v| / sum w) * unit(sum w*unit(v)).

Both methods run incrementally: every contribution goes once into running sums and is then free, so
memory does not depend on the number of contributors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from synchronizer_server.merge.norms import row_norms

if TYPE_CHECKING:
    from decoupled_diloco.layout import Piece

MIN_DIRECTION: Final = 1e-6
"""Mean direction below which contributors cancel and are averaged instead (design section 4)."""

MIN_NORM: Final = 1e-30
"""Norm below which fp32 cannot resolve a direction: such a vector counts as zero for RDA."""

_MAX_RELATIVE_WEIGHT: Final = 2.0**20


class MergeMethod(StrEnum):
    """How contributions are merged."""

    RDA = "rda"
    AVERAGE = "average"


class Granularity(StrEnum):
    """What RDA treats as one vector, with a norm and a direction of its own.

    TENSOR is the piece where a tensor is cut; ROW is a row along the first dimension of a piece
    with two dimensions or more (a piece with fewer is one row).
    """

    TENSOR = "tensor"
    FRAGMENT = "fragment"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class _Block:
    """A run of ``rows * columns`` elements at ``start``; each row is one unit of RDA."""

    start: int
    rows: int
    columns: int

    def of(self, vector: Tensor) -> Tensor:
        """View [rows, columns] of this block in a vector of the fragment."""
        return vector.narrow(0, self.start, self.rows * self.columns).view(self.rows, self.columns)


def _blocks(pieces: Sequence[Piece], granularity: Granularity) -> Iterator[_Block]:
    """Cuts a fragment into blocks of units."""
    if granularity is Granularity.FRAGMENT:
        yield _Block(0, 1, sum(piece.num_elements for piece in pieces))
        return
    start = 0
    for piece in pieces:
        rows = piece.rows if granularity is Granularity.ROW else 1
        yield _Block(start, rows, piece.num_elements // rows)
        start += piece.num_elements


class Accumulator:
    """Merges the contributions to one fragment in one round, in order of arrival.

    That order is the order of the fp32 sums. ``add`` works in place; only rows of zero or absurd
    norm are copied for a moment, to be measured in fp64.
    Memory: one fp32 [n] for AVERAGE, two for RDA. The second is the price of the fall-back: the
    average of vectors that cancel cannot be had from their directions, and only the last arrival
    shows that they cancel; it costs one more in-place pass per arrival, and keeps the fall-back
    exact. The sums use weights relative to the first one (so the first arrival is kept as it came:
    a single contributor is merged into exactly itself, and fp32 sums cannot overflow).

    Args:
        pieces: the fragment's pieces in order; their elements add up to n.
        method: how to merge.
        granularity: the unit of RDA; without effect for AVERAGE.

    Attributes:
        num_contributions: contributions added, those of weight 0 included.
        total_weight: sum of their weights.
    """

    def __init__(
        self, pieces: Sequence[Piece], method: MergeMethod, granularity: Granularity
    ) -> None:
        num_elements = sum(piece.num_elements for piece in pieces)
        self.num_contributions = 0
        self.total_weight = 0.0
        self._num_weighted = 0
        self._unit_weight = 0.0
        self._vectors = torch.zeros(num_elements)
        self._directions: Tensor | None = None
        self._blocks: list[_Block] = []
        if method is MergeMethod.RDA:
            self._directions = torch.zeros(num_elements)
            self._blocks = list(_blocks(pieces, granularity))
        self._norms = [torch.zeros(block.rows, dtype=torch.float64) for block in self._blocks]

    def add(self, vector: Tensor, weight: float) -> None:
        """Adds one contribution that has been validated whole; ``vector`` is not kept.

        Args:
            vector: outer gradient v, fp32 [n], finite.
            weight: its weight, finite and not negative; 0 merges nothing.
        """
        assert vector.shape == self._vectors.shape, "validated before"
        assert 0 <= weight < math.inf, "weights come from contribution_weight"
        self.num_contributions += 1
        if weight == 0:
            return
        self.total_weight += weight
        relative = self._relative(weight)
        if self._num_weighted == 0:
            self._vectors.copy_(vector)
        else:
            self._vectors.add_(vector, alpha=relative)
        self._num_weighted += 1
        if self._directions is not None:
            self._add_directions(self._directions, vector, relative)

    def result(self) -> Tensor:
        """The merged outer gradient so far, as a new fp32 [n]; zeros where the weight is 0."""
        if self._num_weighted <= 1:
            return self._vectors.clone()
        total = self.total_weight / self._unit_weight
        if self._directions is None:
            return self._vectors / total
        merged = torch.empty_like(self._vectors)
        for block, norms in zip(self._blocks, self._norms, strict=True):
            directions = block.of(self._directions)
            lengths = row_norms(directions)
            cancelled = lengths < MIN_DIRECTION * total
            scales = (norms / total / lengths).masked_fill_(cancelled, 0).float()
            target = block.of(merged)
            torch.mul(directions, scales[:, None], out=target)
            if bool(cancelled.any()):
                target[cancelled] = block.of(self._vectors)[cancelled] / total
        return merged

    def _relative(self, weight: float) -> float:
        """Weight over the weight that counts as 1, which grows where the ratio becomes absurd."""
        if self._unit_weight == 0:
            self._unit_weight = weight
        relative = weight / self._unit_weight
        if relative <= _MAX_RELATIVE_WEIGHT:
            return relative
        sums = [self._vectors, *self._norms]
        if self._directions is not None:
            sums.append(self._directions)
        for tensor in sums:
            tensor.mul_(1 / relative)
        self._unit_weight = weight
        return 1.0

    def _add_directions(self, directions: Tensor, vector: Tensor, weight: float) -> None:
        """Adds w*|v| and w*unit(v) of every unit."""
        for block, norms in zip(self._blocks, self._norms, strict=True):
            part = block.of(vector)
            lengths = row_norms(part)
            lengths.masked_fill_(lengths < MIN_NORM, 0)
            norms.add_(lengths, alpha=weight)
            factors = (weight / lengths).masked_fill_(lengths == 0, 0).float()
            block.of(directions).addcmul_(part, factors[:, None])
