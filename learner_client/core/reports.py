"""Reports: one per inner step, merged into one while nobody takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a learner says after inner steps.

    Attributes:
        local_step: local step after them.
        num_steps: inner steps since the report before.
        num_tokens: tokens trained in them.
        loss: loss of the newest step that had one, nats per token.
        step_s: mean duration of a step in the user's loop, seconds.
        overhead_s: mean time inside ``learner.step``, seconds.
        applied: global step of the version applied of each fragment, by index.
        data_lease_id: data lease in use after the newest step; 0 without one.
        data_position: first position of it that is not trained.
    """

    local_step: int
    num_steps: int
    num_tokens: int
    loss: float | None
    step_s: float
    overhead_s: float
    applied: tuple[int, ...]
    data_lease_id: int = 0
    data_position: int = 0


def merge_reports(older: StepReport | None, newer: StepReport) -> StepReport:
    """One report that says what both say: sums of counts, means of durations, newest state."""
    if older is None:
        return newer
    num_steps = older.num_steps + newer.num_steps

    def mean(a: float, b: float) -> float:
        return (a * older.num_steps + b * newer.num_steps) / num_steps

    return StepReport(
        local_step=newer.local_step,
        num_steps=num_steps,
        num_tokens=older.num_tokens + newer.num_tokens,
        loss=older.loss if newer.loss is None else newer.loss,
        step_s=mean(older.step_s, newer.step_s),
        overhead_s=mean(older.overhead_s, newer.overhead_s),
        applied=newer.applied,
        data_lease_id=newer.data_lease_id,
        data_position=newer.data_position,
    )
