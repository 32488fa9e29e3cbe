"""Every metric that a synchronizer exports; what a learner says of itself is in `learner_client`.

A series with the label ``learner`` ends when the learner has left, or `FORGOTTEN_S` after it was
last heard: ids may come and never return, and nobody's may be kept for ever. Of more than
`MOST_LEARNERS`, those that have series keep them.
"""

from __future__ import annotations

from typing import Final

from decoupled_diloco.metrics import BUILD_INFO, Kind, MetricSpec, counter, gauge

FORGOTTEN_S: Final = 900.0
"""Silence after which nothing is exported for a learner any more, seconds."""

MOST_LEARNERS: Final = 2000
"""Learners that have series of their own, at most."""


def _histogram(name: str, text: str) -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.HISTOGRAM, text=text)


QUORUM: Final = _histogram(
    "diloco_quorum_duration_seconds", "From the opening of a round to its K-th fresh report."
)
GRACE: Final = _histogram(
    "diloco_grace_duration_seconds",
    "Grace used: from the quorum of a round to asking its learners; at most the window granted.",
)
MERGE: Final = _histogram("diloco_merge_duration_seconds", "Outer step of a round.")
PERSIST: Final = _histogram(
    "diloco_persist_duration_seconds", "Writing a round record and its fragment to the store."
)
REPLICATE: Final = _histogram(
    "diloco_replicate_duration_seconds",
    "From a round that is persisted here to one that may be published.",
)
SYNC: Final = _histogram(
    "diloco_sync_duration_seconds", "From asking the learners of a round to its publication."
)

_PROCESS: Final = (
    BUILD_INFO,
    gauge("diloco_run_info", "Always 1; the run is in the label.", "run_id"),
    gauge("diloco_run_state", "1 for what the synchronizer does now, 0 for the rest.", "state"),
    gauge("diloco_leader", "1 while this process leads."),
    gauge("diloco_term", "Highest term of leadership that this process knows."),
    gauge(
        "diloco_lease_held", "1 while the lease of leadership is held; where there are standbys."
    ),
    gauge("diloco_lease_seconds", "For how long the lease is held still."),
    gauge("diloco_store_up", "0 while the store of the leader refuses what it is given."),
    gauge("diloco_membership_up", "0 while the membership (Redis) does not answer the leader."),
    gauge("diloco_lease_keeper_up", "0 while the keeper of the lease (Redis) does not answer."),
    gauge(
        "diloco_waits",
        "What waits now, by kind (round, seed, snapshot, data, recovery, leadership) and reason.",
        "subject",
        "reason",
    ),
    gauge("diloco_wait_seconds", "For how long the longest of them does.", "subject", "reason"),
)

_ROUNDS: Final = (
    gauge("diloco_global_step", "Last committed global step; of a standby, last persisted."),
    gauge("diloco_global_step_target", "Global steps of the run; 0 without end."),
    gauge("diloco_fragment_version", "Global step of the published version.", "fragment"),
    counter("diloco_rounds_total", "Rounds published."),
    gauge("diloco_rounds_in_flight", "Rounds opened and not published yet."),
    gauge("diloco_round_age_seconds", "Since the last round was published, or the term begun."),
    gauge("diloco_round_contributors", "Contributors of the newest round."),
    gauge("diloco_round_live_learners", "Learners live in the newest round."),
    gauge("diloco_round_tokens", "Tokens of the contributions to the newest round."),
    counter("diloco_round_contributions_total", "Contributors, summed over rounds."),
    counter(
        "diloco_round_live_total",
        "Live learners, summed over rounds: contributions over this is participation.",
    ),
    gauge("diloco_participation_ratio", "Contributors over live learners since the term began."),
    gauge("diloco_quorum", "Learners that a round needs, K."),
    gauge("diloco_sync_interval", "Inner steps that are to lie between two merges, H."),
    gauge(
        "diloco_measured_sync_interval",
        "Measured H: inner steps between two merges of one fragment.",
    ),
    MetricSpec(
        name="diloco_inner_steps_per_merge",
        kind=Kind.SUMMARY,
        text="The same as sum and number of rounds, for a window.",
    ),
    gauge(
        "diloco_pace_seconds",
        "Moving averages (step, quorum, sync), grace window, and shortest time between two rounds "
        "(opening).",
        "part",
    ),
    QUORUM,
    GRACE,
    MERGE,
    PERSIST,
    REPLICATE,
    SYNC,
)

