"""What a push claims, bounded by what its learner has reported.

A claim beyond the bounds is cut down and never refused: reports ride on a connection of their own
and may be behind the push, or lost with a broken stream, so an honest learner can be ahead of what
is known of it, but never by much.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Final

from synchronizer_server.core.events import PushOpened
from synchronizer_server.core.roster import Learner

_SLACK_STEPS: Final = 8
_SLACK_PACE: Final = 2.0
_OWN_RATE: Final = 2.0
_OTHERS_RATE: Final = 16.0
_FEWEST_OTHERS: Final = 2


def credible(
    header: PushOpened, learner: Learner, others: Sequence[Learner], *, step_s: float | None,
    now: float,
) -> PushOpened:  # fmt: skip
    """The header with counters that its learner can have; the same header where they are so.

    - The local step is at most the last reported one, plus the steps that fit twice into the time
      since, plus 8 for reports under way.
    - Steps are at most those since the learner's last contribution to the fragment: counters run
      from there, or from an update applied after it. Tokens shrink with them.
    - Tokens per step are at most twice the most that the learner ever reported, and where two or
      more others are there, at most 16 times their median.

    Args:
        header: header of an acceptable push: at least one step and one token.
        learner: who sent it.
        others: the learners that take part.
        step_s: pace of the fleet, where this learner's own is not known yet.
        now: time, seconds.
    """
    pace = learner.step_s or step_s
    since_s = now - learner.reported_at if learner.reported_at is not None else 0.0
    slack = _SLACK_STEPS + (math.ceil(_SLACK_PACE * since_s / pace) if pace else 0)
    local_step = min(header.local_step, learner.local_step + slack)
    num_steps = min(header.num_steps, max(local_step, 1))
    merged_step = learner.merged_steps.get(header.key.fragment)
    if merged_step is not None and merged_step < local_step:
        # Not below: its user may have gone back to an older state.
        num_steps = min(num_steps, local_step - merged_step)
    num_tokens = header.num_tokens * num_steps // header.num_steps
    most = math.floor(_most_tokens_per_step(learner, others) * num_steps)
    num_tokens = max(min(num_tokens, most), 1)
    return dataclasses.replace(
        header, local_step=local_step, num_steps=num_steps, num_tokens=num_tokens
    )


def _most_tokens_per_step(learner: Learner, others: Sequence[Learner]) -> float:
    own = max(_OWN_RATE * learner.most_tokens_per_step, 1.0)
    rates = [
        x.most_tokens_per_step
        for x in others
        if x.learner_id != learner.learner_id and x.most_tokens_per_step > 0.0
    ]
    if len(rates) < _FEWEST_OTHERS:
        return own
    return min(own, _OTHERS_RATE * statistics.median_high(rates))
