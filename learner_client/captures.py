"""Copies of fragments, and the pushes that are made of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner_client.core.learner_core import AnswerPush, Stamp


@dataclass(slots=True, kw_only=True)
class Capture:
    """A copy of a fragment in a reused host buffer.

    Attributes:
        stamp: what it is a copy of.
        buffer: the whole buffer.
        vector: the part of it that holds the fragment, fp32.
        num_readers: who reads it now; only a buffer without readers is used again.
        is_current: False once a newer copy took its place.
    """

    stamp: Stamp
    buffer: torch.Tensor
    vector: torch.Tensor
    num_readers: int = 0
    is_current: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PushWork:
    """Everything that a push is made of.

    Attributes:
        answer: pull, stamp and counters.
        capture: the copy of the local parameters; to be released.
        base: published copy that the outer gradient is computed against.
    """

    answer: AnswerPush
    capture: Capture
    base: torch.Tensor
