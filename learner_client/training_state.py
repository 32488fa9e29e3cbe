"""The whole state of a training process: enough to go on as if it had never stopped.

A copy is made on the training thread between two steps; it shares no memory with what trains on, so
that another thread may write it. Files are safetensors with a digest; never pickled.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from decoupled_diloco.codecs.base import bytes_of
from decoupled_diloco.errors import DilocoError, Reason, UsageError
from learner_client.checkpoint import saved_state_from
from learner_client.files import storage_errors, write_atomically
from learner_client.inner_state import InnerState

_DIGEST: Final = "sha256"
_PARTS: Final = ("model", "inner", "learner", "rng", "data")
_RNG_WORDS: Final = 624

Tensors = dict[str, torch.Tensor]


class SavedLearner(Protocol):
    """What is asked of a ``Learner``."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See ``Learner.state_dict``."""

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """See ``Learner.load_state_dict``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """A copy of everything that training depends on, on the CPU.

    Attributes:
        model: parameters and persistent buffers by name; tied ones once.
        inner: what ``InnerState.capture`` returned.
        learner: what ``Learner.state_dict`` returned: counters, versions, published copies.
        rng: generators of PyTorch (CPU, and CUDA where it is in use), Python and NumPy.
        data: where the training data goes on, as whole numbers by name.
    """

    model: Tensors
    inner: Tensors
    learner: Tensors
    rng: Tensors
    data: dict[str, int]

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        inner_state: InnerState,
        learner: SavedLearner,
        data: Mapping[str, int],
    ) -> TrainingState:
        """Copies the state. On the training thread, between two steps.

        Args:
            model: the model.
            inner_state: its optimizer's state.
            learner: the learner; it has joined.
            data: where the training data goes on.
        """
        return cls(
            model={name: _on_host(tensor) for name, tensor in _tensors_of(model).items()},
            inner=inner_state.capture(),
            learner=learner.state_dict(),
            rng=_capture_rng(),
            data=dict(data),
        )

    def restore(self, model: nn.Module, inner_state: InnerState, learner: SavedLearner) -> None:
        """Puts the state back, all of it or nothing; before the learner is entered.

        ``data`` is the caller's to put back.

        Raises:
            UsageError: ``LAYOUT_MISMATCH`` or ``CONFIG_INVALID`` where it is of another model,
                optimizer or program; nothing was changed.
        """
        targets = _tensors_of(model)
        _check_model(self.model, targets)
        _check_rng(self.rng)
        saved_state_from(self.learner)
        inner_state.restore(self.inner)
        learner.load_state_dict(self.learner)
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.copy_(self.model[name])
        _restore_rng(self.rng)

    def to_dict(self) -> Tensors:
        """One flat dict of tensors, fit for safetensors."""
        data = {name: torch.tensor(value, dtype=torch.int64) for name, value in self.data.items()}
        parts = zip(_PARTS, (self.model, self.inner, self.learner, self.rng, data), strict=True)
        return {f"{part}.{name}": value for part, items in parts for name, value in items.items()}


def training_state_from(state: Mapping[str, torch.Tensor]) -> TrainingState:
    """Reads what ``TrainingState.to_dict`` made, from anywhere.

    Raises:
        UsageError: ``CONFIG_INVALID`` where it cannot be such a state.
    """
    parts: dict[str, Tensors] = {part: {} for part in _PARTS}
    for full, value in state.items():
        part, _, name = full.partition(".")
        if part not in parts or not name:
            raise _invalid(f"{full!r} is no part of a training state")
        parts[part][name] = value
    for name, value in parts["data"].items():
        if value.dtype != torch.int64 or value.dim() != 0:
            raise _invalid(f"data.{name} is no whole number")
    data = {name: int(value.item()) for name, value in parts.pop("data").items()}
    return TrainingState(**parts, data=data)


def save_training_state(path: Path, state: TrainingState) -> None:
    """Writes a state; a reader sees the file before or the whole new one.

    Args:
        path: the file; its folder exists.
        state: the state.

    Raises:
        DilocoError: ``DISK_FULL`` or ``STORAGE_FAILED``; ``path`` is then untouched.
    """
    tensors = state.to_dict()
    metadata = {_DIGEST: _digest(tensors)}

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    write_atomically(path, write)


def load_training_state(path: Path) -> TrainingState:
    """Reads a state that ``save_training_state`` wrote.

    Raises:
        UsageError: ``CONFIG_INVALID`` where the file is of another kind.
        DilocoError: ``CORRUPT`` where it is damaged, ``STORAGE_FAILED`` where it cannot be read.
    """
    with storage_errors(path, "reading"):
        path.stat()
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise _corrupt(path, str(error)) from None
    if metadata.get(_DIGEST) != _digest(tensors):
        raise _corrupt(path, "its digest does not match")
    return training_state_from(tensors)


def _tensors_of(model: nn.Module) -> Tensors:
    """Parameters and persistent buffers by name, in place; tied ones under their first name."""
    found: Tensors = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _check_model(state: Tensors, targets: Tensors) -> None:
    if state.keys() != targets.keys():
        names = sorted(state.keys() ^ targets.keys())
        raise _mismatch(f"it differs from the model in {', '.join(names[:3])}")
    for name, tensor in targets.items():
        given = state[name]
        if given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise _mismatch(
                f"{name} is {given.dtype} {tuple(given.shape)}, in the model {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )


# -- random generators -----------------------------------------------------------------------


def _capture_rng() -> Tensors:
    _, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937", kind
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _check_rng(rng: Tensors) -> None:
    now = _capture_rng()
    for name in now.keys() - {"cuda"}:
        given, ours = rng.get(name), now[name]
        if given is None or given.dtype != ours.dtype or given.dim() != 1:
            raise _invalid(f"generator {name} is not in the state")
        if name != "python_gauss" and given.shape != ours.shape:
            raise _invalid(f"the state of generator {name} is of another size")
    for name in ("python", "numpy"):
        words = rng[name]
        position = int(words[_RNG_WORDS])
        if not (int(words.min()) >= 0 and int(words.max()) < 1 << 32 and position <= _RNG_WORDS):
            raise _invalid(f"the state of generator {name} cannot be")


def _restore_rng(rng: Tensors) -> None:
    gauss = rng["python_gauss"].tolist()
    random.setstate((3, tuple(rng["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = rng["numpy"].tolist()
    legacy: tuple[Any, ...] = (
        "MT19937",
        np.asarray(keys, dtype=np.uint32),
        position,
        has_gauss,
        float(rng["numpy_gauss"]),
    )
    np.random.set_state(legacy)
    torch.set_rng_state(rng["torch"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])


# -- files -----------------------------------------------------------------------------------


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor.reshape(-1)))
    return digest.hexdigest()


def _corrupt(path: Path, why: str) -> DilocoError:
    return DilocoError(
        Reason.CORRUPT, f"the training state {path} is damaged: {why}; start without it", path=path
    )


def _invalid(why: str) -> UsageError:
    return UsageError(Reason.CONFIG_INVALID, f"this is no training state: {why}")


def _mismatch(why: str) -> UsageError:
    return UsageError(
        Reason.LAYOUT_MISMATCH,
        f"the training state is of another model: {why}; start without it, or with that model",
    )
