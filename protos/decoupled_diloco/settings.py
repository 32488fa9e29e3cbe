"""Settings of a run: owned by the synchronizer, served to everybody (design section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.parts import Strategy
from decoupled_diloco.setting_fields import setting

PROTOCOL_VERSION: Final = 1
"""Version of the protocol; a learner that speaks another one is refused."""

MERGE_METHODS: Final = ("rda", "average")
GRANULARITIES: Final = ("tensor", "fragment", "row")
REPLICATIONS: Final = ("off", "one", "one-or-degrade")
DATA_MODES: Final = ("shards", "leases")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that learners and synchronizer must agree on.

    Whether the codecs exist is checked by who uses them (`codecs.check_codecs`): this module is
    read by the pure cores and knows no tensors.

    Raises:
        UsageError: CONFIG_INVALID, CONFIG_CONFLICT or QUORUM_ABOVE_LEARNERS, naming the setting.
    """

    run_id: str = setting("run", "name of the run; a store holds one run")
    num_learners: int = setting(
        4, "planned learners, M: also the number of data shards; more join with data leases only"
    )
    quorum: int = setting(
        1,
        "minimum quorum, K: a round needs that many learners; higher waits for slow and dead ones; "
        "of a new run, later it is set live",
    )
    num_fragments: int = setting(
        24, "fragments, P: fewer where the model has fewer tensors; always above overlap"
    )
    sync_interval: int = setting(
        24, "H: inner steps between two merges of one fragment; lower merges and sends more often"
    )
    overlap: int = setting(
        2, "tau: rounds in flight, and inner steps that a round may take without holding anybody"
    )
    strategy: str = setting(
        "balanced", "layer, tensor, balanced or sub-tensor: how tensors are spread over fragments"
    )
    grace: bool = setting(
        True, "wait beyond the quorum while there is slack; without it merges have one member"
    )
    grace_gamma: float = setting(
        0.9, "share of the slack that the grace window uses, gamma of Eq. 3"
    )
    grace_min: float = setting(0.25, "shortest grace window as a share of one inner step")
    startup_wait_s: float = setting(60.0, "how long the first round waits for all planned learners")
    smoothing: float = setting(0.2, "weight of the newest value in the moving averages of pace")
    merge: str = setting("rda", "rda or average; embeddings are always averaged")
    granularity: str = setting(
        "tensor", "what has a norm of its own in RDA: tensor, fragment or row"
    )
    outer_learning_rate: float = setting(
        0.8, "outer SGD; keep learning rate / (1 - momentum) between 1 and 1.5 under rda"
    )
    outer_momentum: float = setting(
        0.4, "Nesterov momentum of the outer SGD; 0 is plain SGD, 0.9 is far too hot under rda"
    )
    codec_up: str = setting("bf16", "codec of outer gradients")
    codec_down: str = setting("bf16", "codec of updates")
    retained_updates: int = setting(
        4, "updates kept per fragment for watchers that lag and for outer gradients on older bases"
    )
    max_outer_gradient_norm: float = setting(
        1e4, "an outer gradient of a fragment with a larger L2 norm is refused"
    )
    total_global_steps: int = setting(0, "global steps of the run, T; 0 runs until it is stopped")
    heartbeat_interval_s: float = setting(
        1.0, "how often a learner's background thread says that it lives"
    )
    heartbeat_timeout_s: float = setting(
        5.0, "a learner silent for longer is no longer live; several intervals"
    )
    lease_timeout_s: float = setting(
        3.0,
        "a leader unheard for longer is replaced; learners without news for three of them ask "
        "elsewhere",
    )
    replication: str = setting(
        "one",
        "one: a round is published once every standby in sync has it, and merging pauses where "
        "neither standby nor Redis can be told; one-or-degrade: then it goes on after "
        "lease_timeout_s; off: nothing is waited for",
    )
    quarantine_after: int = setting(
        5, "failures to deliver in a row after which a learner is left out for a while; 0 never"
    )
    norm_bound_factor: float = setting(
        50.0, "an outer gradient with a norm this many times the fragment's usual one is refused"
    )
    data_mode: str = setting(
        "shards",
        "shards: one fixed data shard per planned learner; leases: ranges of the data are handed "
        "out, any number of learners may join, and what a dead one had not merged goes to others",
    )
    data_length: int = setting(0, "samples of one pass over leased data; 0 for data without end")
    data_lease_length: int = setting(256, "samples of one data lease")
    snapshot_every: int = setting(
        0, "global steps between snapshots of the whole fleet; 0 takes them only on request"
    )
    keep_snapshots: int = setting(2, "complete snapshots that are kept")
    snapshot_timeout_s: float = setting(
        300.0, "longest wait for a learner's part of a snapshot, whatever was measured"
    )
    push_floor_s: float = setting(
        1.0, "shortest time that a push gets, however fast the fleet steps"
    )
    push_timeout_s: float = setting(60.0, "longest time that a push gets, whatever was measured")
    trainer_json: str = setting(
        "", "settings of the shipped trainer (a JSON object), served to all learners alike"
    )

    def __post_init__(self) -> None:
        self._check_numbers()
        _one_of("strategy", self.strategy, tuple(Strategy))
        _one_of("merge", self.merge, MERGE_METHODS)
        _one_of("granularity", self.granularity, GRANULARITIES)
        _one_of("replication", self.replication, REPLICATIONS)
        _one_of("data_mode", self.data_mode, DATA_MODES)
        if not self.run_id or any(c in self.run_id for c in "/\\{}: \t\n"):
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"run_id is {self.run_id!r}; give a name without spaces, slashes, colons or braces",
            )
        if self.quorum > self.num_learners:
            raise quorum_above_learners(self.quorum, self.num_learners)
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
            "retained_updates": 1, "total_global_steps": 0, "quarantine_after": 0,
            "data_length": 0, "data_lease_length": 1, "snapshot_every": 0, "keep_snapshots": 1,
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
            "norm_bound_factor": (1.0, math.inf),
            "lease_timeout_s": (0.1, 3600.0),
            "heartbeat_interval_s": (0.01, 3600.0),
            "heartbeat_timeout_s": (0.02, 36000.0),
            "snapshot_timeout_s": (0.1, 36000.0),
            "push_floor_s": (0.01, 3600.0),
            "push_timeout_s": (0.01, 36000.0),
        }.items():
            number = getattr(self, name)
            if not low_f <= number <= high_f:
                raise UsageError(
                    Reason.CONFIG_INVALID, f"{name} is {number}; between {low_f} and {high_f}"
                )


def quorum_above_learners(quorum: int, num_learners: int) -> UsageError:
    """The refusal of a quorum that the planned learners can never meet."""
    return UsageError(
        Reason.QUORUM_ABOVE_LEARNERS,
        f"quorum is {quorum} but only {num_learners} learners are planned: no "
        "round could ever be merged; lower the quorum or plan more learners",
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(Reason.CONFIG_INVALID, f"{name} is {value!r}; one of {', '.join(allowed)}")
