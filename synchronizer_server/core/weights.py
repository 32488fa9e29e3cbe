"""Weight of a contribution (paper section 2)."""

from __future__ import annotations

from typing import Final

from decoupled_diloco.errors import DilocoError, Reason

MAX_COUNTER: Final = 2**53
"""Counters above that cannot be: they would no longer be exact as floating-point numbers."""


def contribution_weight(num_tokens: int, num_steps: int) -> float:
    """Returns w = n * (n / s): quantity (tokens) times quality (tokens per step).

    Args:
        num_tokens: n, tokens trained since the counters were reset, above 0.
        num_steps: s, inner steps since then, above 0.

    Raises:
        DilocoError: BAD_COUNTERS for counters that cannot be.
    """
    if not 0 < num_tokens <= MAX_COUNTER or not 0 < num_steps <= MAX_COUNTER:
        raise DilocoError(
            Reason.BAD_COUNTERS, f"{num_tokens} tokens in {num_steps} steps cannot be"
        )
    return num_tokens * (num_tokens / num_steps)
