"""What learner and evaluator build alike from the served settings: corpus and model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.settings import RunSettings
from learner_client.run_info import wait_for_settings
from learner_client.train.corpus import Corpus, open_corpus
from learner_client.train.model import ModelConfig, Transformer, build_model
from learner_client.train.settings import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run as a process of the trainer sees it.

    Attributes:
        run: settings of the run, as served.
        trainer: settings of the trainer, as served.
        corpus: the run's corpus.
        config: the model's shape.
    """

    run: RunSettings
    trainer: TrainSettings
    corpus: Corpus
    config: ModelConfig

    def build_model(self) -> Transformer:
        """Builds the model; the seed of the run gives every process the same one."""
        return build_model(self.config, self.trainer.seed)


def load_setup(address: str, run_dir: Path, *, timeout_s: float, insecure: bool) -> Setup:
    """Asks the synchronizer for the settings and opens what they name.

    Raises:
        UsageError: CONFIG_CONFLICT where the run is not for this trainer; DATA_MISSING or
            DATA_MISMATCH for the corpus.
        DilocoError: UNAVAILABLE where nobody answered in time.
    """
    run = wait_for_settings(address, timeout_s=timeout_s, insecure=insecure)
    if not run.trainer_json:
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            f"run {run.run_id!r} serves no trainer settings: it is for a training loop of your "
            "own; start the synchronizer with --trainer-json-file for the shipped trainer",
        )
    trainer = TrainSettings.from_json(run.trainer_json)
    corpus = open_corpus(run_dir / "data", trainer.corpus_hash or None)
    config = ModelConfig.from_preset(
        trainer.preset,
        vocab_size=corpus.info.vocab_size,
        sequence_length=trainer.sequence_length,
    )
    return Setup(run=run, trainer=trainer, corpus=corpus, config=config)
