#!/usr/bin/env python3
"""Prints what an image needs: the dependencies of pyproject.toml and the extras that are named.

The dev group is left out; requirements.lock, given to pip as constraints, pins the versions. Needs
nothing but the standard library.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def image_requirements(extras: list[str]) -> list[str]:
    """The requirements, one per line of a file for pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(text for extra in extras for text in optional[extra])]


if __name__ == "__main__":
    print("\n".join(image_requirements(sys.argv[1:])))
