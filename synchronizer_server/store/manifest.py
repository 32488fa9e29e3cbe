"""What a snapshot of the whole fleet consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decoupled_diloco.snapshots import SnapshotName
from decoupled_diloco.versions import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What makes a snapshot complete; written last.

    Attributes:
        name: its cut.
        run_id: the run.
        group: group of fragments.
        versions: version vector of the cut, as text: for people, the record has all of it.
        participants: incarnation of every learner whose part belongs to it.
        left_out: why the other learners that were live at the cut are not in it.
    """

    name: SnapshotName
    run_id: str
    group: int
    versions: tuple[str, ...]
    participants: Mapping[str, Incarnation]
    left_out: Mapping[str, str]
