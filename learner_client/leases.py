"""Data leases as values: what is leased, how far it is trained, and what a snapshot keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from decoupled_diloco.versions import Incarnation

_USED: Final = -1
_NUM_COLUMNS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A range of the data, as leased.

    Attributes:
        lease_id: names it.
        epoch: pass over the data.
        start: first position.
        stop: position behind the last one.
    """

    lease_id: int
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the data stands at an inner-step boundary.

    Attributes:
        lease_id: lease in use; 0 without one.
        position: first position of it that is not trained.
        is_lost: True where the step trained on samples that belong to others by now.
    """

    lease_id: int = 0
    position: int = 0
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLeases:
    """The leases of a learner at an inner-step boundary, in order.

    Attributes:
        incarnation: who holds them.
        used: leases that are trained as a whole, and of which something may not be merged.
        held: the others, each with the position up to which it is trained.
    """

    incarnation: Incarnation
    used: tuple[Lease, ...]
    held: tuple[tuple[Lease, int], ...]

    def to_tensor(self) -> torch.Tensor:
        """As rows of whole numbers; the first one names the incarnation."""
        rows = [(self.incarnation.term, self.incarnation.number, 0, 0, 0)]
        rows += [(x.lease_id, x.epoch, x.start, x.stop, _USED) for x in self.used]
        rows += [(x.lease_id, x.epoch, x.start, x.stop, to) for x, to in self.held]
        return torch.tensor(rows, dtype=torch.int64)


def saved_leases_from(rows: torch.Tensor) -> SavedLeases:
    """Reads what ``SavedLeases.to_tensor`` made.

    Raises:
        ValueError: where it cannot be that.
    """
    if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != _NUM_COLUMNS:
        raise ValueError("leases that are no rows of five whole numbers")
    (term, number, *_), *leases = rows.tolist()
    used: list[Lease] = []
    held: list[tuple[Lease, int]] = []
    before = 0
    for lease_id, epoch, start, stop, trained_to in leases:
        lease = Lease(lease_id=lease_id, epoch=epoch, start=start, stop=stop)
        if lease_id <= before or epoch < 0 or not 0 <= start < stop:
            raise ValueError(f"{lease} cannot be")
        before = lease_id
        if trained_to == _USED and not held:
            used.append(lease)
        elif start <= trained_to <= stop:
            held.append((lease, trained_to))
        else:
            raise ValueError(f"{lease} is trained to {trained_to}")
    if min(term, number) < 1:
        raise ValueError(f"leases of incarnation {term}.{number}")
    return SavedLeases(incarnation=Incarnation(term, number), used=tuple(used), held=tuple(held))
