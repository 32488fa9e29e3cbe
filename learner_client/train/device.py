"""Where and in which precision the trainer computes."""

from __future__ import annotations

import torch

from decoupled_diloco.errors import Reason, UsageError


def resolve_device(name: str, learner_index: int = 0) -> torch.device:
    """Returns the device that a setting names.

    Args:
        name: ``cpu``, ``cuda:1``, ``cuda``, or ``auto`` (CUDA where there is any, else the CPU).
        learner_index: spreads learners over the GPUs of a machine where ``name`` gives no
            number: learner i gets ``cuda:(i mod n)``.

    Raises:
        UsageError: CONFIG_INVALID for what is no device, DEVICE_UNAVAILABLE for one that this
            machine or this build of PyTorch lacks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            Reason.CONFIG_INVALID, f"'{name}' is no device; use auto, cpu, cuda or cuda:0"
        ) from error
    if device.type not in {"cpu", "cuda"}:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"device '{name}' is not supported; use auto, cpu, cuda or cuda:0",
        )
    if device.type == "cpu":
        return torch.device("cpu")
    if num_gpus == 0 or (device.index or 0) >= num_gpus:
        raise UsageError(
            Reason.DEVICE_UNAVAILABLE,
            f"device '{name}' is not there: this PyTorch ({torch.__version__}) sees {num_gpus} "
            "GPUs; use cpu or auto, or install a build of PyTorch for your GPU",
            device=name,
        )
    return device if device.index is not None else torch.device("cuda", learner_index % num_gpus)


def compute_precision(precision: str, device: torch.device) -> torch.autocast:
    """Returns the context in which forward passes run.

    Parameters, gradients and optimizer state stay fp32; ``bf16`` lets PyTorch's autocast
    compute matrix products and attention in bfloat16.

    Args:
        precision: ``fp32`` or ``bf16``.
        device: where the model is.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
