"""A small model, an inner step that is exact, and a learner in the test's own event loop."""

from __future__ import annotations

import torch
from torch import nn

from decoupled_diloco.settings import RunSettings
from learner_client import Learner, Runtime
from learner_client.transport import InMemoryTransport

NAME = "learner-0"


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(16, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 16)
    ).to(dtype)


def make_settings(**changes) -> RunSettings:
    defaults = {"num_fragments": 4, "overlap": 1, "sync_interval": 4}
    return RunSettings(**(defaults | changes))


def make_learner(service, model, **changes) -> Learner:
    defaults = {
        "learner_id": NAME,
        "transport": lambda: InMemoryTransport(service, service),
        "runtime": Runtime.scripted(1),
        "join_timeout_s": 20.0,
    }
    return Learner(model, **(defaults | changes))


def train(model: nn.Module, amount: float = 0.25) -> None:
    """An inner step that is exact in every dtype here."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)


def local_vector(learner: Learner, fragment: int) -> torch.Tensor:
    layout = learner._exchange.layout
    out = torch.empty(layout.fragments[fragment].num_elements)
    learner._parameters.read_fragment(layout.fragments[fragment], out)
    return out
