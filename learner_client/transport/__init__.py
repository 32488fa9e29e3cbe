"""How a learner reaches a synchronizer: over gRPC, or in memory."""

from __future__ import annotations

from learner_client.transport.base import Transport
from learner_client.transport.grpc import GrpcTransport
from learner_client.transport.memory import InMemoryTransport
from learner_client.transport.switching import SwitchingTransport

__all__ = ["GrpcTransport", "InMemoryTransport", "SwitchingTransport", "Transport"]
