"""Settings of the trainer: they belong to the run, and the synchronizer serves them to all."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from decoupled_diloco.errors import Reason, UsageError
from learner_client.train.presets import preset_named
from learner_client.train.tokenizer import BYTES

PRECISIONS: Final = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What every learner of a run does alike. The defaults fit CPU cores shared by a few.

    Attributes:
        preset: size of the model, see ``presets.PRESETS``.
        sequence_length: tokens per sequence.
        batch_size: sequences per inner step.
        learning_rate: peak of the inner learning rate.
        warmup_steps: global steps of linear warm-up.
        min_learning_rate_ratio: learning rate at the end, as a share of the peak.
        weight_decay: of AdamW, for matrices.
        beta1: of AdamW.
        beta2: of AdamW.
        gradient_clip: largest norm of an inner gradient; 0 for no clipping.
        precision: ``fp32``, or ``bf16`` for autocast over fp32 parameters.
        seed: of initialisation and data order.
        tokenizer: ``bytes``, or the path of a Hugging Face tokenizer.json.
        total_global_steps: length of the schedule.
        num_shards: planned learners; each trains on a shard of its own.
        corpus_hash: hash of the run's corpus; empty until it is written.

    Raises:
        UsageError: CONFIG_INVALID for one value, CONFIG_CONFLICT for values at odds.
    """

    preset: str = "tiny"
    sequence_length: int = 128
    batch_size: int = 6
    learning_rate: float = 3e-3
    warmup_steps: int = 40
    min_learning_rate_ratio: float = 0.05
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_clip: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    tokenizer: str = BYTES
    total_global_steps: int = 800
    num_shards: int = 4
    corpus_hash: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_type(field.name, str(field.type))
        preset_named(self.preset)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise _invalid(name, value, f"a number from {low:g} to {high:g}")
        if self.learning_rate == 0.0:
            raise _invalid("learning_rate", self.learning_rate, "a number above 0")
        if self.precision not in PRECISIONS:
            raise _invalid("precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        if not self.tokenizer:
            raise _invalid("tokenizer", self.tokenizer, f"'{BYTES}' or a path")
        if self.warmup_steps >= self.total_global_steps:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"warmup_steps {self.warmup_steps} must be below total_global_steps "
                f"{self.total_global_steps}: shorten the warm-up or lengthen the run",
            )

    def _check_type(self, name: str, kind: str) -> None:
        value = getattr(self, name)
        if kind == "str":
            if type(value) is not str:
                raise _invalid(name, value, "a text")
        elif kind == "int":
            if type(value) is not int:
                raise _invalid(name, value, "a whole number")
        elif type(value) not in {int, float} or not -1e300 < value < 1e300:
            raise _invalid(name, value, "a finite number")

    def to_json(self) -> str:
        """Returns a JSON object with every setting."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainSettings:
        """Reads what ``to_json`` wrote; a setting that is left out has its default.

        Raises:
            UsageError: CONFIG_INVALID for what is no JSON object or a bad value,
                CONFIG_UNKNOWN_KEY with the nearest name, CONFIG_CONFLICT.
        """
        try:
            values: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                Reason.CONFIG_INVALID, f"training settings are not JSON: {error}"
            ) from error
        if not isinstance(values, dict):
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"training settings are a JSON {type(values).__name__} where an object belongs",
            )
        return cls.from_mapping(values)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainSettings:
        """Builds settings from names and values; what is left out has its default.

        Raises:
            UsageError: as ``from_json``.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
                raise UsageError(
                    Reason.CONFIG_UNKNOWN_KEY,
                    f"there is no training setting '{key}'; {hint}",
                    key=key,
                )
        return cls(**values)


_RANGES: Final = (
    ("sequence_length", 2, 1 << 20),
    ("batch_size", 1, 1 << 20),
    ("learning_rate", 0.0, 10.0),
    ("warmup_steps", 0, 1 << 40),
    ("min_learning_rate_ratio", 0.0, 1.0),
    ("weight_decay", 0.0, 10.0),
    ("beta1", 0.0, 0.9999),
    ("beta2", 0.0, 0.999999),
    ("gradient_clip", 0.0, 1e6),
    ("seed", 0, (1 << 63) - 1),
    ("total_global_steps", 1, 1 << 40),
    ("num_shards", 1, 1 << 20),
)


def _invalid(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(
        Reason.CONFIG_INVALID, f"{name} is {value!r}; it must be {wanted}", setting=name
    )
