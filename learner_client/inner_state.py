"""Inner state: what the inner optimizer remembers, named by parameter, so that a peer can go on.

Captured on the training thread between two steps; sent, or written to disk, as safetensors. Never
pickled.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from decoupled_diloco.codecs.base import Payload
from decoupled_diloco.errors import DilocoError, Reason, UsageError

PREFIX: Final = "optimizer."

_Slots = dict[str, Any]
# One parameter's state in an optimizer: tensors and numbers by key.


class InnerState(Protocol):
    """State of the training loop that peers share and that is not merged."""

    def capture(self) -> dict[str, torch.Tensor]:
        """Copies the state on the host. On the training thread, between two steps.

        Returns:
            contiguous CPU tensors by name; none shares memory with what the loop goes on changing.
        """

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over a captured state, all of it or nothing. On the training thread.

        Raises:
            DilocoError: why it does not fit; nothing was changed.
        """


class OptimizerState:
    """Inner state of a ``torch.optim`` optimizer, by parameter name.

    ``optimizer.<parameter name>.<key>``, such as ``optimizer.0.weight.exp_avg``; ``step`` and other
    numbers are tensors of no dimension. Hyper-parameters (``param_groups``) belong to the run's
    settings and are not part of it. A parameter that was never trained has no state.

    Args:
        model: gives the parameters their names; tied ones have the first.
        optimizer: its optimizer.

    Raises:
        UsageError: ``CONFIG_INVALID`` where the optimizer has parameters that the model has not.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parameters()

    def capture(self) -> dict[str, torch.Tensor]:
        """See ``InnerState``.

        Raises:
            UsageError: ``CONFIG_INVALID`` where the optimizer keeps what has no name or is no
                tensor or number.
        """
        parameters = self._parameters()
        known = {id(parameter) for parameter in parameters.values()}
        if any(id(key) not in known for key in self._optimizer.state):
            raise _unfit(
                f"{type(self._optimizer).__name__} keeps state that belongs to no parameter; "
                "inner state is moved by parameter name only"
            )
        return {
            f"{PREFIX}{name}.{key}": _copied(value, f"{name}.{key}")
            for name, parameter in parameters.items()
            for key, value in _slots_of(self._optimizer, parameter).items()
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """See ``InnerState``; the optimizer's state may still be empty.

        Raises:
            UsageError: ``LAYOUT_MISMATCH`` where names, keys, shapes or dtypes are not those of
                this optimizer; ``NON_FINITE``.
        """
        parameters = self._parameters()
        given = _by_parameter(state)
        for name in given:
            if name not in parameters:
                raise _mismatch(f"the state of {name!r} is of no parameter of this optimizer")
        targets = {name: self._target(parameters[name]) for name in given}
        for name, slots in given.items():
            _check(name, slots, targets[name])
        for name, slots in given.items():
            target = targets[name]
            for key, value in slots.items():
                target[key] = _moved(value, target[key])
        for name, parameter in parameters.items():
            if name in targets:
                self._optimizer.state[parameter] = targets[name]
            else:
                self._optimizer.state.pop(parameter, None)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters by name, in the model's order."""
        groups = self._optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        named = {n: p for n, p in self._model.named_parameters() if id(p) in held}
        if len(named) < len(held):
            raise _unfit(
                f"the optimizer has {len(held) - len(named)} parameters that the model has not; "
                "give the model whose parameters it trains"
            )
        return named

    def _target(self, parameter: nn.Parameter) -> _Slots:
        """The slots to fill for a parameter: its own, or those that a first step would make."""
        own = _slots_of(self._optimizer, parameter)
        return dict(own) if own else _first_slots(self._optimizer, parameter)


def encode_state(state: Mapping[str, torch.Tensor]) -> bytes:
    """A captured state as one safetensors payload."""
    return safetensors.torch.save(dict(state))


def decode_state(payload: Payload) -> dict[str, torch.Tensor]:
    """Reads a payload from anywhere into fresh tensors.

    Raises:
        DilocoError: ``CORRUPT`` where it is no safetensors payload.
    """
    try:
        return safetensors.torch.load(bytes(payload))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DilocoError(
            Reason.CORRUPT, f"inner state of {len(payload)} bytes is no safetensors: {error}"
        ) from None


def _slots_of(optimizer: Optimizer, parameter: nn.Parameter) -> _Slots:
    """A parameter's state; empty before its first step. Reading must not create it."""
    slots = optimizer.state.get(parameter, {})
    return {key: value for key, value in slots.items() if value is not None}


def _first_slots(optimizer: Optimizer, parameter: nn.Parameter) -> _Slots:
    """What a first step keeps for a parameter, found by one step on a stand-in of its shape.

    Keys, shapes and dtypes depend on the optimizer and its options; only itself knows them.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    twin = copy.copy(optimizer)
    twin.__dict__.pop("step", None)  # schedulers put a bound one there, which steps the original
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [stand_in]}]
    try:
        twin.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _unfit(
            f"cannot tell what {type(optimizer).__name__} keeps before its first step: {error}"
        ) from error
    return _slots_of(twin, stand_in)


def _by_parameter(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    slots: dict[str, dict[str, torch.Tensor]] = {}
    for full, value in state.items():
        name, _, key = full.removeprefix(PREFIX).rpartition(".")
        if not full.startswith(PREFIX) or not name or not key:
            raise _mismatch(f"{full!r} is no name of inner state ({PREFIX}<parameter>.<key>)")
        slots.setdefault(name, {})[key] = value
    return slots


def _check(name: str, slots: dict[str, torch.Tensor], target: _Slots) -> None:
    if slots.keys() != target.keys():
        raise _mismatch(
            f"state of {name!r} has {sorted(slots)}, this optimizer keeps {sorted(target)}; every "
            "learner needs the same optimizer with the same options"
        )
    for key, value in slots.items():
        wanted = _as_tensor(target[key], f"{name}.{key}")
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise _mismatch(
                f"state {key} of {name!r} is {value.dtype} {tuple(value.shape)}, this optimizer "
                f"keeps {wanted.dtype} {tuple(wanted.shape)}"
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UsageError(Reason.NON_FINITE, f"state {key} of {name!r} is not finite")


def _moved(value: torch.Tensor, target: object) -> object:
    """``value`` where ``target`` is: written into its memory, or as a number of its kind."""
    if isinstance(target, torch.Tensor):
        return target.copy_(value)
    return value.item()


def _copied(value: object, name: str) -> torch.Tensor:
    tensor = _as_tensor(value, name).detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _as_tensor(value: object, name: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool | int):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    raise _unfit(
        f"the optimizer keeps a {type(value).__name__} as {name}; only tensors and numbers can be "
        "moved"
    )


def _mismatch(message: str) -> UsageError:
    return UsageError(Reason.LAYOUT_MISMATCH, message)


def _unfit(message: str) -> UsageError:
    return UsageError(Reason.CONFIG_INVALID, message)
