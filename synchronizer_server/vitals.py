"""How long a leader's work takes, and what fails it: seen beside the work, never by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from prometheus_client import Histogram

from decoupled_diloco.errors import Reason
from synchronizer_server import metric_table
from synchronizer_server.core.effects import RoundSummary
from synchronizer_server.core.rounds import Round

_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


@dataclass(slots=True)
class Vitals:
    """Of one term.

    Attributes:
        quorum: see `metric_table`, as for the other times.
        grace: grace used.
        merge: outer steps.
        persist: writes to the store.
        replicate: waits until a round may be published.
        sync: from asking to published.
        newest: the newest round that was published.
        published_at: when that was, seconds of the monotonic clock.
        store_failure: why the store refused what it was given last; None where it did not.
        membership_failure: why the membership did not answer last; None where it did.
    """

    quorum: Histogram = field(default_factory=lambda: metric_table.QUORUM.histogram(_BUCKETS_S))
    grace: Histogram = field(default_factory=lambda: metric_table.GRACE.histogram(_BUCKETS_S))
    merge: Histogram = field(default_factory=lambda: metric_table.MERGE.histogram(_BUCKETS_S))
    persist: Histogram = field(default_factory=lambda: metric_table.PERSIST.histogram(_BUCKETS_S))
    replicate: Histogram = field(
        default_factory=lambda: metric_table.REPLICATE.histogram(_BUCKETS_S)
    )
    sync: Histogram = field(default_factory=lambda: metric_table.SYNC.histogram(_BUCKETS_S))
    newest: RoundSummary | None = None
    published_at: float | None = None
    store_failure: Reason | None = None
    membership_failure: Reason | None = None

    def full(self, round_: Round | None) -> None:
        """A round is about to be merged; one that puts a fragment back had no grace."""
        if round_ is not None and round_.quorum_at is not None and not round_.rolled_back:
            self.grace.observe(max(round_.grace_ended_at - round_.quorum_at, 0.0))

    def published(self, summary: RoundSummary, sync_s: float, now: float) -> None:
        """Watchers see a round."""
        if not summary.rolled_back:
            self.quorum.observe(summary.quorum_s)
        self.sync.observe(sync_s)
        self.newest, self.published_at = summary, now

    def histograms(self) -> dict[str, Histogram]:
        """The times, by name of their metric."""
        return {
            metric_table.QUORUM.name: self.quorum,
            metric_table.GRACE.name: self.grace,
            metric_table.MERGE.name: self.merge,
            metric_table.PERSIST.name: self.persist,
            metric_table.REPLICATE.name: self.replicate,
            metric_table.SYNC.name: self.sync,
        }
