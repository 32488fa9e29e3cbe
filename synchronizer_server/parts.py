"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decoupled_diloco.claims import Claim
from decoupled_diloco.journal import Journal
from decoupled_diloco.settings import RunSettings
from synchronizer_server.commits import Committer
from synchronizer_server.core.synchronizer import SynchronizerCore
from synchronizer_server.membership.base import Membership
from synchronizer_server.replicas import Replicas
from synchronizer_server.runner import Runner


@dataclass(slots=True, kw_only=True)
class Parts:
    """What an engine is made of; each part is a seam with more than one implementation.

    Attributes:
        settings: settings of the run.
        core: the state machine.
        membership: who is alive, and under which incarnation.
        committer: persists and publishes.
        tensors_runner: runs tensor work.
        clock: monotonic seconds.
        journal: events worth a figure later.
        max_staged_bytes: bound on pushes under way.
        claim: our claim of leadership, for this term.
        replicas: standbys, and who decides what may be published; None where nobody else can lead.
        heard: takes a claim of leadership; returns whether it is signed. None as above.
        addresses: of all synchronizers, ours first; empty as above.
    """

    settings: RunSettings
    core: SynchronizerCore
    membership: Membership
    committer: Committer
    tensors_runner: Runner
    clock: Callable[[], float]
    journal: Journal
    max_staged_bytes: int
    claim: Claim
    replicas: Replicas | None = None
    heard: Callable[[Claim], bool] | None = None
    addresses: tuple[str, ...] = ()
