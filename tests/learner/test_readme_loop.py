"""The README's lines for a loop of one's own are lines that run."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import learner_client
from learner_client import Learner

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_a_learner_is_made_as_the_readme_says():
    _, block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names = {"model": model, "optimizer": optimizer, "num_batches": 7}
    exec(compile(block, "README.md", "exec"), names)
    assert isinstance(names["learner"], Learner)
    assert names["inner_state"].capture()


def test_what_the_readme_calls_is_there():
    for name in re.findall(r"`([a-z_]+)\(", README):
        assert hasattr(learner_client, name), name
