"""What the random world round the core is made of: faults, dumb learners, what a push carried."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core import events as ev

STEP_TOKENS = 64


@dataclass(slots=True, kw_only=True)
class Faults:
    """Probabilities of what goes wrong, per occasion; all 0 is a healthy world."""

    kill: float = 0.0
    cut: float = 0.0
    freeze: float = 0.0
    lose_push: float = 0.0
    slow_push: float = 0.0
    duplicate: float = 0.0
    slow_watch: float = 0.0
    persist: float = 0.0
    restart: float = 0.0
    garbage: float = 0.0
    same_digest: float = 0.0
    diverge: float = 0.0
    roll_back: float = 0.0


@dataclass(slots=True, eq=False)
class Model:
    """A learner as dumb as can be."""

    name: str
    step_s: float
    alive: bool = False
    frozen_until: float = 0.0
    epoch: int = 0
    incarnation: Incarnation | None = None
    term: int = 0
    stream: int | None = None
    watch: int = 0
    watched_at: float = 0.0  # a watch is an ordered stream: nothing overtakes
    local_step: int = 0
    diverged_until: float = 0.0
    due: tuple[int, ...] = ()
    base: dict[int, Version] = field(default_factory=dict)
    work: dict[int, set[int]] = field(default_factory=dict)
    counters: dict[int, int] = field(default_factory=dict)
    copies: dict[int, tuple[Version, frozenset[int], int, int]] = field(default_factory=dict)
    updates: list[tuple[int, Version]] = field(default_factory=list)


@dataclass(slots=True)
class Staged:
    """What a push carried."""

    header: ev.PushOpened
    work: frozenset[int]


def weight_of(header: ev.PushOpened) -> float:
    """Quantity times quality, written down once more."""
    return header.num_tokens * (header.num_tokens / header.num_steps)


def small_settings(**changes: object) -> RunSettings:
    """Settings with short times, for worlds of 0.1 s per inner step."""
    values: dict[str, object] = {
        "num_learners": 4,
        "num_fragments": 4,
        "sync_interval": 8,
        "overlap": 2,
        "heartbeat_interval_s": 0.5,
        "heartbeat_timeout_s": 2.0,
        "push_floor_s": 0.5,
        "push_timeout_s": 3.0,
        "startup_wait_s": 5.0,
        **changes,
    }
    return RunSettings(**values)  # type: ignore[arg-type]
