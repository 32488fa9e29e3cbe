"""The standbys of a leader: sends them every record, and waits until a round may be published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.settings import RunSettings
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.replication import ReplicationCore
from synchronizer_server.gate import PublishGate
from synchronizer_server.leadership import Leadership
from synchronizer_server.membership.lease_base import LeaseKeeper
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.replication.leader import ReplicationLeader
from synchronizer_server.runner import Runner
from synchronizer_server.store.base import RunDescription

_WORDS_PER_TIMEOUT = 4


class Replicas:
    """Replication of one term.

    Args:
        settings: settings of the run.
        leadership: our part in the election, which we have won.
        keeper: told which stores are in sync.
        key: standbys prove that they hold it.
        store_id: id of our own store.
        runner: encodes tensors.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        leadership: Leadership,
        keeper: LeaseKeeper,
        key: bytes,
        store_id: str,
        runner: Runner,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._leadership = leadership
        self.core = ReplicationCore(
            mode=settings.replication,
            store_id=store_id,
            expects_standby=True,
            ack_timeout_s=settings.lease_timeout_s,
            position=-1,
            published=-1,
        )
        self.gate = PublishGate(
            self.core,
            leadership=leadership,
            keeper=keeper,
            clock=clock,
            tell=self._tell,
        )
        self.leader = ReplicationLeader(
            leadership.claim(),
            settings,
            events=self.gate,
            heard=leadership.heard,
            key=key,
            runner=runner,
        )

    def start(
        self,
        description: RunDescription | None,
        record: RoundRecord | None,
        states: Sequence[FragmentState],
    ) -> None:
        """Begins where the store stands; the record is None where nothing is there yet."""
        if description is not None:
            self.leader.describe(description)
        if record is not None:
            self.core.position = self.core.published = record.global_step
            self.leader.send(record, dict(enumerate(states)))

    async def publishable(
        self, record: RoundRecord, fragments: Mapping[int, FragmentState]
    ) -> bool:
        """Sends a record that is persisted here, and waits until it may be published.

        Returns:
            Whether another process has persisted it.
        """
        self.leader.send(record, fragments)
        release = await self.gate.released(record.global_step)
        return release.acked

    async def run(self) -> None:
        """Lets time pass; runs until cancelled."""
        gate = asyncio.ensure_future(self.gate.run())
        try:
            while True:
                # A standby that hears nothing takes the leader for dead once its lease is over.
                for standby_id, is_in in self.core.told.items():
                    self.leader.tell_state(standby_id, is_in)
                await asyncio.sleep(self._settings.lease_timeout_s / _WORDS_PER_TIMEOUT)
        finally:
            gate.cancel()

    def close(self, error: DilocoError) -> None:
        """Ends every stream."""
        self.leader.close(error)

    @property
    def lease_seconds(self) -> float:
        """How long the lease is ours still, seconds."""
        return self._leadership.lease_seconds()

    def _tell(self, standby_id: str, is_in: bool) -> None:
        self.leader.tell_state(standby_id, is_in)
