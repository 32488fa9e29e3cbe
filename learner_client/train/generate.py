"""Samples text from a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoupled_diloco.errors import Reason, UsageError
from learner_client.train.model import Transformer
from learner_client.train.tokenizer import TokenArray

_GREEDY = 1e-6
"""Temperatures below it mean 0: dividing by them would overflow."""


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Sequence[int] | TokenArray,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> list[int]:
    """Continues a prompt; equal arguments give equal tokens on the same device.

    The model sees the last ``sequence_length`` tokens. It comes back in the mode it was in.

    Args:
        model: the model.
        prompt: at least one token id.
        max_new_tokens: how many tokens to add.
        temperature: 0 takes the likeliest token, 1 samples from the model's own distribution.
        top_k: sample among the k likeliest tokens only; 0 for all.
        seed: of the sampling.

    Returns:
        The new token ids, without the prompt.

    Raises:
        UsageError: CONFIG_INVALID for an empty prompt, a token outside of the vocabulary, or a
            number out of range.
    """
    ids = [int(token) for token in prompt]
    _check(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            window = torch.tensor([ids[-model.config.sequence_length :]], device=device)
            logits = model(window)[0, -1].float()
            ids.append(_sample(logits, temperature, top_k, generator))
    finally:
        model.train(was_training)
    return ids[len(prompt) :]


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature < _GREEDY:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        lowest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, -math.inf)
    probabilities = (logits / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _check(
    model: Transformer,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> None:
    vocab_size = model.config.vocab_size
    if not prompt:
        raise UsageError(Reason.CONFIG_INVALID, "the prompt is empty; give at least one character")
    if not all(0 <= token < vocab_size for token in prompt):
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"the prompt has tokens outside of the model's vocabulary of {vocab_size}; "
            "use the tokenizer that is saved beside the model",
        )
    if max_new_tokens < 0:
        raise UsageError(
            Reason.CONFIG_INVALID, f"max_new_tokens is {max_new_tokens}; it must be at least 0"
        )
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise UsageError(
            Reason.CONFIG_INVALID, f"temperature is {temperature}; it must be at least 0"
        )
    if top_k < 0:
        raise UsageError(Reason.CONFIG_INVALID, f"top_k is {top_k}; it must be at least 0")
    if not 0 <= seed < 1 << 63:
        raise UsageError(Reason.CONFIG_INVALID, f"seed is {seed}; it must be from 0 to 2^63 - 1")
