"""Carries out what the core decides about rounds: merge, persist, publish, seed."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Callable
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, reach
from synchronizer_server.commits import Persisted
from synchronizer_server.core import effects as fx
from synchronizer_server.core import events as ev
from synchronizer_server.ledger import Ledger
from synchronizer_server.parts import Parts
from synchronizer_server.vitals import Vitals

logger = logging.getLogger(__name__)

PERSIST_RETRY_S: Final = 1.0
"""Wait before a failed commit is tried again, seconds."""


class RoundWork:
    """The rounds' work beside the event loop.

    Args:
        parts: what the engine is made of.
        ledger: counts what is published.
        vitals: told how long the work takes, and whether the store fails.
        handle: feeds the core.
    """

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        vitals: Vitals,
        handle: Callable[[ev.Event], object],
    ) -> None:
        self._parts = parts
        self._ledger = ledger
        self._vitals = vitals
        self._handle = handle

    async def merge(self, effect: fx.MergeRound) -> None:
        """Computes the outer step of a full round."""
        committer, step, target = self._parts.committer, effect.global_step, effect.roll_back_to
        self._vitals.full(self._parts.core.state.round(step))
        began = self._parts.clock()
        if target is None:
            version = await committer.merge(step, effect.fragment)
        else:
            version = await committer.roll_back(step, effect.fragment, target)
        self._vitals.merge.observe(self._parts.clock() - began)
        self._handle(ev.RoundMerged(global_step=effect.global_step, version=version))

    async def persist(self, effect: fx.PersistRound) -> None:
        """Persists a merged round; a failure is tried again.

        Raises:
            DilocoError: STORE_REMOVED where a standby has all that was published.
        """
        step, clock = effect.summary.global_step, self._parts.clock
        reach(FaultPoint.BEFORE_PERSIST)
        began = clock()
        try:
            persisted = await self._parts.committer.persist(effect.summary)
        except DilocoError as error:
            if self._is_better_led_elsewhere(error):
                raise
            self._handle(self._persist_failed(step, error))
            return
        self._vitals.store_failure = None
        self._vitals.persist.observe(clock() - began)
        reach(FaultPoint.AFTER_PERSIST)
        began = clock()
        await self._replicate(persisted)
        self._vitals.replicate.observe(clock() - began)
        reach(FaultPoint.BEFORE_PUBLISH)
        self._handle(ev.RoundPersisted(global_step=step))

    async def _replicate(self, persisted: Persisted) -> None:
        """Waits until what is persisted may be published."""
        if self._parts.replicas is None:
            return
        acked = await self._parts.replicas.publishable(persisted.record, persisted.fragments)
        if not acked:
            await self._parts.committer.flush()

    def _is_better_led_elsewhere(self, error: DilocoError) -> bool:
        """What was taken away does not come back by waiting; alone, we keep what we hold."""
        replicas = self._parts.replicas
        removed = error.reason is Reason.STORE_REMOVED
        return removed and replicas is not None and replicas.core.has_successor

    def _persist_failed(self, global_step: int, error: DilocoError) -> ev.PersistFailed:
        self._vitals.store_failure = error.reason
        subject = f"round {global_step}" if global_step else "the seed"
        logger.error("%s is not persisted, merging waits: %s", subject, error)
        self._parts.journal.write(
            "persist_failed", global_step=global_step, reason=str(error.reason)
        )
        return ev.PersistFailed(
            global_step=global_step,
            reason=error.reason,
            message=error.message,
            retry_after_s=PERSIST_RETRY_S,
        )

    def publish(self, effect: fx.PublishRound) -> None:
        """Puts a persisted round before every watcher."""
        summary = effect.summary
        self._parts.committer.publish(summary)
        reach(FaultPoint.AFTER_PUBLISH)
        self._ledger.published(summary)
        self._vitals.published(summary, effect.sync_s, self._parts.clock())
        self._parts.journal.write(
            "round",
            global_step=summary.global_step,
            term=self._parts.core.state.term,
            fragment=summary.fragment,
            digest=self._parts.committer.updates.version(summary.fragment).digest.hex(),
            contributors=[c.learner_id for c in summary.contributions],
            live=list(summary.live),
            dropped={d.learner_id: d.reason for d in summary.dropped},
            weights=[c.weight for c in summary.contributions],
            tokens=sum(c.num_tokens for c in summary.contributions),
            grace_s=summary.grace_s,
            quorum_s=summary.quorum_s,
            sync_s=effect.sync_s,
            step_s=summary.step_s,
            measured_h=summary.measured_h,
            loss=self._loss(summary),
            bytes_up=self._ledger.bytes_up.total(),
            bytes_down=self._ledger.bytes_down.total(),
            **_data(summary),
            **({"rolled_back": summary.rolled_back} if summary.rolled_back else {}),
        )

    def _loss(self, summary: fx.RoundSummary) -> float | None:
        """Median of the training losses that the contributors reported last; None without any.

        Not the mean, which one learner with an absurd loss would decide.
        """
        roster = self._parts.core.state.roster
        learners = [roster.find(c.learner_id) for c in summary.contributions]
        losses = [x.loss for x in learners if x is not None and x.loss is not None]
        median = statistics.median(losses) if losses else math.nan
        return median if math.isfinite(median) else None

    async def persist_seed(self) -> None:
        """Persists the seed; a failure is tried again."""
        try:
            persisted = await self._parts.committer.persist_seed()
        except DilocoError as error:
            self._handle(self._persist_failed(0, error))
            return
        self._vitals.store_failure = None
        await self._replicate(persisted)
        # Not before: a standby in sync that lacks the seed still must be free to lead a new run.
        await self.mark_seeded()
        self._handle(ev.SeedPersisted(versions=persisted.record.versions))

    async def mark_seeded(self) -> None:
        """Tells the membership that this run must never be seeded again."""
        try:
            await self._parts.membership.mark_seeded(self._parts.core.state.term)
        except DilocoError as error:
            logger.warning("the membership does not know that the run is seeded: %s", error)

    def publish_seed(self) -> None:
        """Puts the seed before every watcher."""
        self._parts.committer.publish_seed()
        self._parts.journal.write("seeded")
        logger.info("the run is seeded")


def _data(summary: fx.RoundSummary) -> dict[str, object]:
    """What a line of the journal says of leased data: all there is, and what is new."""
    if summary.data_totals is None:
        return {}
    ranges = [(x.epoch, x.start, x.stop) for x in summary.merged_data]
    return {"data": {**dataclasses.asdict(summary.data_totals), "ranges": ranges}}
