"""What processes say to one another, as plain values; the shipped messages carry the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decoupled_diloco.claims import Claim
from decoupled_diloco.versions import Incarnation, Version


@dataclass(frozen=True, slots=True)
class Schedule:
    """Fragments to copy at the next boundary."""

    global_step: int
    due_fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A learner asks to take part.

    Attributes:
        previous: incarnation of the same process before.
        shard: data shard on which it trains already.
        merged: highest global step of the versions that it holds.
        relays_claim: True where nobody joins, and only the claim is meant.
    """

    learner_id: str
    request_id: str
    claim: Claim | None
    previous: Incarnation | None
    shard: int | None
    merged: int
    relays_claim: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a Join granted."""

    claim: Claim
    incarnation: Incarnation
    seed: bool
    shard: int
    local_step: int
    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Push:
    """One outer gradient, or one fragment of the seed.

    Attributes:
        work: (process, first, last): the inner steps of which process are in it: those after
            ``first``, up to ``last``. None for a seed, and for who lies.
    """

    learner_id: str
    incarnation: Incarnation
    term: int
    global_step: int
    fragment: int
    base: Version
    local_step: int
    num_tokens: int
    num_steps: int
    codec: str
    payload: bytes
    work: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A learner says what it holds."""

    learner_id: str
    incarnation: Incarnation
    held: Mapping[int, Version]
