"""A learner as it sees itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Version
from learner_client.core.connection import State
from learner_client.exchange import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """A learner as it sees itself.

    Attributes:
        state: what it is doing.
        online: whether the synchronizer answers.
        reason: why it waits or is offline; empty where neither is so.
        detail: the same for people.
        address: address of the synchronizer that is followed; empty for a transport of one's own.
        term: its term of leadership, as of the last Join; 0 before the first.
        global_step: global step of the newest update applied.
        local_step: inner steps over all lives of this learner id.
        num_updates: updates received and verified.
        num_digest_mismatches: updates that were refused because their checksum differed.
        pushes: answers to pushes: ``ACCEPTED``, or the reason code.
        declined: pulls declined, by reason code.
        bytes_up: payload bytes of pushes.
        bytes_down: payload bytes of updates.
        versions: version applied of each fragment, by index.
    """

    state: State
    online: bool
    reason: str
    detail: str
    address: str
    term: int
    global_step: int
    local_step: int
    num_updates: int
    num_digest_mismatches: int
    pushes: Mapping[str, int] = field(default_factory=dict)
    declined: Mapping[str, int] = field(default_factory=dict)
    bytes_up: int
    bytes_down: int
    versions: Mapping[int, Version] = field(default_factory=dict)


def status_of(exchange: Exchange, address: str) -> LearnerStatus:
    """How a learner stands.

    Args:
        exchange: what its threads share.
        address: address of the synchronizer that is followed.
    """
    connection, tally, grant = exchange.connection, exchange.tally, exchange.grant
    return LearnerStatus(
        state=connection.state,
        online=connection.online,
        reason=connection.reason,
        detail=connection.detail,
        address=address,
        term=0 if grant is None else grant.term,
        global_step=0 if grant is None else exchange.core.global_step,
        local_step=0 if grant is None else exchange.core.local_step,
        num_updates=tally.num_updates,
        num_digest_mismatches=tally.num_digest_mismatches,
        pushes=dict(tally.pushes),
        declined=dict(tally.declined),
        bytes_up=tally.bytes_up,
        bytes_down=tally.bytes_down,
        versions={} if grant is None else exchange.core.versions,
    )


def not_joined(exchange: Exchange, timeout_s: float | None) -> DilocoError:
    """The error of a learner that got no published parameters in time."""
    connection = exchange.connection
    return DilocoError(
        Reason.UNAVAILABLE,
        f"no published parameters within {timeout_s} s: {connection.state}, "
        f"{connection.reason}: {connection.detail}; check address and synchronizer",
    )
