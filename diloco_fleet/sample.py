"""Text from a run's model."""

from __future__ import annotations

from pathlib import Path


def sample_text(
    model_folder: Path,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """Loads an exported model and returns the prompt with its continuation.

    Args:
        model_folder: what the evaluator exported.
        prompt: the beginning of the text.
        num_tokens: tokens to add.
        temperature: 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens only; 0 for all.
        seed: of the sampling.

    Raises:
        UsageError: RUN_NOT_FOUND without a model, CONFIG_INVALID for arguments out of range,
            STORE_CORRUPT for a damaged one.
    """
    # torch takes seconds to import; only who samples waits for it.
    import torch

    from learner_client.train.export import load_model
    from learner_client.train.generate import generate

    # One token at a time keeps one thread busy; more of them only fight over shared cores.
    torch.set_num_threads(1)
    loaded = load_model(model_folder)
    ids = generate(
        loaded.model,
        [int(token) for token in loaded.tokenizer.encode(prompt)],
        max_new_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return prompt + loaded.tokenizer.decode(ids)
