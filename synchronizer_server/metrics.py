"""What Prometheus scrapes of a synchronizer: read off its status and its ledger when it asks.

There is nothing to keep up to date here, so metrics, ``diloco status`` and the report agree. A
process that follows exports what it knows of itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from decoupled_diloco.metrics import Sheet
from decoupled_diloco.v1 import admin_pb2 as pb
from synchronizer_server.core.effects import Outcome
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.election import Election
from synchronizer_server.engine import Engine
from synchronizer_server.metric_table import FORGOTTEN_S, MOST_LEARNERS, TABLE
from synchronizer_server.node import Node
from synchronizer_server.service.switchboard import Switchboard
from synchronizer_server.vitals import Before

STATES: Final = ("starting", "seeding", "running", "draining", "complete", "following")
"""What a synchronizer does; see ``GetStatusResponse.state``."""

_HAS_LEFT: Final = frozenset(str(x) for x in LearnerState if x.has_left)

Exposition = tuple[bytes, str]
"""What a scrape is answered with: body and content type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the values come from; the status page asks the same.

    Attributes:
        run_id: the run; empty before it is known.
        status: what this process sees, whatever it is.
        engine: the engine of a process that leads, or has led until it was told to end; None where
            nothing is served.
        keeper_answers: whether the keeper of the lease answers; None where there is none.
    """

    run_id: str = ""
    status: Callable[[], pb.GetStatusResponse] = pb.GetStatusResponse
    engine: Callable[[], Engine | None] = lambda: None
    keeper_answers: Callable[[], bool | None] = lambda: None


def source_of(node: Node, board: Switchboard, election: Election | None, run_id: str) -> Source:
    """The source of a process, whatever it does.

    Args:
        node: its roles.
        board: what it serves.
        election: None where no other synchronizer can lead.
        run_id: the run.
    """
    served: Engine | None = None

    def engine() -> Engine | None:
        """The one whose status is served: up to the last word of a process that ends."""
        nonlocal served
        if node.assembled is not None:
            served = node.assembled.engine
        if board.admin is None:
            served = None
        return served

    return Source(
        run_id=run_id,
        status=board.status,
        engine=engine,
        keeper_answers=lambda: None if election is None else election.leadership.keeper_answers,
    )


class Metrics:
    """The metrics of one synchronizer process, and those of any process: memory, time, files.

    Args:
        source: where the values come from.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._process = ProcessCollector(registry=None)
        self._shown: frozenset[str] = frozenset()

    def look(self) -> Callable[[], Exposition]:
        """Takes the values as of now, in the event loop of the synchronizer.

        Returns:
            What makes the answer of it; a thread may do that, but one at a time.
        """
        source, sheet = self._source, Sheet(TABLE)
        sheet.build_info("synchronizer")
        if source.run_id:
            sheet.put("diloco_run_info", 1, run_id=source.run_id)
        answers = source.keeper_answers()
        if answers is not None:
            sheet.put("diloco_lease_keeper_up", answers)
        status, engine = source.status(), source.engine()
        before = Before()
        if engine is not None:
            before = engine.vitals.before
            _put_engine(sheet, engine)
        sheet.put("diloco_leader", engine is not None and not engine.closed)

        def finish() -> Exposition:
            _put_process(sheet, status)
            if status.role == "leading":
                _put_rounds(sheet, status, before)
                _put_learners(sheet, status, before)
                self._put_shown(sheet, status.learners, before)
                _put_replication(sheet, status)
                _put_data(sheet, status.data, before)
            families = [*sheet.families(), *self._process.collect()]
            return generate_latest(_Collected(families)), CONTENT_TYPE_PLAIN_0_0_4

        return finish

    def exposition(self) -> Exposition:
        """Answers a scrape at once, in the event loop of the synchronizer."""
        return self.look()()

    def _put_shown(
        self, sheet: Sheet, learners: Iterable[pb.LearnerStatus], before: Before
    ) -> None:
        """Series of single learners.

        Who has series keeps them: with too many learners, those heard last would be others at
        every scrape, and all of them would come and go.
        """
        known = [
            x for x in learners if x.state not in _HAS_LEFT and x.heard_seconds_ago <= FORGOTTEN_S
        ]
        if len(known) > MOST_LEARNERS:
            known.sort(key=lambda x: (x.learner_id not in self._shown, x.heard_seconds_ago))
            known = known[:MOST_LEARNERS]
        self._shown = frozenset(x.learner_id for x in known)
        for learner in known:
            _put_learner(sheet, learner, before)


