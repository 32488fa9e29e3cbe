"""What a user installs is complete: packages, type information and protos."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "decoupled_diloco": ROOT / "protos" / "decoupled_diloco",
    "synchronizer_server": ROOT / "synchronizer_server",
    "learner_client": ROOT / "learner_client",
    "diloco_fleet": ROOT / "diloco_fleet",
}
SHIPPED = {".py", ".pyi", ".proto", ".typed", ".lua", ".toml", ".html", ".js", ".css", ".svg"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    """The names of all files in a freshly built wheel; built beside the tree, not in it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES.values():
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(folder, source / folder.relative_to(ROOT), ignore=ignore)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", "out", "."]
    done = subprocess.run(command, check=False, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (source / "out").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_module_stub_proto_and_type_marker(wheel_names):
    wanted = {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.suffix in SHIPPED
    }
    missing = sorted(wanted - wheel_names)
    assert not missing, f"missing in the wheel (pyproject: packages, package-data): {missing}"
    for package in PACKAGES:
        assert f"{package}/py.typed" in wheel_names


def test_the_wheel_holds_nothing_else(wheel_names):
    roots = {name.partition("/")[0] for name in wheel_names}
    assert {root for root in roots if not root.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_carries_licence_and_commands(wheel_names):
    endings = {name.partition(".dist-info/")[2] for name in wheel_names}
    assert {"licenses/LICENSE", "entry_points.txt", "METADATA"} <= endings
