"""What a synchronizer process needs that is not alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from synchronizer_server.leadership import Leadership
from synchronizer_server.membership.lease_base import LeaseKeeper
from synchronizer_server.runner import Runner
from synchronizer_server.store.identity import StoreIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """What a process needs that is not alone.

    Attributes:
        leadership: its part in the election.
        keeper: keeps the lease.
        identity: of its store.
        key: signs what synchronizers of the run say to each other.
        address: where others reach this process.
        peers: addresses of the other synchronizers.
        runner: encodes tensors for standbys.
    """

    leadership: Leadership
    keeper: LeaseKeeper
    identity: StoreIdentity
    address: str
    peers: Sequence[str]
    runner: Runner
    key: bytes = field(repr=False)
