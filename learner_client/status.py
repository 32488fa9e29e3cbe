"""A learner as it sees itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from learner_client.core.connection import State


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """A learner as it sees itself.

    Attributes:
        state: what it is doing.
        online: whether the synchronizer answers.
        reason: why it waits or is offline; empty where neither is so.
        detail: the same for people.
        global_step: global step of the newest update applied.
        local_step: inner steps over all lives of this learner id.
        num_updates: updates received and verified.
        num_digest_mismatches: updates that were refused because their checksum differed.
        pushes: answers to pushes: ``ACCEPTED``, or the reason code.
        declined: pulls declined, by reason code.
        bytes_up: payload bytes of pushes.
        bytes_down: payload bytes of updates.
    """

    state: State
    online: bool
    reason: str
    detail: str
    global_step: int
    local_step: int
    num_updates: int
    num_digest_mismatches: int
    pushes: Mapping[str, int] = field(default_factory=dict)
    declined: Mapping[str, int] = field(default_factory=dict)
    bytes_up: int
    bytes_down: int
