"""ReplicationService: translation only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.v1 import replication_pb2_grpc as rpc
from synchronizer_server.replication.leader import ReplicationLeader
from synchronizer_server.service.synchronizer import Context, answers, refuse


class ReplicationService(rpc.ReplicationServiceServicer):
    """Serves standbys while this process leads.

    Args:
        leader: gives who serves them; None while this process does not lead.
        not_leading: makes the error for those who ask meanwhile.
    """

    def __init__(
        self,
        leader: Callable[[], ReplicationLeader | None],
        not_leading: Callable[[], DilocoError],
    ) -> None:
        self._leader = leader
        self._not_leading = not_leading

    async def Replicate(
        self, request_iterator: AsyncIterator[pb.ReplicateRequest], context: Context
    ) -> AsyncIterator[pb.ReplicateResponse]:
        """Serves one standby."""
        leader = self._leader()
        if leader is None:
            await refuse(context, self._not_leading())
        async for message in answers(context, leader.replicate(request_iterator)):
            yield message
