"""Who this learner is, and what its streams have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoupled_diloco.v1 import synchronizer_pb2, types_pb2
from learner_client.core.reports import StepReport
from learner_client.exchange import Exchange
from learner_client.parameters import Parameters
from learner_client.runtime import Runtime
from learner_client.transport.base import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """How a learner presents itself.

    Attributes:
        learner_id: stable id.
        run_id: run to join; empty takes whichever is served.
        labels: for people who look.
    """

    learner_id: str
    run_id: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One learner's way to its synchronizer, shared by all of its streams."""

    identity: Identity
    exchange: Exchange
    parameters: Parameters
    transport: Transport
    runtime: Runtime

    def clock(self) -> types_pb2.Clock:
        """The learner's clock now."""
        if self.exchange.grant is None:
            return types_pb2.Clock(sender=self.identity.learner_id)
        core = self.exchange.core
        return types_pb2.Clock(
            sender=self.identity.learner_id,
            term=core.term,
            own_step=core.local_step,
            known_global_steps=core.known_global_steps,
            snapshot=self.exchange.snapshots.recorded,
        )

    def inner_step(self, report: StepReport) -> synchronizer_pb2.InnerStep:
        """A report as a message."""
        clock = self.clock()
        clock.own_step = report.local_step
        del clock.known_global_steps[:]
        clock.known_global_steps.extend(report.applied)
        return synchronizer_pb2.InnerStep(
            clock=clock,
            num_tokens=report.num_tokens,
            num_steps=report.num_steps,
            loss=report.loss,
            step_seconds=report.step_s,
            overhead_seconds=report.overhead_s,
            data_lease_id=report.data_lease_id,
            data_position=report.data_position,
        )
