"""The trained model on disk: ``model.safetensors`` and ``config.json``.

``config.json`` is that of a Llama checkpoint, with what this project needs on top under the
key ``decoupled_diloco``: the model configuration, the tokenizer, the checksum of the tensors
and the run's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from decoupled_diloco.errors import Reason, UsageError
from learner_client.files import sha256_of, storage_errors, write_atomically
from learner_client.train.model import ModelConfig, Transformer
from learner_client.train.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

FORMAT_VERSION: Final = 1
MODEL_FILE: Final = "model.safetensors"
CONFIG_FILE: Final = "config.json"
_SECTION: Final = "decoupled_diloco"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What ``load_model`` returns.

    Attributes:
        model: in evaluation mode, on the CPU, fp32.
        config: its shape.
        tokenizer: what makes its tokens.
        metadata: what ``export_model`` was given.
    """

    model: Transformer
    config: ModelConfig
    tokenizer: Tokenizer
    metadata: dict[str, Any]


def export_model(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    directory: Path,
    *,
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
) -> None:
    """Writes a model so that ``load_model`` and readers of Llama checkpoints can load it.

    Each file appears whole or not at all; ``config.json`` comes last and names the checksum of
    the tensors, so that a half-written export is noticed.

    Args:
        state: every parameter by name, once (tied ones under the embedding's name).
        config: the model's shape.
        directory: created where missing; an older export in it is replaced.
        tokenizer: saved beside the model.
        metadata: facts of the run (run id, global step, losses, ...), as JSON values.

    Raises:
        UsageError: LAYOUT_MISMATCH when names or shapes are not those of ``config``.
        DilocoError: DISK_FULL, STORAGE_FAILED.
    """
    problem = _first_difference(state, config)
    if problem:
        raise UsageError(
            Reason.LAYOUT_MISMATCH,
            f"these parameters are not of the model to export: {problem}; "
            "export with the configuration that the run has",
        )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with storage_errors(directory, "creating"):
        directory.mkdir(parents=True, exist_ok=True)
    write_atomically(
        directory / MODEL_FILE,
        lambda path: safetensors.torch.save_file(tensors, path, metadata={"format": "pt"}),
    )
    with storage_errors(directory / TOKENIZER_FILE, "writing"):
        tokenizer.save(directory)
    section = {
        "format_version": FORMAT_VERSION,
        "model": json.loads(config.to_json()),
        "model_sha256": sha256_of(directory / MODEL_FILE),
        "tokenizer": tokenizer.name,
        "metadata": dict(metadata),
    }
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    content = json.dumps({**_llama(config, dtype), _SECTION: section}, indent=2) + "\n"
    write_atomically(directory / CONFIG_FILE, lambda path: _write_text(path, content))


def _write_text(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")


def _llama(config: ModelConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": config.sequence_length,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _first_difference(state: Mapping[str, Tensor], config: ModelConfig) -> str:
    with torch.device("meta"):
        expected = {
            name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()
        }
    for name, shape in expected.items():
        if name not in state:
            return f"tensor {name} is missing"
        if tuple(state[name].shape) != shape:
            return f"tensor {name} has shape {tuple(state[name].shape)} where {shape} belongs"
    extra = next((name for name in state if name not in expected), None)
    return f"tensor {extra} does not belong to it" if extra else ""


def load_model(directory: Path) -> LoadedModel:
    """Loads an exported model and verifies its checksum. Nothing in it is executed.

    Raises:
        UsageError: RUN_NOT_FOUND when a file is missing, CONFIG_INVALID when ``config.json``
            is not of this project or of another format, STORE_CORRUPT when the tensors are
            damaged, LAYOUT_MISMATCH when they are not of the configuration; see also
            ``load_tokenizer``.
        DilocoError: STORAGE_FAILED.
    """
    for name in (CONFIG_FILE, MODEL_FILE):
        if not (directory / name).is_file():
            raise UsageError(
                Reason.RUN_NOT_FOUND,
                f"no exported model in {directory}: {name} is missing; "
                "give the model folder of a finished run",
                path=directory,
            )
    section = _read_section(directory / CONFIG_FILE)
    config = ModelConfig.from_json(json.dumps(section["model"]))
    state = _read_tensors(directory / MODEL_FILE, section["model_sha256"])
    problem = _first_difference(state, config)
    if problem:
        raise UsageError(
            Reason.LAYOUT_MISMATCH,
            f"{directory / MODEL_FILE} does not fit {CONFIG_FILE}: {problem}; export it again",
            path=directory,
        )
    model = Transformer(config)
    model.load_state_dict(state, strict=True)
    return LoadedModel(
        model=model.eval(),
        config=config,
        tokenizer=load_tokenizer(section["tokenizer"], directory),
        metadata=section["metadata"],
    )


def _read_section(path: Path) -> dict[str, Any]:
    """Reads and checks this project's part of ``config.json``."""
    try:
        with storage_errors(path, "reading"):
            section = json.loads(path.read_text(encoding="utf-8"))[_SECTION]
        known = section["format_version"] == FORMAT_VERSION
        texts = all(type(section[key]) is str for key in ("model_sha256", "tokenizer"))
        well_formed = (
            known and texts and all(isinstance(section[key], dict) for key in ("model", "metadata"))
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _foreign(path) from error
    if not well_formed:
        raise _foreign(path)
    return dict(section)


def _foreign(path: Path) -> UsageError:
    return UsageError(
        Reason.CONFIG_INVALID,
        f"{path} was not written by this version of diloco (section '{_SECTION}', format "
        f"{FORMAT_VERSION}, is missing or damaged); give the model folder of a finished run",
        path=path,
    )


def _read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    with storage_errors(path, "reading"):
        intact = sha256_of(path) == sha256
    if intact:
        try:
            state: dict[str, Tensor] = safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError):
            intact = False
        else:
            return state
    raise UsageError(
        Reason.STORE_CORRUPT,
        f"{path} is damaged: its bytes are not those that {CONFIG_FILE} records; "
        "copy or export the model again",
        path=path,
    )
