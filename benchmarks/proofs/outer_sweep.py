"""Sweep of outer learning rate and momentum: the evidence behind their defaults.

One process simulates M learners and the synchronizer in lock-step (participation 1, H exact) with
the layout, the codecs and the merge that the synchronizer runs. A byte-level transformer of 0.1M
parameters trains on English text of the standard library; the M learners are one batched model.
Every finished run is written at once to outer-sweep.json and outer-sweep.md beside this file; a
second call with the same configuration, text, Python and torch goes on from there, any other
starts anew.

    make proof-outer-sweep                      # the whole sweep, about 20 minutes on a core
    make proof-outer-sweep ARGS=--quick         # two settings, short
    make proof-outer-sweep ARGS="--minutes 0"   # no run; writes the .md anew from the .json
"""

from __future__ import annotations

import math
import platform
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.outer_sweep_results import STOCK, Run, conclusion, earlier_results, table, write
from benchmarks.toy_model import (
    Config,
    Data,
    held_out_loss,
    initial_parameters,
    load_data,
    losses,
    make_layout,
)
from decoupled_diloco.codecs import get_codec
from decoupled_diloco.layout import Fragment, Role
from synchronizer_server.core.weights import contribution_weight
from synchronizer_server.merge.accumulate import Accumulator, Granularity, MergeMethod
from synchronizer_server.merge.fragment_state import FragmentState, advance
from synchronizer_server.merge.outer import OuterSettings
from synchronizer_server.merge.validate import check_outer_gradient

HERE = Path(__file__).parent
LONG = 1200


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
        for lr, mu in (
            (1.0, 0.0),
            (0.8, 0.4),
            STOCK,
            (0.6, 0.4),
            (0.6, 0.7),
            (0.3, 0.7),
            (0.2, 0.9),
        )
    ]
    longer = [replace(run, num_steps=LONG) for run in (*finalists, references[0])]
    core = finalists + references + [replace(run, seed=1) for run in finalists]
    everything = core + longer + grid + [replace(run, seed=1) for run in grid + references]
    return list(dict.fromkeys(everything))


@click.command()
@click.option("--quick", is_flag=True, help="Two settings, 96 steps.")
@click.option("--minutes", default=20.0, show_default=True, help="Start no run after this time.")
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "outer-sweep")
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
