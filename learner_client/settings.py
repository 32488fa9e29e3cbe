"""Settings of one process of the shipped trainer; what a run has in common is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.channel import parse_address
from decoupled_diloco.errors import EXIT_TOLD_TO_LEAVE, Reason, UsageError
from decoupled_diloco.setting_fields import setting
from learner_client.addresses import read_addresses
from learner_client.inner_work import RECOVER_MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Where a learner finds its synchronizer, its data and its device.

    Raises:
        UsageError: CONFIG_INVALID, naming the setting.
    """

    address: str = setting(
        "127.0.0.1:50051", "host:port of the synchronizer; of several, separated by commas"
    )
    learner_id: str = setting("", "stable id of this learner; its data shard belongs to it")
    learner_id_file: Path | None = setting(
        None,
        "file that keeps the id where learner_id is empty: read, or written once with a new id; "
        "each learner needs its own",
    )
    run_dir: Path = setting(Path(), "run directory: data/ is read, metrics/ is written")
    device: str = setting("auto", "auto, cpu, cuda or cuda:0")
    snapshots: Path | None = setting(
        None, "directory of the fleet's snapshots, for this learner's parts; none without it"
    )
    resume_from: Path | None = setting(
        None, "part of a snapshot to go on from, where it is there; removed once it has served"
    )
    pace: float = setting(0.0, "shortest time of an inner step, seconds")
    slow: float = setting(1.0, "run at this share of the speed, above 0 and at most 1")
    threads: int = setting(0, "torch threads; 0 leaves it to PyTorch and OMP_NUM_THREADS")
    metrics_address: str | None = setting(
        None, "host:port at which Prometheus scrapes this learner over HTTP; none without it"
    )
    join_timeout_s: float = setting(300.0, "longest wait for the first parameters, seconds")
    recover: str = setting(
        "peer",
        "what a learner that starts has beside the parameters: params (nothing), peer (another "
        "one's optimizer state) or checkpoint (its own, written as it trains)",
    )
    checkpoint_every_s: float = setting(
        60.0, "seconds between two checkpoints, with recover = checkpoint; the disk bears the cost"
    )
    drained_exit_code: int = setting(
        EXIT_TOLD_TO_LEAVE,
        "exit code once an operator has drained this learner; 0 where failures are started again, "
        "whatever their code, as Docker does",
    )
    insecure: bool = setting(False, "allow plaintext beyond loopback")
    log_format: str = setting("text", "text or json")

    def __post_init__(self) -> None:
        check_process(self.address, self.log_format)
        if self.metrics_address is not None:
            parse_address(self.metrics_address)
        if self.recover not in RECOVER_MODES:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"recover is {self.recover!r}; one of {', '.join(RECOVER_MODES)}",
            )
        for name, low, high in (
            ("pace", 0.0, 3600.0),
            ("slow", 1e-6, 1.0),
            ("threads", 0, 4096),
            ("join_timeout_s", 0.1, 1e6),
            ("checkpoint_every_s", 0.0, 1e6),
            ("drained_exit_code", 0, 255),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(
                    Reason.CONFIG_INVALID, f"{name} is {value}; between {low} and {high}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSettings:
    """What the evaluator watches, and how often it measures.

    Raises:
        UsageError: CONFIG_INVALID, naming the setting.
    """

    address: str = setting(
        "127.0.0.1:50051", "host:port of the synchronizer; of several, separated by commas"
    )
    run_dir: Path = setting(Path(), "run directory: data/ is read, metrics/ and model/ are written")
    every: int = setting(50, "global steps between two evaluations")
    once: bool = setting(False, "write the model from the newest published copy, and end")
    max_tokens: int = setting(65536, "held-out tokens per evaluation, at most")
    device: str = setting("cpu", "auto, cpu, cuda or cuda:0")
    insecure: bool = setting(False, "allow plaintext beyond loopback")
    log_format: str = setting("text", "text or json")

    def __post_init__(self) -> None:
        check_process(self.address, self.log_format)
        for name in ("every", "max_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(
                    Reason.CONFIG_INVALID, f"{name} is {getattr(self, name)}; at least 1"
                )


def check_process(address: str, log_format: str) -> None:
    """Checks what every process has.

    Raises:
        UsageError: CONFIG_INVALID.
    """
    read_addresses(address)
    if log_format not in ("text", "json"):
        raise UsageError(Reason.CONFIG_INVALID, f"log_format is {log_format!r}; one of text, json")
