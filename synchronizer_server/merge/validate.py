"""Checks of a decoded outer gradient before it may touch an accumulator (design section 4)."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.merge.norms import vector_norm

MAX_NORM: Final = 1e24
"""Norm above which nothing is accepted, bound or not: fp32 sums of such vectors may overflow."""


def check_outer_gradient(
    vector: Tensor, *, num_elements: int, norm_bound: float | None = None
) -> float:
    """Checks one whole outer gradient; never changes it.

    Args:
        vector: decoded outer gradient, fp32 [num_elements].
        num_elements: elements of the fragment.
        norm_bound: largest L2 norm that is accepted; None leaves only ``MAX_NORM``.

    Returns:
        The L2 norm.

    Raises:
        DilocoError: ``MALFORMED`` for a wrong shape or dtype, ``NON_FINITE`` for NaN or infinity,
            ``NORM_BOUND`` for a norm above the bound.
    """
    if vector.dtype != torch.float32 or tuple(vector.shape) != (num_elements,):
        raise DilocoError(
            Reason.MALFORMED,
            f"outer gradient is {vector.dtype} {list(vector.shape)}, expected torch.float32 "
            f"[{num_elements}]; learner and synchronizer disagree about the fragment's layout",
            num_elements=num_elements,
        )
    norm = vector_norm(vector)
    if not math.isfinite(norm):
        raise DilocoError(
            Reason.NON_FINITE,
            "outer gradient holds NaN or infinity and is not merged; the learner's parameters have "
            "diverged: look at its loss and inner learning rate",
        )
    bound = MAX_NORM if norm_bound is None else min(norm_bound, MAX_NORM)
    if norm > bound:
        raise DilocoError(
            Reason.NORM_BOUND,
            f"norm {norm:.6g} of the outer gradient is above the bound {bound:.6g} and is not "
            "merged; look at the learner's loss, or raise the bound if such norms are usual",
            norm=norm,
            bound=bound,
        )
    return norm
