"""What the rest of the engine sees of replication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.replication import ReplicationCore
from synchronizer_server.merge.fragment_state import FragmentState


class Replicas(Protocol):
    """The standbys of a leader."""

    @property
    def core(self) -> ReplicationCore:
        """Who is in sync, for the status."""

    async def publishable(
        self, record: RoundRecord, fragments: Mapping[int, FragmentState]
    ) -> None:
        """Sends a record that is persisted here, and waits until it may be published."""
