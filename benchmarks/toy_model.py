"""A byte-level transformer of 0.1M parameters on English text of the standard library.

M models are one: their parameters are stacked and every product is batched.
"""

from __future__ import annotations

import ast
import hashlib
import math
import pydoc_data.topics
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor

from decoupled_diloco.layout import Layout, Role, Strategy, TensorSpec, build_layout

BLOCK_BYTES = 4096
HELD_OUT_EVERY = 20
NUM_HELD_OUT_WINDOWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What all runs of a sweep share."""

    num_learners: int = 4
    num_fragments: int = 24
    overlap: int = 2
    batch: int = 4
    context: int = 64
    width: int = 48
    num_layers: int = 4
    head_size: int = 16
    inner_learning_rate: float = 3e-3
    warmup_share: float = 0.05
    final_share: float = 0.1
    weight_decay: float = 0.1
    codec: str = "bf16"


def standard_library_text() -> bytes:
    """Help topics and the docstrings of the standard library, in a fixed order."""
    texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "test", "tests", "pydoc_data", "lib2to3"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 80:
                    texts.append(text)
    return "\n\n".join(texts).encode()


@dataclass(frozen=True, slots=True)
class Data:
    """One shard of text per learner, and windows of held-out text."""

    shards: Tensor
    held_out: Tensor
    num_bytes: int
    digest: str


def load_data(config: Config) -> Data:
    """Shuffles blocks of text; every 20th is held out, the rest is dealt to the learners."""
    text = standard_library_text()
    num_blocks = len(text) // BLOCK_BYTES
    blocks = torch.frombuffer(bytearray(text[: num_blocks * BLOCK_BYTES]), dtype=torch.uint8)
    blocks = blocks.view(num_blocks, BLOCK_BYTES)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1234))
    held_out = blocks[order[::HELD_OUT_EVERY]].flatten()
    train = blocks[order[torch.arange(num_blocks) % HELD_OUT_EVERY != 0]]
    per_learner = len(train) // config.num_learners
    shards = train[: per_learner * config.num_learners].view(config.num_learners, -1)
    length = config.context + 1
    windows = held_out[: len(held_out) // length * length].view(-1, length).long()
    return Data(
        shards=shards,
        held_out=windows[:: max(1, len(windows) // NUM_HELD_OUT_WINDOWS)][:NUM_HELD_OUT_WINDOWS],
        num_bytes=len(text),
        digest=hashlib.sha256(text).hexdigest(),
    )


def initial_parameters(config: Config, seed: int) -> dict[str, Tensor]:
    """Parameters of one model; the output head is tied to the embedding."""
    generator = torch.Generator().manual_seed(seed)
    width = config.width

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    scale = width**-0.5
    narrow = scale / math.sqrt(2 * config.num_layers)
    parameters = {
        "embed": normal(256, width, 0.5 * scale),
        "position": normal(config.context, width, 0.1 * scale),
    }
    for layer in range(config.num_layers):
        parameters |= {
            f"layers.{layer}.norm1": torch.ones(width),
            f"layers.{layer}.qkv": normal(width, 3 * width, scale),
            f"layers.{layer}.out": normal(width, width, narrow),
            f"layers.{layer}.norm2": torch.ones(width),
            f"layers.{layer}.up": normal(width, 4 * width, scale),
            f"layers.{layer}.down": normal(4 * width, width, narrow / 2),
        }
    return parameters | {"norm": torch.ones(width)}


def make_layout(config: Config, parameters: dict[str, Tensor]) -> Layout:
    """The layout of one model: embedding tables in fragment 0, the rest balanced."""
    specs = [
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype="float32",
            role=Role.EMBEDDING if name in {"embed", "position"} else Role.BODY,
        )
        for name, tensor in parameters.items()
    ]
    return build_layout(
        specs,
        strategy=Strategy.BALANCED,
        num_fragments=config.num_fragments,
        overlap=config.overlap,
    )


def losses(config: Config, parameters: dict[str, Tensor], windows: Tensor) -> Tensor:
    """Mean nats per byte of each of M stacked models.

    ``parameters`` hold [M, *shape]; ``windows`` are bytes [M, batch, context + 1].
    """
    num_models, batch, length = windows.shape
    context, width = length - 1, config.width
    tokens = windows[:, :, :-1].reshape(num_models, -1)
    index = tokens[:, :, None].expand(-1, -1, width)
    x = parameters["embed"].gather(1, index).view(num_models, batch, context, width)
    x = (x + parameters["position"][:, None]).view(num_models, -1, width)

    def normed(name: str, values: Tensor) -> Tensor:
        return F.rms_norm(values, (width,)) * parameters[name][:, None]

    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        qkv = torch.bmm(normed(prefix + "norm1", x), parameters[prefix + "qkv"])
        heads = qkv.view(num_models * batch, context, 3, -1, config.head_size)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(num_models, -1, width)
        x = x + torch.bmm(mixed, parameters[prefix + "out"])
        hidden = F.gelu(torch.bmm(normed(prefix + "norm2", x), parameters[prefix + "up"]))
        x = x + torch.bmm(hidden, parameters[prefix + "down"])
    logits = torch.bmm(normed("norm", x), parameters["embed"].transpose(1, 2))
    targets = windows[:, :, 1:].reshape(-1)
    return (
        F.cross_entropy(logits.view(-1, 256), targets, reduction="none")
        .view(num_models, -1)
        .mean(dim=1)
    )


@torch.no_grad()
def held_out_loss(config: Config, parameters: dict[str, Tensor], data: Data) -> float:
    """Held-out nats per byte of one model."""
    stacked = {name: tensor[None] for name, tensor in parameters.items()}
    parts = data.held_out.view(-1, 128, data.held_out.shape[1])
    return mean(losses(config, stacked, part[None]).item() for part in parts)