class _Collected(Collector):
    """Metrics that are collected already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _put_process(sheet: Sheet, status: pb.GetStatusResponse) -> None:
    sheet.put("diloco_term", status.claim.term)
    state = status.state or STATES[0]
    for name in STATES:
        sheet.put("diloco_run_state", name == state, state=name)
    if status.role == "leading" or status.record_term:
        sheet.put("diloco_global_step", status.global_step)
        sheet.put("diloco_global_step_target", status.total_global_steps)
    for version in status.versions:
        step = version.version.global_step
        sheet.put("diloco_fragment_version", step, fragment=str(version.fragment))
    longest: dict[tuple[str, str], float] = {}
    number: Counter[tuple[str, str]] = Counter()
    for wait in status.waits:
        kind = wait.subject.partition(" ")[0], wait.reason
        longest[kind] = max(longest.get(kind, 0.0), wait.seconds)
        number[kind] += 1
    for (subject, reason), seconds in longest.items():
        sheet.put("diloco_waits", number[subject, reason], subject=subject, reason=reason)
        sheet.put("diloco_wait_seconds", seconds, subject=subject, reason=reason)


def _put_rounds(sheet: Sheet, status: pb.GetStatusResponse, before: Before) -> None:
    totals, pace = status.totals, status.pace
    sheet.put("diloco_rounds_total", totals.rounds)
    sheet.put("diloco_rounds_in_flight", len(status.rounds))
    sheet.put("diloco_round_contributions_total", totals.contributions)
    sheet.put("diloco_round_live_total", totals.live)
    sheet.put("diloco_participation_ratio", totals.participation)
    sheet.put("diloco_measured_sync_interval", totals.measured_h)
    merged = max(totals.tokens_merged - sum(before.merged.values()), 0)
    sheet.put("diloco_merged_tokens_total", merged)
    sheet.put("diloco_quorum", status.quorum)
    for part, seconds in (
        ("step", pace.step_seconds),
        ("quorum", pace.quorum_seconds),
        ("sync", pace.sync_seconds),
        ("grace", pace.grace_seconds),
    ):
        sheet.put("diloco_pace_seconds", seconds, part=part)


def _put_learners(sheet: Sheet, status: pb.GetStatusResponse, before: Before) -> None:
    learners = status.learners
    by_state = Counter(x.state for x in learners)
    for state in LearnerState:
        sheet.put("diloco_learners", by_state[state], state=str(state))
    sheet.put("diloco_quarantined_learners", sum(bool(x.quarantine) for x in learners))
    reported = sum(x.tokens_processed for x in learners) - sum(before.reported.values())
    sheet.put("diloco_tokens_total", reported)


def _put_learner(sheet: Sheet, learner: pb.LearnerStatus, before: Before) -> None:
    name = learner.learner_id
    for metric, value in (
        ("diloco_heartbeat_age_seconds", learner.heard_seconds_ago),
        ("diloco_versions_behind", learner.versions_behind),
        ("diloco_reported_step", learner.local_step),
        ("diloco_reported_tokens_per_second", learner.tokens_per_second),
        (
            "diloco_reported_tokens_total",
            learner.tokens_processed - before.reported.get(name, 0),
        ),
        ("diloco_contributed_tokens_total", learner.tokens_merged - before.merged.get(name, 0)),
        ("diloco_quarantined", bool(learner.quarantine)),
    ):
        sheet.put(metric, value, learner=name)
    if learner.HasField("loss"):
        sheet.put("diloco_reported_loss", learner.loss, learner=name)
    for outcome, number in (
        (Outcome.ACCEPTED, learner.accepted),
        (Outcome.DROPPED, learner.dropped),
        (Outcome.REFUSED, learner.refused),
    ):
        sheet.put("diloco_answered_pushes_total", number, learner=name, outcome=str(outcome))
    for leg, num_bytes in (("push", learner.bytes_up), ("update", learner.bytes_down)):
        sheet.put("diloco_exchanged_bytes_total", num_bytes, learner=name, leg=leg)


def _put_replication(sheet: Sheet, status: pb.GetStatusResponse) -> None:
    if not status.HasField("replication"):
        return
    replication = status.replication
    sheet.put("diloco_lease_held", replication.lease_held)
    sheet.put("diloco_lease_seconds", replication.lease_seconds)
    sheet.put("diloco_unsafe_rounds", replication.unsafe_rounds)
    sheet.put("diloco_standbys", len(replication.replicas))
    sheet.put("diloco_standbys_in_sync", sum(x.in_sync for x in replication.replicas))
    for replica in replication.replicas:
        name = replica.standby_id
        lag = max(status.global_step - replica.acked_global_step, 0)
        sheet.put("diloco_standby_connected", replica.connected, standby=name)
        sheet.put("diloco_standby_in_sync", replica.in_sync, standby=name)
        sheet.put("diloco_standby_lag_rounds", lag, standby=name)


def _put_data(sheet: Sheet, data: pb.DataStatus, before: Before) -> None:
    if data.mode != "leases":
        return
    sheet.put("diloco_data_epoch", data.epoch)
    sheet.put("diloco_data_samples", data.num_free, state="free")
    sheet.put("diloco_data_samples", data.num_leased, state="leased")
    sheet.put("diloco_data_merged_total", data.num_merged - before.data_merged)
    sheet.put("diloco_data_returned_total", data.num_returned - before.data_returned)


def _put_engine(sheet: Sheet, engine: Engine) -> None:
    """What a window, a shape or a health needs, and no status says."""
    ledger, vitals, state = engine.ledger, engine.vitals, engine.core.state
    now = engine.parts.clock()
    for (outcome, reason), number in ledger.answers.items():
        sheet.put("diloco_pushes_total", number, outcome=str(outcome), reason=reason)
    for (leg, codec), num_bytes in ledger.bytes_by_codec.items():
        sheet.put("diloco_transfer_bytes_total", num_bytes, leg=leg, codec=codec)
    sheet.summary(
        "diloco_inner_steps_per_merge", count=ledger.measured_h_rounds, total=ledger.measured_h_sum
    )
    sheet.put("diloco_sync_interval", engine.parts.settings.sync_interval)
    sheet.put("diloco_inflight_bytes", engine.tickets.staged_bytes)
    sheet.put("diloco_inflight_limit_bytes", engine.parts.max_staged_bytes)
    sheet.put("diloco_store_up", vitals.store_failure is None)
    sheet.put("diloco_membership_up", vitals.membership_failure is None)
    if state.num_fragments:
        sheet.put("diloco_pace_seconds", state.pace.opening_interval_s(), part="opening")
    last = engine.started_at if vitals.published_at is None else vitals.published_at
    sheet.put("diloco_round_age_seconds", now - last)
    if vitals.newest is not None:
        contributions = vitals.newest.contributions
        sheet.put("diloco_round_contributors", len(contributions))
        sheet.put("diloco_round_live_learners", max(len(vitals.newest.live), len(contributions)))
        sheet.put("diloco_round_tokens", sum(x.num_tokens for x in contributions))
    for name, histogram in vitals.histograms().items():
        sheet.histogram(name, histogram)
    _put_snapshots(sheet, engine, now)


def _put_snapshots(sheet: Sheet, engine: Engine, now: float) -> None:
    desk, core = engine.snapshots, engine.core
    sheet.put("diloco_snapshots_total", desk.num_complete, result="complete")
    sheet.put("diloco_snapshots_total", desk.num_failed, result="failed")
    sheet.put("diloco_snapshot_pending", core.snapshots.pending is not None)
    if desk.complete is not None:
        rounds = max(core.state.committed - desk.complete.global_step, 0)
        sheet.put("diloco_snapshot_age_seconds", now - desk.complete_since)
        sheet.put("diloco_snapshot_age_rounds", rounds)
