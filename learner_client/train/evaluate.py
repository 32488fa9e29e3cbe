"""Held-out loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoupled_diloco.errors import Reason, UsageError
from learner_client.train.corpus import Tokens
from learner_client.train.model import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The loss over held-out tokens.

    Attributes:
        loss: mean cross-entropy, nats per token.
        num_tokens: tokens predicted.
    """

    loss: float
    num_tokens: int


@torch.no_grad()
def evaluate(
    model: Transformer,
    tokens: Tokens,
    *,
    sequence_length: int,
    max_tokens: int | None = None,
    batch_size: int = 16,
) -> EvaluationResult:
    """Measures a model on held-out tokens, in fp32; equal arguments give an equal result.

    The tokens are cut into windows of ``sequence_length``; where ``max_tokens`` does not allow
    all of them, those taken are spread evenly. The model comes back in the mode it was in.

    Args:
        model: the model.
        tokens: ``[n]`` token ids.
        sequence_length: tokens per window, T; at most that of the model.
        max_tokens: most tokens to predict (at least one window); all where None.
        batch_size: windows per forward pass.

    Raises:
        UsageError: DATA_EMPTY with fewer than 2 tokens, DATA_MISMATCH when a token is not in
            the model's vocabulary.
    """
    if len(tokens) < 2:
        raise UsageError(
            Reason.DATA_EMPTY,
            f"{len(tokens)} held-out tokens are too few to evaluate on; hold out more text",
        )
    highest, vocab_size = int(tokens.max()), model.config.vocab_size
    if highest >= vocab_size:
        raise UsageError(
            Reason.DATA_MISMATCH,
            f"held-out token {highest} is not in the model's vocabulary of {vocab_size}; "
            "use the corpus that the model was trained on",
        )
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        total, num_tokens = 0.0, 0
        for batch in _batches(tokens, sequence_length, max_tokens, batch_size):
            total += _summed_loss(model, batch.to(device))
            num_tokens += batch.shape[0] * (batch.shape[1] - 1)
    finally:
        model.train(was_training)
    return EvaluationResult(loss=total / num_tokens, num_tokens=num_tokens)


def _batches(
    tokens: Tokens, sequence_length: int, max_tokens: int | None, batch_size: int
) -> list[Tensor]:
    """Cuts ``[b, T + 1]`` batches of int64 windows; one short window where T is too long."""
    length = min(sequence_length, len(tokens) - 1)
    num_windows = (len(tokens) - 1) // length
    num_taken = num_windows
    if max_tokens is not None:
        num_taken = max(1, min(num_windows, max_tokens // length))
    starts = [length * (index * num_windows // num_taken) for index in range(num_taken)]
    windows = np.stack([tokens[start : start + length + 1] for start in starts])
    all_windows = torch.from_numpy(windows.astype(np.int64))
    return [all_windows[first : first + batch_size] for first in range(0, num_taken, batch_size)]


def _summed_loss(model: Transformer, windows: Tensor) -> float:
    logits = model(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="sum")
    return float(loss.item())
