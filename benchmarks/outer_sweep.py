"""Sweep of outer learning rate and momentum: the evidence behind their defaults.

One process simulates M learners and the synchronizer in lock-step (participation 1, H exact) with
the layout, the codecs and the merge that the synchronizer runs. A byte-level transformer of 0.1M
parameters trains on English text of the standard library; the M learners are one batched model.

    python benchmarks/outer_sweep.py                  # the whole sweep, about 20 minutes on a core
    python benchmarks/outer_sweep.py --quick          # two settings, short

Every finished run is written at once to benchmarks/proofs/outer-sweep.json and .md; a second call
with the same configuration goes on from there.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import platform
import pydoc_data.topics
import sysconfig
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.layout import Fragment, Layout, Role, Strategy, TensorSpec, build_layout
from synchronizer_server.core.weights import contribution_weight
from synchronizer_server.merge.accumulate import Accumulator, Granularity, MergeMethod
from synchronizer_server.merge.fragment_state import FragmentState, advance
from synchronizer_server.merge.outer import OuterSettings
from synchronizer_server.merge.validate import check_outer_gradient

PROOFS = Path(__file__).parent / "proofs"
BLOCK_BYTES = 4096
HELD_OUT_EVERY = 20
NUM_HELD_OUT_WINDOWS = 512
LONG = 1200
STOCK = (0.7, 0.9)
NEAR = 0.01


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training. ``body`` is the merge of all but the embedding, which is averaged."""

    kind: str = "decoupled"
    learning_rate: float = 1.0
    momentum: float = 0.0
    body: str = "rda"
    num_steps: int = 600
    seed: int = 0

    @property
    def key(self) -> str:
        outer = f"/{self.body}/lr{self.learning_rate}/mu{self.momentum}"
        name = self.kind + (outer if self.kind == "decoupled" else "")
        return f"{name}/T{self.num_steps}/seed{self.seed}"


Results = list[tuple[Run, float]]


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


class Synchronizer:
    """The synchronizer's side of lock-step rounds, and what it does to the learners' tensors."""

    def __init__(self, config: Config, run: Run, initial: dict[str, Tensor]) -> None:
        self.layout = make_layout(config, initial)
        self.codec = get_codec(config.codec)
        self.outer = OuterSettings(
            learning_rate=run.learning_rate, momentum=run.momentum, nesterov=True
        )
        self.body = MergeMethod(run.body)
        self.states = [
            FragmentState.seeded(torch.cat([initial[p.tensor].flatten() for p in f.pieces]))
            for f in self.layout.fragments
        ]
        self.in_flight: deque[tuple[int, int]] = deque()

    def merge(self, step: int, learners: dict[str, Tensor], tokens_per_step: int) -> None:
        """Round ``step``: pulls the fragment that is due from all learners and commits it."""
        index = (step - 1) % self.layout.num_fragments
        fragment, state = self.layout.fragments[index], self.states[index]
        method = MergeMethod.AVERAGE if fragment.role is Role.EMBEDDING else self.body
        accumulator = Accumulator(fragment.pieces, method, Granularity.TENSOR)
        local = torch.cat([learners[p.tensor].flatten(1) for p in fragment.pieces], dim=1)
        for row in local:
            payload = self.codec.encode(state.published - row)
            vector = self.codec.decode(payload, fragment.num_elements)
            check_outer_gradient(vector, num_elements=fragment.num_elements)
            accumulator.add(vector, contribution_weight(tokens_per_step, 1))
        self.states[index], _ = advance(state, accumulator.result(), self.outer, self.codec)
        self.in_flight.append((step, index))

    def apply_due(self, step: int, overlap: int, learners: dict[str, Tensor]) -> None:
        """Overwrites the fragments whose update has travelled for ``overlap`` steps."""
        while self.in_flight and self.in_flight[0][0] + overlap <= step:
            _, index = self.in_flight.popleft()
            for name, values in self._tensors(self.layout.fragments[index]):
                learners[name].copy_(values.expand_as(learners[name]))

    def published(self) -> dict[str, Tensor]:
        """The published copy of the whole model."""
        return {n: v for f in self.layout.fragments for n, v in self._tensors(f)}

    def _tensors(self, fragment: Fragment) -> Iterator[tuple[str, Tensor]]:
        published = self.states[fragment.index].published
        for piece, offset in zip(fragment.pieces, fragment.offsets, strict=True):
            yield piece.tensor, published[offset : offset + piece.num_elements].view(piece.shape)


def learning_rate_at(config: Config, step: int, num_steps: int) -> float:
    """Inner learning rate: linear warm-up, then cosine."""
    warmup = max(1, round(config.warmup_share * num_steps))
    if step <= warmup:
        return config.inner_learning_rate * step / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))
    return config.inner_learning_rate * (config.final_share + (1 - config.final_share) * cosine)


