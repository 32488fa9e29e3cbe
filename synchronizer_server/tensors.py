"""The tensors of a run: fragment states, sums under way, results that wait for their commit.

Everything here runs on the tensor runner, one job at a time in the order of the core's effects;
that order is the order of the fp32 sums.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from decoupled_diloco.codecs import Codec, Payload, get_codec
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout, Role
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Version
from synchronizer_server.merge.accumulate import Accumulator, Granularity, MergeMethod
from synchronizer_server.merge.fragment_state import (
    FragmentState,
    advance,
    apply_update,
    rebase,
)
from synchronizer_server.merge.outer import OuterSettings
from synchronizer_server.merge.validate import check_outer_gradient
from synchronizer_server.updates import FULL_CODEC, Update, make_update

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Merged:
    """Result of a round that is not published yet.

    Attributes:
        state: the fragment's new state.
        update: what watchers get.
    """

    state: FragmentState
    update: Update


class TensorBook:
    """Holds and merges the fragments of one layout.

    Args:
        layout: the run's layout.
        settings: settings of the run.
        term: term of leadership, part of every new version.
    """

    def __init__(self, layout: Layout, settings: RunSettings, term: int) -> None:
        self._layout = layout
        self._settings = settings
        self._term = term
        self._outer = OuterSettings(
            learning_rate=settings.outer_learning_rate,
            momentum=settings.outer_momentum,
            nesterov=True,
        )
        self._down: Codec = get_codec(settings.codec_down)
        self._states: list[FragmentState] = []
        self._sums: dict[int, Accumulator] = {}

    def start(self, states: list[FragmentState]) -> None:
        """Begins with these states, one per fragment."""
        assert len(states) == self._layout.num_fragments, "one state per fragment"
        self._states = states

    def state(self, fragment: int) -> FragmentState:
        """State of a fragment after its last published round."""
        return self._states[fragment]

    def decode(self, codec: str, payload: Payload, fragment: int) -> tuple[torch.Tensor, float]:
        """Decodes a staged outer gradient and checks it whole; changes nothing.

        Returns:
            fp32 [n], and its L2 norm.

        Raises:
            DilocoError: why it cannot be merged.
        """
        num_elements = self._layout.fragments[fragment].num_elements
        vector = get_codec(codec).decode(payload, num_elements)
        norm = check_outer_gradient(
            vector, num_elements=num_elements, norm_bound=self._settings.max_outer_gradient_norm
        )
        return vector, norm

    def decode_seed(self, codec: str, payload: Payload, fragment: int) -> torch.Tensor:
        """Decodes the first parameters of a fragment, fp32 [n].

        Raises:
            DilocoError: why they cannot be.
        """
        num_elements = self._layout.fragments[fragment].num_elements
        vector = get_codec(codec).decode(payload, num_elements)
        check_outer_gradient(vector, num_elements=num_elements)
        return vector

    def accumulate(
        self, global_step: int, fragment: int, vector: torch.Tensor, weight: float,
        older_base: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Adds an accepted contribution: this is the instant of acceptance.

        Args:
            global_step: its round.
            fragment: the round's fragment.
            vector: outer gradient, fp32 [n].
            weight: its weight.
            older_base: published copy against which it was computed where that is not the
                newest one; the difference is added first.
        """
        if older_base is not None:
            now = self._states[fragment].published
            vector = rebase(vector, published_now=now, published_base=older_base)
        if global_step not in self._sums:
            self._sums[global_step] = self._new_sum(fragment)
        self._sums[global_step].add(vector, weight)

    def merge(self, global_step: int, fragment: int, base: Version) -> Merged:
        """Computes the outer step of a full round; the state before stays until `publish`."""
        total = self._sums.pop(global_step)
        state = self._states[fragment]
        try:
            after, payload = advance(state, total.result(), self._outer, self._down)
        except DilocoError as error:
            if error.reason is not Reason.NON_FINITE:
                raise
            logger.error("round %d changes nothing: %s", global_step, error.message)
            payload = self._down.encode(torch.zeros_like(state.published))
            same = apply_update(state.published, payload, self._down)
            after = FragmentState(published=same, residual=state.residual, momentum=state.momentum)
        result = Version(self._term, global_step, after.digest())
        update = make_update(
            fragment,
            base=base,
            result=result,
            codec=self._down.name,
            payload=payload,
            num_elements=after.published.numel(),
        )
        return Merged(state=after, update=update)

    def roll_back(self, global_step: int, fragment: int, copy: torch.Tensor) -> Merged:
        """Puts a fragment back: ``copy`` (fp32 [n]) anew, with nothing owed and no momentum."""
        state = FragmentState.seeded(copy)
        update = make_update(
            fragment,
            base=None,
            result=Version(self._term, global_step, state.digest()),
            codec=FULL_CODEC,
            payload=get_codec(FULL_CODEC).encode(state.published),
            num_elements=copy.numel(),
        )
        return Merged(state=state, update=update)

    def publish(self, merged: Merged) -> None:
        """The round is persisted: its result is the state."""
        self._states[merged.update.fragment] = merged.state

    def _new_sum(self, fragment: int) -> Accumulator:
        spec = self._layout.fragments[fragment]
        average = spec.role is Role.EMBEDDING
        method = MergeMethod.AVERAGE if average else MergeMethod(self._settings.merge)
        return Accumulator(spec.pieces, method, Granularity(self._settings.granularity))
