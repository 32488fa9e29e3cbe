"""The inner optimizer: AdamW."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer

from learner_client.train.settings import TrainSettings


def build_optimizer(model: nn.Module, settings: TrainSettings) -> AdamW:
    """Builds AdamW over the model's trainable parameters; 1-d tensors (norms) do not decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in trainable if parameter.dim() > 1],
            "weight_decay": settings.weight_decay,
        },
        {
            "params": [parameter for parameter in trainable if parameter.dim() <= 1],
            "weight_decay": 0.0,
        },
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of every group, from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