def sample(config: Config, data: Data, run: Run, generator: torch.Generator) -> Tensor:
    """Windows [models, batch, context + 1], each learner's from its own shard."""
    limit = data.shards.shape[1] - config.context - 1
    starts = torch.randint(limit, (config.num_learners, config.batch), generator=generator)
    index = starts[:, :, None] + torch.arange(config.context + 1)
    windows = data.shards.gather(1, index.flatten(1)).view(index.shape).long()
    if run.kind == "data-parallel":
        return windows.view(1, -1, config.context + 1)
    return windows[:1] if run.kind == "one-learner" else windows


def train(config: Config, run: Run, data: Data) -> float:
    """Trains once; returns the held-out loss of the published copy (or of the only model)."""
    initial = initial_parameters(config, run.seed)
    num_models = config.num_learners if run.kind == "decoupled" else 1
    learners = {n: t.expand(num_models, *t.shape).clone() for n, t in initial.items()}
    for tensor in learners.values():
        tensor.requires_grad_()
    # One decay rule for all tensors, and element-wise AdamW: stacked learners stay independent.
    inner = torch.optim.AdamW(
        learners.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )
    synchronizer = Synchronizer(config, run, initial) if run.kind == "decoupled" else None
    generator = torch.Generator().manual_seed(run.seed + 1)
    for step in range(1, run.num_steps + 1):
        inner.param_groups[0]["lr"] = learning_rate_at(config, step, run.num_steps)
        inner.zero_grad()
        loss = losses(config, learners, sample(config, data, run, generator)).sum()
        torch.autograd.backward(loss)
        inner.step()
        if synchronizer is not None:
            with torch.no_grad():
                synchronizer.apply_due(step, config.overlap, learners)
                synchronizer.merge(step, learners, config.batch * config.context)
    if synchronizer is not None:
        return held_out_loss(config, synchronizer.published(), data)
    return held_out_loss(config, {n: t[0] for n, t in learners.items()}, data)


def plan(quick: bool) -> list[Run]:
    """Runs in order of worth: finalists (two seeds), longer horizon, grid, second seed."""
    if quick:
        short = Run(num_steps=96)
        return [short, replace(short, learning_rate=0.7, momentum=0.9)]
    rates = {
        0.0: (1.0, 0.3, 0.6, 0.8, 1.3),
        0.4: (0.6, 0.3, 0.8, 1.0),
        0.7: (0.3, 0.6, 0.8, 1.0),
        0.9: (0.2, 0.1, 0.3, 0.4, 0.6, 0.7, 0.8, 1.0),
    }
    grid = [Run(learning_rate=lr, momentum=mu) for mu, lrs in rates.items() for lr in lrs]
    references = [Run(kind="data-parallel"), Run(kind="one-learner"), Run(body="average")]
    finalists = [
        Run(learning_rate=lr, momentum=mu)
        for lr, mu in ((1.0, 0.0), (0.8, 0.4), STOCK, (0.6, 0.4), (0.3, 0.7), (0.2, 0.9))
    ]
    longer = [replace(run, num_steps=LONG) for run in (*finalists, references[0])]
    core = finalists + references + [replace(run, seed=1) for run in finalists]
    everything = core + longer + grid + [replace(run, seed=1) for run in grid + references]
    return list(dict.fromkeys(everything))


def describe(run: Run) -> str:
    """Name of a run's setting in the table, without its seed and length."""
    if run.kind != "decoupled":
        return run.kind.replace("-", " ")
    merge = "RDA" if run.body == "rda" else "averaging"
    return f"{merge}, lr {run.learning_rate}, momentum {run.momentum}"


