#!/usr/bin/env python3
"""Writes requirements.lock from the environment whose Python runs it (see `make lock`).

Listed is what pyproject.toml asks for, extras and the dev group included, and what that needs.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
ALWAYS = ("setuptools",)
# Generated code refuses an older protobuf: these stay on the release of the pinned grpcio-tools.
LIKE_GRPCIO_TOOLS = ("grpcio-health-checking", "grpcio-status")
# Whatever torch build the environment has, these belong to the build and not to the lock.
NOT_LISTED = ("nvidia-", "cuda-", "triton")
HEADER = """\
# What `make run` and `make test` install, complete and pinned; Python 3.11 and later, Linux.
# torch is pinned without its build: TORCH=cpu|cuda|existing chooses (scripts/setup_environment.py).
# Refreshed by `make lock`, which resolves pyproject.toml anew and writes this file; then run
# `make lint test` and commit both. The pins of pyproject.toml stand (grpcio-tools among them).
"""


def wanted() -> list[str]:
    """All requirements of pyproject.toml: dependencies, extras, dev group, build backend."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    dev = project["dependency-groups"]["dev"]
    (tools,) = (text for text in dev if text.startswith("grpcio-tools=="))
    return [
        *project["project"]["dependencies"],
        *(requirement for extra in extras for requirement in extra),
        *dev,
        *(tools.replace("grpcio-tools", name) for name in LIKE_GRPCIO_TOOLS),
        *ALWAYS,
    ]


def closure(requirements: list[str]) -> dict[str, str]:
    """The installed version of every requirement and of what it needs, by name."""
    pinned: dict[str, str] = {}
    pending = [(Requirement(text), frozenset[str]()) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement, active = pending.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        environments = [{"extra": extra} for extra in active or {""}]
        if requirement.marker and not any(requirement.marker.evaluate(e) for e in environments):
            continue
        if (name, extras) in seen or name.startswith(NOT_LISTED):
            continue
        seen.add((name, extras))
        distribution = importlib.metadata.distribution(name)
        pinned[name] = distribution.version.partition("+")[0]
        pending += [(Requirement(text), extras) for text in distribution.requires or []]
    return pinned


def main() -> None:
    """Prints the requirements, or writes the lock of this environment."""
    if sys.argv[1:] == ["--wanted"]:
        print("\n".join(wanted()))
        return
    lines = [f"{name}=={version}" for name, version in sorted(closure(wanted()).items())]
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(lines) + "\n")
    print(f"requirements.lock: {len(lines)} packages")


if __name__ == "__main__":
    main()
