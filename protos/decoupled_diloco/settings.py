"""Settings of a run: owned by the synchronizer, served to everybody (design section 4)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Final

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.layout import Strategy
from decoupled_diloco.v1 import types_pb2

PROTOCOL_VERSION: Final = 1
"""Version of the protocol; a learner that speaks another one is refused."""

MERGE_METHODS: Final = ("rda", "average")
GRANULARITIES: Final = ("tensor", "fragment", "row")


def _setting(default: object, help_text: str) -> object:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that learners and synchronizer must agree on.

    Raises:
        UsageError: CONFIG_INVALID, CONFIG_CONFLICT or QUORUM_ABOVE_LEARNERS, naming the setting.
    """

    run_id: str = _setting("run", "name of the run; a store holds one run")  # type: ignore[assignment]
    num_learners: int = _setting(  # type: ignore[assignment]
        4, "planned learners, M: also the number of data shards; more are refused"
    )
    quorum: int = _setting(  # type: ignore[assignment]
        1, "minimum quorum, K: a round needs that many; higher waits for slow and dead learners"
    )
    num_fragments: int = _setting(  # type: ignore[assignment]
        24, "fragments, P: fewer where the model has fewer tensors; always above overlap"
    )
    sync_interval: int = _setting(  # type: ignore[assignment]
        24, "H: inner steps between two merges of one fragment; lower merges and sends more often"
    )
    overlap: int = _setting(  # type: ignore[assignment]
        2, "tau: rounds in flight, and inner steps that a round may take without holding anybody"
    )
    strategy: str = _setting(  # type: ignore[assignment]
        "balanced", "layer, tensor, balanced or sub-tensor: how tensors are spread over fragments"
    )
    grace: bool = _setting(  # type: ignore[assignment]
        True, "wait beyond the quorum while there is slack; without it merges have one member"
    )
    grace_gamma: float = _setting(  # type: ignore[assignment]
        0.9, "share of the slack that the grace window uses, gamma of Eq. 3"
    )
    grace_min: float = _setting(  # type: ignore[assignment]
        0.25, "shortest grace window as a share of one inner step"
    )
    startup_wait_s: float = _setting(  # type: ignore[assignment]
        60.0, "how long the first round waits for all planned learners"
    )
    smoothing: float = _setting(  # type: ignore[assignment]
        0.2, "weight of the newest value in the moving averages of pace"
    )
    merge: str = _setting("rda", "rda or average; embeddings are always averaged")  # type: ignore[assignment]
    granularity: str = _setting(  # type: ignore[assignment]
        "tensor", "what has a norm of its own in RDA: tensor, fragment or row"
    )
    outer_learning_rate: float = _setting(  # type: ignore[assignment]
        1.0, "outer SGD; with momentum keep lr/(1 - momentum) near 1 under rda"
    )
    outer_momentum: float = _setting(  # type: ignore[assignment]
        0.0, "Nesterov momentum of the outer SGD; 0 is plain SGD"
    )
    codec_up: str = _setting("bf16", "codec of outer gradients")  # type: ignore[assignment]
    codec_down: str = _setting("bf16", "codec of updates")  # type: ignore[assignment]
    retained_updates: int = _setting(  # type: ignore[assignment]
        4, "updates kept per fragment for watchers that lag and for outer gradients on older bases"
    )
    max_outer_gradient_norm: float = _setting(  # type: ignore[assignment]
        1e4, "an outer gradient of a fragment with a larger L2 norm is refused"
    )
    total_global_steps: int = _setting(  # type: ignore[assignment]
        0, "global steps of the run, T; 0 runs until it is stopped"
    )
    heartbeat_interval_s: float = _setting(  # type: ignore[assignment]
        1.0, "how often a learner's background thread says that it lives"
    )
    heartbeat_timeout_s: float = _setting(  # type: ignore[assignment]
        5.0, "a learner silent for longer is no longer live; several intervals"
    )
    push_floor_s: float = _setting(  # type: ignore[assignment]
        1.0, "shortest time that a push gets, however fast the fleet steps"
    )
    push_timeout_s: float = _setting(  # type: ignore[assignment]
        60.0, "longest time that a push gets, whatever was measured"
    )
    trainer_json: str = _setting(  # type: ignore[assignment]
        "", "settings of the shipped trainer (a JSON object), served to all learners alike"
    )

    def __post_init__(self) -> None:
        self._check_numbers()
        _one_of("strategy", self.strategy, tuple(Strategy))
        _one_of("merge", self.merge, MERGE_METHODS)
        _one_of("granularity", self.granularity, GRANULARITIES)
        get_codec(self.codec_up)
        get_codec(self.codec_down)
        if not self.run_id or any(c in self.run_id for c in "/\\{}: \t\n"):
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"run_id is {self.run_id!r}; give a name without spaces, slashes, colons or braces",
            )
        if self.quorum > self.num_learners:
            raise UsageError(
                Reason.QUORUM_ABOVE_LEARNERS,
                f"quorum is {self.quorum} but only {self.num_learners} learners are planned: no "
                "round could ever be merged; lower the quorum or plan more learners",
            )
        if self.num_fragments <= self.overlap:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"num_fragments is {self.num_fragments} but must be above overlap "
                f"({self.overlap}): rounds in flight are of different fragments",
            )
        if self.heartbeat_timeout_s <= self.heartbeat_interval_s:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"heartbeat_timeout_s ({self.heartbeat_timeout_s}) must be above "
                f"heartbeat_interval_s ({self.heartbeat_interval_s}); several times is usual",
            )
        if self.push_timeout_s < self.push_floor_s:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"push_timeout_s ({self.push_timeout_s}) is below push_floor_s "
                f"({self.push_floor_s}); raise the one or lower the other",
            )

    def _check_numbers(self) -> None:
        at_least = {
            "num_learners": 1, "quorum": 1, "num_fragments": 1, "sync_interval": 1, "overlap": 1,
            "retained_updates": 1, "total_global_steps": 0,
        }  # fmt: skip
        for name, low in at_least.items():
            value = getattr(self, name)
            if value < low:
                raise UsageError(Reason.CONFIG_INVALID, f"{name} is {value}; at least {low}")
        for name, (low_f, high_f) in {
            "grace_gamma": (0.0, 1.0),
            "grace_min": (0.0, 1.0),
            "startup_wait_s": (0.0, math.inf),
            "smoothing": (1e-3, 1.0),
            "outer_learning_rate": (1e-9, 100.0),
            "outer_momentum": (0.0, 0.9999),
            "max_outer_gradient_norm": (1e-9, math.inf),
            "heartbeat_interval_s": (0.01, 3600.0),
            "heartbeat_timeout_s": (0.02, 36000.0),
            "push_floor_s": (0.01, 3600.0),
            "push_timeout_s": (0.01, 36000.0),
        }.items():
            number = getattr(self, name)
            if not low_f <= number <= high_f:
                raise UsageError(
                    Reason.CONFIG_INVALID, f"{name} is {number}; between {low_f} and {high_f}"
                )

    def to_proto(self) -> types_pb2.RunSettings:
        """The part of the settings that learners need."""
        return types_pb2.RunSettings(
            run_id=self.run_id,
            num_fragments=self.num_fragments,
            sync_interval=self.sync_interval,
            overlap=self.overlap,
            quorum=self.quorum,
            num_learners=self.num_learners,
            strategy=self.strategy,
            codec_up=self.codec_up,
            codec_down=self.codec_down,
            total_global_steps=self.total_global_steps,
            heartbeat_timeout_seconds=self.heartbeat_timeout_s,
            heartbeat_interval_seconds=self.heartbeat_interval_s,
            push_timeout_seconds=self.push_timeout_s,
            trainer_json=self.trainer_json,
        )


def settings_from_proto(message: types_pb2.RunSettings) -> RunSettings:
    """Reads served settings; what learners do not need keeps its default.

    Raises:
        UsageError: where the message holds settings that cannot be.
    """
    return RunSettings(
        run_id=message.run_id,
        num_fragments=message.num_fragments,
        sync_interval=message.sync_interval,
        overlap=message.overlap,
        quorum=message.quorum,
        num_learners=message.num_learners,
        strategy=message.strategy,
        codec_up=message.codec_up,
        codec_down=message.codec_down,
        total_global_steps=message.total_global_steps,
        heartbeat_timeout_s=message.heartbeat_timeout_seconds,
        heartbeat_interval_s=message.heartbeat_interval_seconds,
        push_timeout_s=message.push_timeout_seconds,
        push_floor_s=min(message.push_timeout_seconds, 1.0),
        trainer_json=message.trainer_json,
    )


def setting_names() -> tuple[str, ...]:
    """Names of all settings of a run."""
    return tuple(f.name for f in dataclasses.fields(RunSettings))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(
            Reason.CONFIG_INVALID, f"{name} is {value!r}; one of {', '.join(allowed)}"
        )
