"""Serves whatever this process is now: the leader's services, or a word about who leads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc, synchronizer_pb2_grpc
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.wire import malformed
from synchronizer_server.proofs import NONCE_BYTES, signed_status
from synchronizer_server.replication.leader import ReplicationLeader
from synchronizer_server.service.admin import AdminService
from synchronizer_server.service.synchronizer import Context, SynchronizerService, refuse


@dataclass(slots=True, kw_only=True)
class Switchboard:
    """What is served.

    Attributes:
        synchronizer: the leader's service; None while this process does not lead.
        admin: its admin service.
        replication: who serves standbys; None where no standby is expected.
        not_leading: makes the error for those who ask meanwhile.
        follower_status: status of a process that does not lead.
        key: proves to peers that ask that their answer is ours; empty where there are none.
    """

    not_leading: Callable[[], DilocoError] = lambda: DilocoError(
        Reason.STARTING, "the synchronizer starts; try again"
    )
    follower_status: Callable[[], admin_pb2.GetStatusResponse] = admin_pb2.GetStatusResponse
    synchronizer: SynchronizerService | None = None
    admin: AdminService | None = None
    replication: ReplicationLeader | None = None
    key: bytes = field(default=b"", repr=False)

    def lead(
        self,
        synchronizer: SynchronizerService,
        admin: AdminService,
        replication: ReplicationLeader | None,
    ) -> None:
        """From now on the leader's services answer."""
        self.synchronizer, self.admin, self.replication = synchronizer, admin, replication

    def no_replication(self) -> DilocoError:
        """For a standby that asks who has none."""
        if self.synchronizer is None:
            return self.not_leading()
        return DilocoError(
            Reason.UNIMPLEMENTED, "this synchronizer leads alone; start it with --peers and --redis"
        )

    def status(self) -> admin_pb2.GetStatusResponse:
        """What this process sees, whatever it is."""
        return self.follower_status() if self.admin is None else self.admin.status()

    def follow(self) -> None:
        """From now on everybody is told who leads."""
        self.synchronizer = self.admin = self.replication = None


class SwitchedSynchronizer(synchronizer_pb2_grpc.SynchronizerServiceServicer):
    """The synchronizer service of a process that may lead or follow.

    Args:
        board: what is served.
    """

    def __init__(self, board: Switchboard) -> None:
        self._board = board

    async def _leader(self, context: Context) -> SynchronizerService:
        if self._board.synchronizer is None:
            await refuse(context, self._board.not_leading())
        return self._board.synchronizer

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        """See the proto."""
        return await (await self._leader(context)).Join(request, context)

    async def Report(
        self, request_iterator: AsyncIterator[pb.ReportRequest], context: Context
    ) -> AsyncIterator[pb.ReportResponse]:
        """See the proto."""
        async for message in (await self._leader(context)).Report(request_iterator, context):
            yield message

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: Context
    ) -> pb.PushResponse:
        """See the proto."""
        return await (await self._leader(context)).Push(request_iterator, context)

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        """See the proto."""
        async for message in (await self._leader(context)).Watch(request, context):
            yield message

    async def Recover(
        self, request_iterator: AsyncIterator[pb.RecoverRequest], context: Context
    ) -> AsyncIterator[pb.RecoverResponse]:
        """See the proto."""
        async for message in (await self._leader(context)).Recover(request_iterator, context):
            yield message

    async def LeaseData(
        self, request: pb.LeaseDataRequest, context: Context
    ) -> pb.LeaseDataResponse:
        """See the proto."""
        return await (await self._leader(context)).LeaseData(request, context)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """See the proto."""
        return await (await self._leader(context)).Leave(request, context)


class SwitchedAdmin(admin_pb2_grpc.AdminServiceServicer):
    """The admin service of a process that may lead or follow.

    Args:
        board: what is served.
    """

    def __init__(self, board: Switchboard) -> None:
        self._board = board

    async def _leader(self, context: Context) -> AdminService:
        if self._board.admin is None:
            await refuse(context, self._board.not_leading())
        return self._board.admin

    async def GetRun(
        self, request: admin_pb2.GetRunRequest, context: Context
    ) -> admin_pb2.GetRunResponse:
        """See the proto."""
        return await (await self._leader(context)).GetRun(request, context)

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        """What this process sees, whatever it is."""
        board, nonce = self._board, request.nonce
        if nonce and len(nonce) != NONCE_BYTES:
            await refuse(context, malformed(f"a nonce of {len(nonce)} bytes, not {NONCE_BYTES}"))
        if board.admin is None:
            status = board.follower_status()
        else:
            status = await board.admin.GetStatus(request, context)
        if nonce and board.key:
            return signed_status(status, board.key, nonce)
        return status

    async def SetQuorum(
        self, request: admin_pb2.SetQuorumRequest, context: Context
    ) -> admin_pb2.SetQuorumResponse:
        """See the proto."""
        return await (await self._leader(context)).SetQuorum(request, context)

    async def DrainLearner(
        self, request: admin_pb2.DrainLearnerRequest, context: Context
    ) -> admin_pb2.DrainLearnerResponse:
        """See the proto."""
        return await (await self._leader(context)).DrainLearner(request, context)

    async def TakeSnapshot(
        self, request: admin_pb2.TakeSnapshotRequest, context: Context
    ) -> admin_pb2.TakeSnapshotResponse:
        """See the proto."""
        return await (await self._leader(context)).TakeSnapshot(request, context)

    async def RollBackFragment(
        self, request: admin_pb2.RollBackFragmentRequest, context: Context
    ) -> admin_pb2.RollBackFragmentResponse:
        """See the proto."""
        return await (await self._leader(context)).RollBackFragment(request, context)

    async def Promote(
        self, request: admin_pb2.PromoteRequest, context: Context
    ) -> admin_pb2.PromoteResponse:
        """See the proto."""
        return await (await self._leader(context)).Promote(request, context)
