"""Who may import whom: two sides that never meet, pure cores, thin shells."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.project.parsing import parsed

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "decoupled_diloco": ROOT / "protos" / "decoupled_diloco",
    "synchronizer_server": ROOT / "synchronizer_server",
    "learner_client": ROOT / "learner_client",
    "diloco_fleet": ROOT / "diloco_fleet",
}
MAY_IMPORT = {
    "decoupled_diloco": {"decoupled_diloco"},
    "synchronizer_server": {"synchronizer_server", "decoupled_diloco"},
    "learner_client": {"learner_client", "decoupled_diloco"},
    "diloco_fleet": set(FOLDERS),
}
SIDES = ("synchronizer_server", "learner_client")

# A core sees no clock, no randomness, no network, no threads and no tensors.
CORE_STANDARD_LIBRARY = {
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "enum", "fractions",
    "functools", "hashlib", "heapq", "itertools", "json", "math", "numbers", "operator",
    "re", "statistics", "string", "textwrap", "types", "typing",
}  # fmt: skip
CORE_SHARED = {
    "decoupled_diloco",
    "decoupled_diloco.errors",
    "decoupled_diloco.layout",
    "decoupled_diloco.settings",
    "decoupled_diloco.versions",
}
WITHOUT_TENSORS = (
    "errors", "layout", "partition", "parts", "setting_fields", "settings", "strategies",
    "versions",
)  # fmt: skip
NOT_WITHOUT_TENSORS = {"torch", "numpy", "grpc"}
NOT_IN_MERGE = {
    "asyncio", "google", "grpc", "random", "redis", "socket", "subprocess", "threading", "time",
}  # fmt: skip

# Inside a side a module imports its own level and those below it; unnamed modules are level 1.
LEVELS = {
    "core": 0, "merge": 0,
    "service": 1, "transport": 1, "store": 1, "membership": 1,
    "server": 2, "learner": 2, "": 2,
    "train": 3,
    "cli": 4, "__main__": 4,
}  # fmt: skip


def sources() -> dict[str, str]:
    """The text of every module of the project by its import name, generated ones left out."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = (*parts[:-1], "__init__")
            if "_pb2" not in path.name:
                found[".".join((package, *parts))] = path.read_text()
    return found


def imports_of(module: str, text: str, known: set[str]) -> Iterator[tuple[str, int]]:
    """Every module that a source imports, wherever in the source, with the line."""
    package = module.rpartition(".")[0]
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in known else base, node.lineno


def level_of(module: str) -> int:
    part = module.split(".")[1] if "." in module else ""
    return LEVELS.get("" if part == "__init__" else part, 1)


def broken_rules(module: str, target: str) -> Iterator[str]:
    """The rules that one import breaks, in words."""
    root, top = module.partition(".")[0], target.partition(".")[0]
    parts = module.split(".")
    if top in FOLDERS and top not in MAY_IMPORT[root]:
        yield f"{root} never imports {top}"
    if root in SIDES and parts[1] == "core":
        own = target == f"{root}.core" or target.startswith(f"{root}.core.")
        if not own and top not in CORE_STANDARD_LIBRARY and target not in CORE_SHARED:
            yield "a core is pure"
    if root == "decoupled_diloco" and parts[1] in WITHOUT_TENSORS and top in NOT_WITHOUT_TENSORS:
        yield f"{parts[1]} knows nothing of tensors and networks"
    if root == "synchronizer_server" and parts[1] == "merge" and top in NOT_IN_MERGE:
        yield "merging is mathematics"
    is_root = parts[1] == "__init__"
    if root in SIDES and top == root and not is_root and level_of(target) > level_of(module):
        yield "cli -> server|learner -> service|transport|store -> core, merge"


def violations(texts: Mapping[str, str]) -> list[str]:
    known = set(texts) | {name.removesuffix(".__init__") for name in texts}
    return [
        f"{module}:{line} imports {target}: {rule}"
        for module, text in texts.items()
        for target, line in imports_of(module, text, known)
        for rule in broken_rules(module, target)
    ]


def test_no_import_breaks_an_arrow():
    texts = sources()
    assert {name.partition(".")[0] for name in texts} == set(FOLDERS)
    broken = violations(texts)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("synchronizer_server.server", "import learner_client.learner"),
        ("learner_client.learner", "from synchronizer_server.core import records"),
        ("learner_client.train.main", "def f():\n    import diloco_fleet"),
        ("decoupled_diloco.config", "from learner_client import Learner"),
        ("synchronizer_server.core.rounds", "import time"),
        ("synchronizer_server.core.rounds", "from random import Random"),
        ("learner_client.core.counters", "import asyncio"),
        ("learner_client.core.counters", "from decoupled_diloco.channel import open_channel"),
        ("learner_client.core.counters", "from decoupled_diloco import channel"),
        ("learner_client.core.counters", "from .. import transport"),
        ("synchronizer_server.core.rounds", "from synchronizer_server.merge import weights"),
        ("decoupled_diloco.layout", "import torch.nn"),
        ("decoupled_diloco.errors", "import grpc"),
        ("synchronizer_server.merge.outer", "import threading"),
        ("synchronizer_server.merge.outer", "from redis import Redis"),
        ("synchronizer_server.store.disk", "from synchronizer_server.service import push"),
        ("synchronizer_server.store.disk", "from synchronizer_server import server"),
        ("learner_client.transport.grpc", "from ..learner import Learner"),
        ("learner_client.learner", "from learner_client.train import data"),
        ("learner_client.learner", "if True:\n    from learner_client import cli"),
    ],
)
def test_a_planted_violation_is_caught(module, text):
    others = {
        f"{package}.{name}": ""
        for package in FOLDERS
        for name in ("__init__", "channel", "cli", "server", "transport.__init__")
    }
    lawful = module == "synchronizer_server.store.disk" and "service" in text
    assert bool(violations(others | {module: text})) is not lawful


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("synchronizer_server.core.rounds", "from collections.abc import Mapping\nimport math"),
        ("synchronizer_server.core.rounds", "from decoupled_diloco.errors import Reason"),
        ("synchronizer_server.core.rounds", "from synchronizer_server.core import records"),
        ("synchronizer_server.core.rounds", "from . import records"),
        ("synchronizer_server.service.push", "from synchronizer_server.core import rounds"),
        ("synchronizer_server.cli", "from synchronizer_server.server import serve"),
        ("learner_client.__init__", "from learner_client.learner import Learner"),
        ("learner_client.train.main", "from learner_client import Learner"),
        ("diloco_fleet.local", "import learner_client\nimport synchronizer_server.core"),
    ],
)
def test_a_lawful_import_is_left_alone(module, text):
    assert violations({module: text}) == []


def test_layout_and_core_are_usable_without_torch_and_grpc():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['grpc'] = None; "
        "import decoupled_diloco.layout, decoupled_diloco.settings, decoupled_diloco.versions"
        ", synchronizer_server.core.synchronizer"
    )
    path = {"PYTHONPATH": str(ROOT / "protos")}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
