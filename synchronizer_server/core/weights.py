"""The weight of a contribution (paper section 2): quantity times quality."""

from __future__ import annotations

from typing import Final

from decoupled_diloco.errors import DilocoError, Reason

MAX_TOKENS: Final = 2**44
"""Most tokens that one contribution may claim (1.8e13, a whole pre-training run)."""

MAX_STEPS: Final = 2**31
"""Most inner steps that one contribution may claim."""


def contribution_weight(num_tokens: int, num_steps: int) -> float:
    """Weighs a contribution by its counters: ``tokens * (tokens / steps) = tokens^2 / steps``.

    Args:
        num_tokens: tokens trained on since the later of last apply and last accepted contribution.
        num_steps: inner steps in the same span.

    Returns:
        The weight in tokens^2 per step; 0 where no token was seen. Correctly rounded.

    Raises:
        DilocoError: ``BAD_COUNTERS`` where a counter is no integer, ``num_steps`` is not in
            [1, MAX_STEPS] or ``num_tokens`` is not in [0, MAX_TOKENS].
    """
    if type(num_tokens) is not int or not 0 <= num_tokens <= MAX_TOKENS:
        raise DilocoError(
            Reason.BAD_COUNTERS,
            f"a contribution claims {num_tokens!r} tokens; expected an integer from 0 to "
            f"{MAX_TOKENS}. The learner's counters are broken: restart it",
            num_tokens=num_tokens,
        )
    if type(num_steps) is not int or not 1 <= num_steps <= MAX_STEPS:
        raise DilocoError(
            Reason.BAD_COUNTERS,
            f"a contribution claims {num_steps!r} inner steps; expected an integer from 1 to "
            f"{MAX_STEPS}. A learner without a step since the last update answers 'not ready'",
            num_steps=num_steps,
        )
    return num_tokens * num_tokens / num_steps
