"""Totals of a run since this process started, and the records that survive it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from decoupled_diloco.v1 import admin_pb2
from decoupled_diloco.versions import Version
from synchronizer_server.core.data_records import DataRecord
from synchronizer_server.core.effects import Outcome, RoundSummary
from synchronizer_server.core.records import DrainRecord, RoundRecord
from synchronizer_server.core.roster import MOST_TOKENS
from synchronizer_server.core.state import CoreState, Restored
from synchronizer_server.membership.base import Roll


@dataclass(slots=True)
class Ledger:
    """Counts what no figure may be shown without: participation and measured H.

    Attributes:
        num_rounds: rounds published.
        num_contributions: sum of their contributors.
        num_live: sum of the learners live in them.
        contributors: rounds by number of contributors.
        answers: answers to pushes, by outcome and reason code (empty for the accepted).
        measured_h_sum: sum over rounds that measured it.
        measured_h_rounds: how many did.
        bytes_up: bytes of outer gradients by learner id.
        bytes_down: bytes of updates by learner id.
        bytes_observed: bytes of updates to observers.
        bytes_by_codec: all of these bytes, by leg (push, update, observer) and codec.
    """

    num_rounds: int = 0
    num_contributions: int = 0
    num_live: int = 0
    contributors: Counter[int] = field(default_factory=Counter)
    answers: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    measured_h_sum: float = 0.0
    measured_h_rounds: int = 0
    bytes_up: Counter[str] = field(default_factory=Counter)
    bytes_down: Counter[str] = field(default_factory=Counter)
    bytes_observed: int = 0
    bytes_by_codec: Counter[tuple[str, str]] = field(default_factory=Counter)

    def sent(self, learner_id: str | None, num_bytes: int, codec: str) -> None:
        """Counts an update that was sent; None stands for an observer."""
        self.bytes_by_codec["observer" if learner_id is None else "update", codec] += num_bytes
        if learner_id is None:
            self.bytes_observed += num_bytes
        else:
            self.bytes_down[learner_id] += num_bytes

    def accepted(self, learner_id: str, num_bytes: int, codec: str) -> None:
        """Counts a push that was accepted."""
        self.answers[Outcome.ACCEPTED, ""] += 1
        self.bytes_by_codec["push", codec] += num_bytes
        self.bytes_up[learner_id] += num_bytes

    def turned_down(self, outcome: Outcome, reason: str) -> None:
        """Counts a push that was dropped or refused."""
        self.answers[outcome, reason] += 1

    def published(self, summary: RoundSummary) -> None:
        """Takes a published round."""
        contributors = len(summary.contributions)
        self.num_rounds += 1
        self.num_contributions += contributors
        # A contributor that died before the others were asked is a contribution without a live.
        self.num_live += max(len(summary.live), contributors)
        self.contributors[contributors] += 1
        if summary.measured_h is not None:
            self.measured_h_sum += summary.measured_h
            self.measured_h_rounds += 1

    @property
    def pushes_by_reason(self) -> dict[str, int]:
        """Pushes that were dropped or refused, by reason code."""
        found: Counter[str] = Counter()
        for (outcome, reason), number in self.answers.items():
            if outcome is not Outcome.ACCEPTED:
                found[reason] += number
        return dict(found)

    @property
    def participation(self) -> float:
        """Contributors over live learners."""
        return self.num_contributions / self.num_live if self.num_live else 0.0

    @property
    def measured_h(self) -> float:
        """Inner steps between two merges of one fragment, mean over rounds; 0 before any."""
        return self.measured_h_sum / self.measured_h_rounds if self.measured_h_rounds else 0.0

    def totals(self, tokens_merged: int) -> admin_pb2.Totals:
        """The totals as a message."""
        most = max(self.contributors, default=0)
        return admin_pb2.Totals(
            rounds=self.num_rounds,
            contributions=self.num_contributions,
            live=self.num_live,
            contributors_histogram=[self.contributors[i] for i in range(most + 1)],
            pushes_by_reason=self.pushes_by_reason,
            tokens_merged=tokens_merged,
            bytes_up=self.bytes_up.total(),
            bytes_down=self.bytes_down.total(),
            participation=self.participation,
            measured_h=self.measured_h,
        )


def make_record(
    state: CoreState,
    *,
    global_step: int,
    versions: tuple[Version, ...],
    fingerprint: str,
    summary: RoundSummary | None = None,
) -> RoundRecord:
    """The round record of what the core knows now.

    Args:
        state: the core's state.
        global_step: t of the round; 0 for the seed.
        versions: the version vector after it.
        fingerprint: fingerprint of the layout.
        summary: the round; None for the seed and for the start of a term.
    """
    learners = sorted(state.roster, key=lambda x: x.learner_id)
    merged = {x.learner_id: x.num_tokens_merged for x in learners}
    for later in (r for r in state.rounds if r.global_step > global_step):
        for contribution in later.accepted.values():
            merged[contribution.learner_id] -= contribution.num_tokens  # not in this cut yet
    return RoundRecord(
        run_id=state.settings.run_id,
        group=0,
        term=state.term,
        global_step=global_step,
        fragment=summary.fragment if summary else None,
        versions=versions,
        contributions=summary.contributions if summary else (),
        dropped=summary.dropped if summary else (),
        incarnations={x.learner_id: x.incarnation for x in learners},
        shards={x.learner_id: x.shard for x in learners},
        local_steps={x.learner_id: x.local_step for x in learners},
        quorum=state.quorum if state.quorum != state.settings.quorum else 0,
        leases=state.data.leases if state.data is not None else (),
        num_tokens_merged=min(sum(merged.values()), MOST_TOKENS),
        tokens_merged_by_learner=merged,
        layout_fingerprint=fingerprint,
        data=state.data.record if state.data is not None else DataRecord(),
        tokens_processed_by_learner={x.learner_id: x.num_tokens for x in learners},
        rolled_back=summary.rolled_back if summary else "",
        drains=tuple(
            DrainRecord(learner_id=x.learner_id, reason=x.drain, has_left=x.state.has_left)
            for x in learners
            if x.drain
        ),
    )


def restored_from(record: RoundRecord, roll: Roll | None, quorum: int) -> Restored:
    """What the core needs to go on.

    The membership knows what came after the record: incarnations granted, K set. Where it has
    nothing, the record counts (design section 6).

    Args:
        record: the newest complete one.
        roll: what the membership knows; None where it did not answer.
        quorum: K of the settings, where no operator has set another one.
    """
    members = {} if roll is None else {m.learner_id: m for m in roll.members}
    incarnations = dict(record.incarnations)
    for learner_id, member in members.items():
        if learner_id in incarnations:  # a learner without a shard joins as a new one
            incarnations[learner_id] = max(incarnations[learner_id], member.incarnation)
    chosen = None if roll is None else roll.quorum
    return Restored(
        global_step=record.global_step,
        versions=record.versions,
        incarnations=incarnations,
        shards=record.shards,
        local_steps=record.local_steps,
        tokens_merged=record.tokens_merged_by_learner,
        quorum=chosen or record.quorum or quorum,
        ages_s=None if not members else {x: m.age_s for x, m in members.items()},
        tokens_processed=record.tokens_processed_by_learner,
        data=record.data,
        leases=record.leases,
        has_just_gone_back=(
            record.data.went_back is not None and record.data.went_back.term == record.term
        ),
        # A later life has joined since: it was let in after the one that had left.
        drains=tuple(
            x
            for x in record.drains
            if not x.has_left
            or incarnations.get(x.learner_id) == record.incarnations.get(x.learner_id)
        ),
    )
