"""What was trained since when: steps and tokens, per fragment (design section 4).

Every step counts on all fragments alike, so one running total serves them all; a fragment only
keeps where its counters start. They start at the later of the last applied update and the last
accepted contribution, so the order in which these become known does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """A position in the training of this process.

    Attributes:
        num_steps: inner steps.
        num_tokens: tokens trained in them.
    """

    num_steps: int = 0
    num_tokens: int = 0

    def since(self, origin: Totals) -> Totals:
        """What was trained between ``origin`` and here; nothing where ``origin`` is later."""
        if origin.num_steps >= self.num_steps:
            return Totals()
        return Totals(
            num_steps=self.num_steps - origin.num_steps,
            num_tokens=self.num_tokens - origin.num_tokens,
        )


class Counters:
    """Steps and tokens of all fragments.

    Args:
        num_fragments: P.
        totals: where the totals stand, when counting goes on from a saved state.
        origins: where each fragment's counters start; at ``totals`` by default.
        applied: where they would start if nothing had been accepted since the last update; at
            ``origins`` by default.
    """

    def __init__(
        self,
        num_fragments: int,
        *,
        totals: Totals | None = None,
        origins: tuple[Totals, ...] | None = None,
        applied: tuple[Totals, ...] | None = None,
    ) -> None:
        self._totals = totals or Totals()
        self._origins = list(origins or (self._totals,) * num_fragments)
        self._applied = list(applied or self._origins)
        for kept in (self._origins, self._applied):
            assert len(kept) == num_fragments, (len(kept), num_fragments)

    @property
    def totals(self) -> Totals:
        """Everything trained so far."""
        return self._totals

    @property
    def origins(self) -> tuple[Totals, ...]:
        """Where the counters of each fragment start."""
        return tuple(self._origins)

    @property
    def applied_origins(self) -> tuple[Totals, ...]:
        """Where they would start if nothing had been accepted since the last update."""
        return tuple(self._applied)

    def without_acceptances(self) -> Counters:
        """These counters as if nothing had been accepted since the last update of each fragment.

        An acceptance changes no parameter, so this undoes it exactly.
        """
        origins = self.applied_origins
        return Counters(len(origins), totals=self._totals, origins=origins)

    def count(self, num_tokens: int) -> None:
        """Counts one inner step on all fragments."""
        self._totals = Totals(
            num_steps=self._totals.num_steps + 1, num_tokens=self._totals.num_tokens + num_tokens
        )

    def reset(self, fragment: int, at: Totals | None = None) -> None:
        """Starts the counters of ``fragment`` at ``at``, now by default; they never go back."""
        at = at or self._totals
        if at.num_steps > self._origins[fragment].num_steps:
            self._origins[fragment] = at

    def applied(self, fragment: int) -> None:
        """An update was written into the model: the counters of ``fragment`` start anew."""
        self._origins[fragment] = self._applied[fragment] = self._totals

    def of(self, fragment: int, at: Totals | None = None) -> Totals:
        """Counters of ``fragment`` as they are (were, for a copy) at ``at``, now by default."""
        return (at or self._totals).since(self._origins[fragment])