def table(results: Results, num_steps: int) -> list[str]:
    """Markdown table of one horizon, best first by the first seed, which every setting has."""
    rows: dict[str, dict[int, float]] = {}
    for run, loss in results:
        if run.num_steps == num_steps:
            rows.setdefault(describe(run), {})[run.seed] = loss
    seeds = sorted({seed for by_seed in rows.values() for seed in by_seed})
    lines = [
        "| setting | " + " | ".join(f"seed {seed}" for seed in seeds) + " |",
        "|---|" + "---|" * len(seeds),
    ]
    for name, by_seed in sorted(rows.items(), key=lambda item: item[1].get(seeds[0], math.inf)):
        cells = [f"{by_seed[seed]:.3f}" if seed in by_seed else "-" for seed in seeds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def conclusion(results: Results, num_steps: int) -> str:
    """Which default one horizon supports; compares means over the same seeds only."""
    losses_of: dict[tuple[float, float], list[float]] = {}
    for run, loss in results:
        if run.num_steps == num_steps and run.kind == "decoupled" and run.body == "rda":
            losses_of.setdefault((run.learning_rate, run.momentum), []).append(loss)
    num_seeds = max((len(values) for values in losses_of.values()), default=0)
    means = {key: mean(values) for key, values in losses_of.items() if len(values) == num_seeds}
    if len(means) < 2:
        return "Too few runs for a conclusion."
    best = min(means, key=means.__getitem__)
    text = (
        f"Supports learning rate {best[0]}, momentum {best[1]}: mean {means[best]:.3f} over "
        f"{num_seeds} seed(s), the lowest of the {len(means)} RDA settings with that many seeds."
    )
    for key in sorted(means, key=means.__getitem__):
        if key != best and (means[key] <= (1 + NEAR) * means[best] or key == STOCK):
            pairs = zip(losses_of[key], losses_of[best], strict=True)
            num_worse = sum(loss > least for loss, least in pairs)
            text += (
                f" {key[0]}/{key[1]}: {means[key] / means[best] - 1:+.1%}, worse in {num_worse} "
                f"of {num_seeds}."
            )
    return text


def write(
    config: Config, facts: dict[str, Any], results: Results, missing: list[Run], to: Path
) -> None:
    """Writes JSON and Markdown; the Markdown says nothing that is not in the JSON."""
    runs = [asdict(run) | {"held_out_nats_per_byte": round(loss, 5)} for run, loss in results]
    document = {"config": asdict(config), "facts": facts, "runs": runs}
    to.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [
        "# Outer learning rate and momentum",
        "",
        "Held-out nats per byte of the published copy (data parallel, one learner: of the model).",
        f"M = {config.num_learners}, P = H = {facts['num_fragments']}, tau = {config.overlap}, "
        f"alpha = 0, lock-step (participation 1), {config.codec} up and down with residual; "
        f"embedding averaged, rest as stated per tensor, Nesterov. Batch {config.batch} x "
        f"{config.context} bytes per learner, {facts['num_parameters']} parameters, "
        f"{facts['text_bytes']} bytes of text, AdamW at {config.inner_learning_rate} with cosine. "
        "Data parallel: one model, the learners' batches together. "
        "Made by `python benchmarks/outer_sweep.py`; figures of one Python version's text.",
        "",
        "These short runs rank outer settings against one another; they are no claim about final "
        "quality, and longer horizons may rank them otherwise.",
    ]
    for num_steps in sorted({run.num_steps for run, _ in results}):
        ratio = num_steps / facts["num_fragments"]
        lines += ["", f"## T = {num_steps} (T/H = {ratio:.0f})", "", *table(results, num_steps)]
        lines += ["", conclusion(results, num_steps)]
    if missing:
        names = "; ".join(f"{describe(run)}, T {run.num_steps}, seed {run.seed}" for run in missing)
        lines += ["", f"Planned and not run ({len(missing)}): {names}."]
    to.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")


def earlier_results(config: Config, facts: dict[str, Any], path: Path) -> Results:
    """Results of an earlier call, where it had the same configuration and text."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    if document["config"] != asdict(config) or document["facts"] != facts:
        return []
    losses_ = [run.pop("held_out_nats_per_byte") for run in document["runs"]]
    return [(Run(**run), loss) for run, loss in zip(document["runs"], losses_, strict=True)]


@click.command()
@click.option("--quick", is_flag=True, help="Two settings, 96 steps.")
@click.option("--minutes", default=20.0, show_default=True, help="Start no run after this time.")
@click.option("--out", type=click.Path(path_type=Path), default=PROOFS / "outer-sweep")
def main(quick: bool, minutes: float, out: Path) -> None:
    """Sweeps outer learning rate and momentum on one core."""
    torch.set_num_threads(1)
    config = Config()
    data = load_data(config)
    layout = make_layout(config, initial_parameters(config, 0))
    facts = {
        "num_parameters": layout.num_parameters,
        "num_fragments": layout.num_fragments,
        "text_bytes": data.num_bytes,
        "text_sha256": data.digest,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    results = earlier_results(config, facts, out.with_suffix(".json"))
    done = {run.key for run, _ in results}
    started = time.monotonic()
    runs = plan(quick)
    for run in runs:
        if run.key in done:
            continue
        if time.monotonic() - started > 60 * minutes:
            print(f"stopped after {minutes} minutes; call again to go on", flush=True)
            break
        run_started = time.monotonic()
        loss = train(config, run, data)
        print(f"{run.key}: {loss:.4f} ({time.monotonic() - run_started:.0f} s)", flush=True)
        results.append((run, loss))
        done.add(run.key)
        write(config, facts, results, [run for run in runs if run.key not in done], out)
    # Once more, for the text may have changed since the earlier results were written.
    write(config, facts, results, [run for run in runs if run.key not in done], out)
    for num_steps in sorted({run.num_steps for run, _ in results}):
        print("", *table(results, num_steps), conclusion(results, num_steps), sep="\n")


if __name__ == "__main__":
    main()
