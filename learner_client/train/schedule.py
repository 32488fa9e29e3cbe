"""The inner learning rate as a function of the global step."""

from __future__ import annotations

import math

from learner_client.train.settings import TrainSettings


def learning_rate_at(global_step: float, settings: TrainSettings) -> float:
    """Returns the learning rate: linear warm-up, then cosine decay to a share of the peak.

    The clock is the global step as last heard, interpolated by local steps (paper section 12,
    item 7), so that learners are in phase and one that joins late does not warm up again.

    Args:
        global_step: the estimate, at least 0; the schedule stays at its end beyond
            ``total_global_steps``.
        settings: ``learning_rate``, ``warmup_steps``, ``total_global_steps``,
            ``min_learning_rate_ratio``.
    """
    if global_step < settings.warmup_steps:
        return settings.learning_rate * (global_step + 1.0) / (settings.warmup_steps + 1.0)
    span = settings.total_global_steps - settings.warmup_steps
    progress = min((global_step - settings.warmup_steps) / span, 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = settings.min_learning_rate_ratio
    return settings.learning_rate * (floor + (1.0 - floor) * cosine)
