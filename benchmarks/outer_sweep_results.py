"""Results of the outer sweep: their form, the tables and what they support, and their files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.toy_model import Config

STOCK = (0.7, 0.9)
NEAR = 0.01


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
        "Made by `make proof-outer-sweep`; figures of one Python version's text.",
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
