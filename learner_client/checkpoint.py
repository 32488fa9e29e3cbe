"""A learner's state as a flat dict of tensors, fit for safetensors; never pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from decoupled_diloco.codecs.base import bytes_of
from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.snapshots import SnapshotName
from decoupled_diloco.versions import DIGEST_BYTES, Version, digest_of
from learner_client.core.counters import Counters, Totals
from learner_client.leases import SavedLeases, saved_leases_from

_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The snapshot that a state belongs to; captured within a boundary, which is to be finished.

    Attributes:
        name: its cut.
        num_tokens: tokens of the inner step that ended there: its report is still to be made.
    """

    name: SnapshotName
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a learner needs to go on where it was.

    Attributes:
        fingerprint: fingerprint of the layout.
        local_step: local step.
        counters: steps and tokens, and where each fragment's counters start.
        published: version and published copy (fp32, CPU) applied last, by fragment.
        cut: the snapshot that it is a part of; None where it was saved between two steps.
        leases: with a cut, the data that was on lease; None where the run leases none.
    """

    fingerprint: str
    local_step: int
    counters: Counters
    published: dict[int, tuple[Version, torch.Tensor]]
    cut: Cut | None = None
    leases: SavedLeases | None = None

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name; none shares memory with another one."""
        totals = self.counters.totals
        rows = [(totals.num_steps, totals.num_tokens)]
        rows += [(origin.num_steps, origin.num_tokens) for origin in self.counters.origins]
        applied = [(o.num_steps, o.num_tokens) for o in self.counters.applied_origins]
        versions = [self.published[p][0] for p in sorted(self.published)]
        state = {
            "format": torch.tensor([_FORMAT]),
            "fingerprint": torch.tensor(list(bytes.fromhex(self.fingerprint)), dtype=torch.uint8),
            "local_step": torch.tensor([self.local_step]),
            "counters": torch.tensor(rows),
            "applied": torch.tensor(applied),
            "versions": torch.tensor([(v.term, v.global_step) for v in versions]),
        }
        if self.cut is not None:
            name = self.cut.name
            state["cut"] = torch.tensor([name.term, name.global_step, self.cut.num_tokens])
        if self.leases is not None:
            state["leases"] = self.leases.to_tensor()
        for p in sorted(self.published):
            state[f"published.{p}"] = self.published[p][1].clone()
        return state


def saved_state_from(state: Mapping[str, torch.Tensor]) -> SavedState:
    """Reads what ``SavedState.to_dict`` made, from anywhere.

    Raises:
        UsageError: ``CONFIG_INVALID`` where it cannot be such a state.
    """
    try:
        return _read(state)
    except (KeyError, ValueError, IndexError, RuntimeError, TypeError, AttributeError) as error:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"this is no saved state of a learner ({type(error).__name__}: {error}); give what "
            "learner.state_dict() returned",
        ) from error


def _read(state: Mapping[str, torch.Tensor]) -> SavedState:
    if state["format"].tolist() != [_FORMAT]:
        raise ValueError(f"format {state['format'].tolist()}, but {_FORMAT} is read here")
    totals, *origins = _totals_from(state["counters"])
    applied = _totals_from(state["applied"])
    starts = [*origins, *applied]
    if any(o.num_steps > totals.num_steps or min(o.num_steps, o.num_tokens) < 0 for o in starts):
        raise ValueError("counters that start after they end")
    published = {}
    for p, (term, global_step) in enumerate(state["versions"].tolist()):
        vector = state[f"published.{p}"]
        if vector.dtype != torch.float32 or vector.dim() != 1:
            raise ValueError(f"published.{p} is no fp32 vector")
        vector = vector.detach().to("cpu").contiguous().clone()
        version = Version(int(term), int(global_step), digest_of(bytes_of(vector)))
        published[p] = (version, vector)
    if not len(published) == len(origins) == len(applied):
        raise ValueError("counters and published copies are not of the same fragments")
    fingerprint = bytes(state["fingerprint"].tolist())
    if len(fingerprint) != DIGEST_BYTES:
        raise ValueError("the fingerprint is no SHA-256")
    if "leases" in state and "cut" not in state:
        raise ValueError("leases of no snapshot")
    return SavedState(
        fingerprint=fingerprint.hex(),
        local_step=int(state["local_step"].item()),
        counters=Counters(
            len(origins), totals=totals, origins=tuple(origins), applied=tuple(applied)
        ),
        published=published,
        cut=_cut_from(state["cut"]) if "cut" in state else None,
        leases=saved_leases_from(state["leases"]) if "leases" in state else None,
    )


def _totals_from(rows: torch.Tensor) -> list[Totals]:
    return [Totals(num_steps=int(steps), num_tokens=int(tokens)) for steps, tokens in rows.tolist()]


def _cut_from(row: torch.Tensor) -> Cut:
    term, global_step, num_tokens = (int(value) for value in row.tolist())
    if min(term, global_step, num_tokens) < 0:
        raise ValueError("the cut of a snapshot with a number below 0")
    return Cut(name=SnapshotName(term, global_step), num_tokens=num_tokens)
