"""The evaluator: watches a run, measures the published copy, exports the model at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncIterator

from decoupled_diloco.errors import EXIT_DRAINED, EXIT_OK
from decoupled_diloco.journal import Journal
from decoupled_diloco.layout import Layout, Strategy, build_layout
from learner_client.core.leadership import Move
from learner_client.dialling import search_for
from learner_client.observer import Observer, Published
from learner_client.parameters import ModuleParameters
from learner_client.settings import EvaluatorSettings
from learner_client.train.device import resolve_device
from learner_client.train.evaluate import EvaluationResult, evaluate
from learner_client.train.export import export_model
from learner_client.train.setup import Setup, load_setup
from learner_client.train.stopping import StopRequest

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 300.0


class Evaluator:
    """Measures the published copy of one run.

    Args:
        setup: the run.
        settings: settings of this process.
        metrics: takes a line per evaluation.
    """

    def __init__(self, setup: Setup, settings: EvaluatorSettings, metrics: Journal) -> None:
        self._setup = setup
        self._settings = settings
        self._metrics = metrics
        self._model = setup.build_model().to(resolve_device(settings.device))
        self._parameters = ModuleParameters(self._model)
        run = self.run = setup.run
        self.layout: Layout = build_layout(
            self._parameters.tensors,
            strategy=Strategy(run.strategy),
            num_fragments=run.num_fragments,
            overlap=run.overlap,
        )
        self._measured: int | None = None
        self._first: EvaluationResult | None = None
        self._last: EvaluationResult | None = None

    def due(self, published: Published) -> bool:
        """Whether this copy is to be measured: the first, every N global steps, the last."""
        if self._measured is None or self.complete(published):
            return True
        return published.global_step >= self._measured + self._settings.every

    def complete(self, published: Published) -> bool:
        """Whether this is the copy at the end of the run."""
        total = self._setup.run.total_global_steps
        return total > 0 and published.global_step >= total

    def measure(self, published: Published) -> EvaluationResult:
        """Evaluates a published copy on held-out text."""
        for fragment, vector in zip(self.layout.fragments, published.vectors, strict=True):
            self._parameters.write_fragment(fragment, vector)
        result = self._evaluate()
        self._measured = published.global_step
        self._first = self._first or result
        self._last = result
        self._record(published.global_step, result)
        return result

    def measure_seed(self, *, known: bool) -> None:
        """Measures what the run began with, where its copy came and went before this process.

        Nothing was written into the model yet, and every process of a run builds the same one.

        Args:
            known: an earlier life has recorded it.
        """
        assert self._measured is None, "the model is as it was built"
        self._first = self._evaluate()
        if not known:
            self._record(0, self._first)

    def _evaluate(self) -> EvaluationResult:
        return evaluate(
            self._model,
            self._setup.corpus.held_out,
            sequence_length=self._setup.trainer.sequence_length,
            max_tokens=self._settings.max_tokens,
        )

    def _record(self, global_step: int, result: EvaluationResult) -> None:
        self._metrics.write(
            "evaluation",
            global_step=global_step,
            loss=result.loss,
            num_tokens=result.num_tokens,
        )
        logger.info(
            "global step %d: %.4f nats per token on held-out text", global_step, result.loss
        )

    def moved(self, move: Move) -> None:
        """Records that another synchronizer is watched."""
        self._metrics.write("moved", **dataclasses.asdict(move))

    def export(self, published: Published) -> None:
        """Measures the last copy, if that was not done, and writes the model."""
        if self._measured != published.global_step:
            self.measure(published)
        assert self._first is not None, "measured"
        assert self._last is not None, "measured"
        aliases = {name for tensor in self.layout.tensors for name in tensor.aliases}
        names = {t.name for t in self.layout.tensors}
        state = {
            name: tensor
            for name, tensor in self._model.state_dict().items()
            if name in names and name not in aliases
        }
        folder = self._settings.run_dir / "model"
        export_model(
            state,
            self._setup.config,
            folder,
            tokenizer=self._setup.corpus.tokenizer(),
            metadata={
                "run_id": self._setup.run.run_id,
                "global_step": published.global_step,
                "evaluation_loss_before": self._first.loss,
                "evaluation_loss_after": self._last.loss,
                "corpus_hash": self._setup.corpus.info.hash,
            },
        )
        self._metrics.write("export", global_step=published.global_step, folder=str(folder))
        logger.info("the model is in %s", folder)


async def _follow(observer: Observer, stop: StopRequest) -> AsyncIterator[Published | None]:
    """Yields published copies; None once the process is asked to stop."""
    copies = aiter(observer.follow())
    while True:
        reading = asyncio.ensure_future(anext(copies))
        while not reading.done():
            await asyncio.wait({reading}, timeout=0.2)
            if stop.is_set() and not reading.done():
                reading.cancel()
                yield None
                return
        yield reading.result()


async def _run(
    evaluator: Evaluator, settings: EvaluatorSettings, stop: StopRequest, *, seed_known: bool
) -> int:
    stop.heed()
    search = search_for(
        settings.address,
        name="evaluator",
        run_id=evaluator.run.run_id,
        insecure=settings.insecure,
        on_move=evaluator.moved,
    )
    newest: Published | None = None
    try:
        observer = Observer(search, evaluator.layout, evaluator.run, name="evaluator")
        async for published in _follow(observer, stop):
            if published is None:
                break
            if newest is None and published.global_step > 0:
                await asyncio.to_thread(evaluator.measure_seed, known=seed_known)
            newest = published
            if evaluator.due(published):
                await asyncio.to_thread(evaluator.measure, published)
            if settings.once or evaluator.complete(published):
                await asyncio.to_thread(evaluator.export, published)
                return EXIT_OK
    finally:
        await search.transport.aclose()
    if newest is not None:
        evaluator.export(newest)
    return EXIT_DRAINED


def run_evaluator(settings: EvaluatorSettings, stop: StopRequest) -> int:
    """Runs the evaluator until the run is complete, or until it is asked to stop.

    In both cases the newest published copy is exported; with ``once``, the first that it sees is.
    Returns the exit code.

    Raises:
        DilocoError: why it cannot watch or export.
    """
    # One that exports once runs beside the evaluator: a file has one writer.
    name = "export" if settings.once else "evaluator"
    path = settings.run_dir / "metrics" / f"{name}.jsonl"
    seed_known = path.exists() and '"kind": "evaluation"' in path.read_text(errors="replace")
    metrics = Journal(path)
    try:
        metrics.write("start", pid=os.getpid())
        setup = load_setup(
            settings.address,
            settings.run_dir,
            timeout_s=_JOIN_TIMEOUT_S,
            insecure=settings.insecure,
        )
        evaluator = Evaluator(setup, settings, metrics)
        return asyncio.run(_run(evaluator, settings, stop, seed_known=seed_known))
    finally:
        metrics.close()
