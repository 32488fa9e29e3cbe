"""The usual norm of a fragment's outer gradients, and the bound that follows from it.

An outer gradient of n inner steps is as long as a walk of n steps: about sqrt(n) where the steps
differ, at most n where they agree. Norms are therefore compared after division by sqrt(n).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

_WINDOW: Final = 64
_FEWEST: Final = 8
_FEWEST_LEARNERS: Final = 2


class NormScale:
    """Running scale per fragment, of accepted contributions only.

    The scale is the median over learners of each learner's own median, of two the higher: one
    learner has one vote, however often it contributes and however long its outer gradients are, so
    among three or more a hostile one moves the scale no further than to its honest neighbour.

    It acts from the eighth contribution on, and only where two learners contributed: a learner
    that is alone has nobody to protect, and no update of others would ever put it right again. It
    is no part of the record: after a restart it is learned anew.

    Args:
        factor: an outer gradient may be this many times the scale.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._accepted: dict[int, deque[tuple[str, float]]] = {}

    def bound(self, fragment: int, num_steps: int) -> float | None:
        """Largest L2 norm that an outer gradient of ``num_steps`` may have; None before it acts."""
        accepted = self._accepted.get(fragment, ())
        by_learner: dict[str, list[float]] = {}
        for learner_id, value in accepted:
            by_learner.setdefault(learner_id, []).append(value)
        if len(accepted) < _FEWEST or len(by_learner) < _FEWEST_LEARNERS:
            return None
        scale = statistics.median_high([statistics.median(x) for x in by_learner.values()])
        return self._factor * scale * math.sqrt(num_steps)

    def observe(self, fragment: int, learner_id: str, norm: float, num_steps: int) -> None:
        """Takes the norm of an accepted contribution; a zero vector says nothing of the usual."""
        if norm > 0.0:
            window = self._accepted.setdefault(fragment, deque(maxlen=_WINDOW))
            window.append((learner_id, norm / math.sqrt(num_steps)))