_TRAFFIC: Final = (
    counter(
        "diloco_pushes_total",
        "Pushes answered: accepted, dropped (late, stale, not ready) or refused (wrong).",
        "outcome",
        "reason",
    ),
    counter(
        "diloco_transfer_bytes_total",
        "Payload bytes: accepted pushes up, updates down to learners and to observers.",
        "leg",
        "codec",
    ),
    gauge("diloco_inflight_bytes", "Set aside for pushes under way."),
    gauge("diloco_inflight_limit_bytes", "Most that may be; who pushes more is told to wait."),
)

_LEARNERS: Final = (
    gauge("diloco_learners", "Learners by state; dead ones stay in it.", "state"),
    gauge("diloco_quarantined_learners", "Learners that are left out for a while."),
    counter("diloco_tokens_total", "Tokens that learners reported."),
    counter("diloco_merged_tokens_total", "Tokens merged; each counts once per fragment."),
    gauge("diloco_heartbeat_age_seconds", "Since a learner was last heard.", "learner"),
    gauge(
        "diloco_versions_behind",
        "Fragments of which a learner has not applied the published version yet.",
        "learner",
    ),
    gauge("diloco_reported_step", "Local step that a learner reported last.", "learner"),
    gauge("diloco_reported_loss", "Training loss that it reported last, nats/token.", "learner"),
    gauge("diloco_reported_tokens_per_second", "Its speed over the last reports.", "learner"),
    counter("diloco_reported_tokens_total", "Tokens that it reported.", "learner"),
    counter("diloco_contributed_tokens_total", "Tokens of it that were merged.", "learner"),
    counter("diloco_answered_pushes_total", "Pushes of it, answered.", "learner", "outcome"),
    counter("diloco_exchanged_bytes_total", "Payload bytes from and to it.", "learner", "leg"),
    gauge("diloco_quarantined", "1 while it is left out.", "learner"),
)

_SAFETY: Final = (
    gauge("diloco_standbys", "Standbys that are connected or may take over."),
    gauge("diloco_standbys_in_sync", "Standbys by whose take-over nothing is lost."),
    gauge("diloco_standby_connected", "1 while its stream is open.", "standby"),
    gauge("diloco_standby_in_sync", "1 while a take-over by it loses nothing.", "standby"),
    gauge("diloco_standby_lag_rounds", "Rounds that it has not acknowledged yet.", "standby"),
    gauge("diloco_unsafe_rounds", "Rounds published that a take-over now would lose."),
    gauge(
        "diloco_snapshot_age_seconds",
        "Since the newest complete snapshot; of one from before the term, since the term began.",
    ),
    gauge("diloco_snapshot_age_rounds", "Rounds published since its cut."),
    gauge("diloco_snapshot_pending", "1 while one is under way."),
    counter("diloco_snapshots_total", "Snapshots that ended: complete or failed.", "result"),
    gauge("diloco_data_epoch", "Pass over leased data, from 0."),
    gauge("diloco_data_samples", "Samples of this pass: free or leased.", "state"),
    counter("diloco_data_merged_total", "Samples that are merged into every fragment."),
    counter("diloco_data_returned_total", "Samples that dead learners gave back."),
)

TABLE: Final[tuple[MetricSpec, ...]] = (*_PROCESS, *_ROUNDS, *_TRAFFIC, *_LEARNERS, *_SAFETY)
