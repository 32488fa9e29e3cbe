"""The outer optimizer: SGD with (Nesterov) momentum, in fp32 (paper section 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from decoupled_diloco.errors import Reason, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Settings of the outer optimizer; constant over a run.

    Attributes:
        learning_rate: outer learning rate, finite and above 0.
        momentum: mu, in [0, 1); 0 is plain SGD.
        nesterov: look-ahead form of the momentum; without effect at ``momentum`` 0.

    Raises:
        UsageError: ``CONFIG_INVALID`` for a value out of range.
    """

    learning_rate: float
    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"outer learning rate is {self.learning_rate}; give a finite number above 0",
            )
        if not 0 <= self.momentum < 1:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"outer momentum is {self.momentum}; give a number from 0 to below 1",
            )


def outer_step(
    parameters: Tensor, momentum: Tensor, gradient: Tensor, settings: OuterSettings
) -> tuple[Tensor, Tensor]:
    """One step of the outer optimizer; no argument is changed.

    ``b' = mu*b + D``; ``x' = x - lr*(D + mu*b')`` with Nesterov, else ``x' = x - lr*b'``. The
    gradient is old minus new, a direction of descent, so it is subtracted.

    Args:
        parameters: x, fp32 [n].
        momentum: b, fp32 [n]; zeros before the first step.
        gradient: D, the merged outer gradient, fp32 [n].
        settings: learning rate, momentum and form.

    Returns:
        (x', b'), both new fp32 [n].
    """
    new_momentum = momentum.mul(settings.momentum).add_(gradient)
    if settings.nesterov and settings.momentum > 0:
        direction = new_momentum.mul(settings.momentum).add_(gradient)
    else:
        direction = new_momentum
    return parameters.sub(direction, alpha=settings.learning_rate), new_momentum
