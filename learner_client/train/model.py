"""A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, causal attention, no dropout.

Architecture and parameter names are those of Llama, so that what is exported is an ordinary
Llama checkpoint. Parameters are always fp32; bf16 means autocast for the compute (see
``device.compute_precision``), because outer gradients against bf16 parameters lose small
differences (paper section 12, item 12).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoupled_diloco.errors import Reason, UsageError
from learner_client.train.presets import preset_named

_MAX_COUNTS: Final = {
    "vocab_size": 1 << 24,
    "sequence_length": 1 << 24,
    "num_layers": 1 << 10,
    "hidden_size": 1 << 20,
    "num_heads": 1 << 16,
    "intermediate_size": 1 << 22,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that fixes the model's shape.

    Attributes:
        vocab_size: number of token ids.
        sequence_length: longest input, in tokens, T.
        num_layers: transformer blocks.
        hidden_size: width of the residual stream, D.
        num_heads: attention heads; ``hidden_size / num_heads`` is even.
        intermediate_size: width inside the SwiGLU.
        tie_embeddings: the output head is the input embedding.
        norm_epsilon: added under the root of RMSNorm.
        rope_theta: base of the rotary wavelengths.

    Raises:
        UsageError: CONFIG_INVALID.
    """

    vocab_size: int
    sequence_length: int
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    tie_embeddings: bool = True
    norm_epsilon: float = 1e-5
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name, highest in _MAX_COUNTS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= highest:
                raise _invalid(f"{name} {value!r} is not a whole number from 1 to {highest}")
        if self.hidden_size % (2 * self.num_heads):
            raise _invalid(
                f"hidden_size {self.hidden_size} does not give {self.num_heads} heads of an even "
                "width"
            )
        if type(self.tie_embeddings) is not bool:
            raise _invalid(f"tie_embeddings {self.tie_embeddings!r} is neither true nor false")
        for name in ("norm_epsilon", "rope_theta"):
            value = getattr(self, name)
            if type(value) not in {int, float} or not 0.0 < value < 1e12:
                raise _invalid(f"{name} {value!r} is not a positive number")

    @classmethod
    def from_preset(cls, preset: str, *, vocab_size: int, sequence_length: int) -> ModelConfig:
        """Returns the configuration of a preset for a vocabulary and a sequence length.

        Raises:
            UsageError: CONFIG_INVALID for an unknown preset or sizes out of range.
        """
        size = preset_named(preset)
        return cls(
            vocab_size=vocab_size, sequence_length=sequence_length, **dataclasses.asdict(size)
        )

    def to_json(self) -> str:
        """Returns a JSON object with every field."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Reads what ``to_json`` wrote.

        Raises:
            UsageError: CONFIG_INVALID.
        """
        try:
            values: Any = json.loads(text)
            return cls(**values)
        except UsageError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise _invalid(f"not the JSON of a model configuration ({error})") from error


def _invalid(why: str) -> UsageError:
    return UsageError(
        Reason.CONFIG_INVALID, f"model configuration: {why}; use a preset or correct the value"
    )


class Linear(nn.Linear):
    """A matrix without bias, left as it is in memory until ``build_model`` fills it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing, so that no number of the global random generator is used."""


class Embedding(nn.Embedding):
    """An embedding left as it is in memory until ``build_model`` fills it."""

    def reset_parameters(self) -> None:
        """Does nothing, so that no number of the global random generator is used."""


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.hidden_size)
        self.v_proj = Linear(config.hidden_size, config.hidden_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BTD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps ``[B, T, D]`` to ``[B, T, D]``; position i sees positions up to i."""
        B, T, D = x_BTD.shape
        shape = (B, T, self.num_heads, D // self.num_heads)
        q = _rotate(self.q_proj(x_BTD).view(shape).transpose(1, 2), cosine, sine)
        k = _rotate(self.k_proj(x_BTD).view(shape).transpose(1, 2), cosine, sine)
        v = self.v_proj(x_BTD).view(shape).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out_BTD: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(B, T, D))
        return out_BTD


def _rotate(x_BHTd: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates the halves of each head's vector by its position's angles."""
    first, second = x_BHTd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHTd * cosine + turned * sine).to(x_BHTd.dtype)


class SwiGLU(nn.Module):
    """Gated feed-forward layer: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Maps ``[B, T, D]`` to ``[B, T, D]``."""
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out_BTD


class Block(nn.Module):
    """One transformer block: attention and SwiGLU, each after its norm, each added back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = SwiGLU(config)

    def forward(self, x_BTD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps ``[B, T, D]`` to ``[B, T, D]``."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cosine, sine)
        out_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out_BTD


class Decoder(nn.Module):
    """Embedding, blocks and last norm; a module of its own for the names of its parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        cosine, sine = _rotary_tables(config)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Maps int64 token ids ``[B, T]`` to hidden states ``[B, T, D]``."""
        T = tokens_BT.shape[1]
        cosine, sine = self.get_buffer("cosine")[:T], self.get_buffer("sine")[:T]
        x_BTD: Tensor = self.embed_tokens(tokens_BT)
        for block in self.layers:
            x_BTD = block(x_BTD, cosine, sine)
        hidden_BTD: Tensor = self.norm(x_BTD)
        return hidden_BTD


def _rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    width = config.hidden_size // config.num_heads
    rates = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(config.sequence_length, dtype=torch.float64), rates)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


class Transformer(nn.Module):
    """The language model.

    Tied embeddings are one parameter used twice: there is no ``lm_head`` then.

    Args:
        config: its shape.

    Attributes:
        config: its shape.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = (
            None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Maps int64 token ids ``[B, T]`` to logits ``[B, T, V]`` for the token after each.

        T is at most ``config.sequence_length``.
        """
        assert tokens_BT.shape[1] <= self.config.sequence_length, tokens_BT.shape
        hidden_BTD = self.model(tokens_BT)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden_BTD, head.weight)


def token_loss(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats per token, a scalar fp32 with gradient."""
    logits_BTV = model(inputs_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def build_model(config: ModelConfig, seed: int) -> Transformer:
    """Builds the model on the CPU in fp32; equal arguments give equal parameters, bit for bit.

    Matrices are normal with deviation 1/sqrt(inputs), those that write into the residual
    stream divided by sqrt(2 * num_layers) more, so that its size does not grow with depth; the
    embedding has deviation 0.02, which makes the first loss ln(vocab_size).
    """
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    residual_scale = (2 * config.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            deviation = parameter.shape[1] ** -0.5
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                deviation = 0.02
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation *= residual_scale
            parameter.normal_(0.0, deviation, generator=generator)
    return model


def num_parameters(model: nn.Module) -> int:
    """Returns the number of trainable numbers, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
