"""How long a leader's work takes, and what fails it: seen beside the work, never by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import Histogram

from decoupled_diloco.errors import Reason
from synchronizer_server import metric_table
from synchronizer_server.core.effects import RoundSummary
from synchronizer_server.core.rounds import Round
from synchronizer_server.core.state import CoreState

_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What a run had counted when the term began; a counter of the term begins at 0.

    One that began where the record of the round before left it would go back a little with every
    take-over, and who adds up what it counts would take all of it for new.

    Attributes:
        reported: tokens that each learner had reported.
        merged: tokens of each learner that were merged.
        data_merged: samples merged into every fragment.
        data_returned: samples that dead learners had given back.
    """

    reported: Mapping[str, int] = field(default_factory=dict)
    merged: Mapping[str, int] = field(default_factory=dict)
    data_merged: int = 0
    data_returned: int = 0

    @classmethod
    def of(cls, state: CoreState) -> Before:
        """What was restored; to be asked before anything happens."""
        totals = None if state.data is None else state.data.totals
        return cls(
            reported={x.learner_id: x.num_tokens for x in state.roster},
            merged={x.learner_id: x.num_tokens_merged for x in state.roster},
            data_merged=0 if totals is None else totals.merged,
            data_returned=0 if totals is None else totals.returned,
        )


@dataclass(slots=True)
class Vitals:
    """Of one term.

    Attributes:
        before: what was counted already when it began.
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

    before: Before = field(default_factory=Before)
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
