"""Counts for people who look."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts for people who look; since the start of this process.

    Attributes:
        pushes: answers to pushes, by outcome or by reason code.
        declined: pulls declined, by reason code.
        num_updates: updates received and verified.
        num_digest_mismatches: updates whose result was not what the synchronizer has.
        bytes_up: payload bytes of pushes.
        bytes_down: payload bytes of updates.
    """

    pushes: Counter[str] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)
    num_updates: int = 0
    num_digest_mismatches: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
