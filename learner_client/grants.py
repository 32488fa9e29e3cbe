"""What a synchronizer gives: a life in the run, and new published copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A new published copy of a fragment.

    Attributes:
        fragment: its index.
        version: the version; its digest was checked.
        vector: the published copy, fp32 on the CPU; nobody changes it any more.
    """

    fragment: int
    version: Version
    vector: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a Join granted.

    Attributes:
        incarnation: this life of the learner.
        term: current term of leadership.
        settings: settings of the run.
        shard: data shard of this learner id.
        local_step: local step at which its data goes on.
        global_step: global step of the synchronizer.
        seed: True where this incarnation pushes the first parameters.
        snapshot: cut of the newest snapshot that had begun; it does not wait for this learner.
    """

    incarnation: Incarnation
    term: int
    settings: RunSettings
    shard: int
    local_step: int
    global_step: int
    seed: bool
    snapshot: int = 0
