"""AdminService: what operators and people who look ask."""

from __future__ import annotations

from typing import NoReturn

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import PROTOCOL_VERSION
from decoupled_diloco.settings_proto import settings_to_proto
from decoupled_diloco.v1 import admin_pb2 as pb
from decoupled_diloco.v1 import admin_pb2_grpc as rpc
from decoupled_diloco.wire import tensors_to
from synchronizer_server.convert import check_id
from synchronizer_server.engine import Engine
from synchronizer_server.joining import JoinDesk
from synchronizer_server.operators import OperatorDesk
from synchronizer_server.service.synchronizer import Context, answer
from synchronizer_server.status import status_message


class AdminService(rpc.AdminServiceServicer):
    """Serves settings and status. What it does not define answers UNIMPLEMENTED.

    Args:
        engine: the engine.
        joins: knows the learners' labels.
    """

    def __init__(self, engine: Engine, joins: JoinDesk) -> None:
        self._engine = engine
        self._joins = joins
        self._operators = OperatorDesk(engine)

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """Settings and layout of the run."""
        return await answer(context, self._get_run(request))

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """What the synchronizer sees now."""
        return await answer(context, self._get_status())

    async def SetQuorum(
        self, request: pb.SetQuorumRequest, context: Context
    ) -> pb.SetQuorumResponse:
        """Sets the minimum quorum."""
        return await answer(context, self._operators.set_quorum(request))

    async def DrainLearner(
        self, request: pb.DrainLearnerRequest, context: Context
    ) -> pb.DrainLearnerResponse:
        """Asks a learner to finish its step and leave."""
        return await answer(context, self._operators.drain_learner(request))

    async def TakeSnapshot(
        self, request: pb.TakeSnapshotRequest, context: Context
    ) -> pb.TakeSnapshotResponse:
        """Begins a snapshot of the whole fleet with the next round; answers with its name."""
        return await answer(context, self._take_snapshot(request))

    async def RollBackFragment(
        self, request: pb.RollBackFragmentRequest, context: Context
    ) -> pb.RollBackFragmentResponse:
        """Puts one fragment back to its version before."""
        return await answer(context, self._operators.roll_back(request))

    async def Promote(self, request: pb.PromoteRequest, context: Context) -> pb.PromoteResponse:
        """Not served: there is no standby."""
        return await answer(context, _unserved("Promote"))

    def status(self) -> pb.GetStatusResponse:
        """What the synchronizer sees now."""
        return status_message(self._engine, self._joins.labels)

    async def _get_status(self) -> pb.GetStatusResponse:
        return self.status()

    async def _take_snapshot(self, request: pb.TakeSnapshotRequest) -> pb.TakeSnapshotResponse:
        name = await self._engine.snapshots.take(check_id(request.request_id, "request_id"))
        return pb.TakeSnapshotResponse(snapshot_id=str(name))

    async def _get_run(self, request: pb.GetRunRequest) -> pb.GetRunResponse:
        if request.protocol_version != PROTOCOL_VERSION:
            raise DilocoError(
                Reason.PROTOCOL_MISMATCH,
                f"the caller speaks protocol {request.protocol_version}, the synchronizer "
                f"{PROTOCOL_VERSION}; install the same version on both sides",
            )
        engine = self._engine
        layout = engine.layout
        return pb.GetRunResponse(
            settings=settings_to_proto(engine.parts.settings),
            tensors=tensors_to(layout.tensors) if layout is not None else [],
            layout_fingerprint=layout.fingerprint if layout is not None else "",
            seeded=engine.core.state.seeded,
            claim=engine.claim(),
        )


async def _unserved(name: str) -> NoReturn:
    raise DilocoError(Reason.UNIMPLEMENTED, f"{name} is not served by this version")
