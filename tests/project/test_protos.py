"""The contract: generated modules match their protos, and buf has nothing to say."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
PROGRAMS = Path(sys.executable).parent


def generated_under(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for pattern in GENERATED
        for path in folder.rglob(pattern)
    }


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> dict[str, str]:
    """All modules as they are generated now."""
    out = tmp_path_factory.mktemp("generated")
    files = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.rglob("*.proto"))]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugins = [
        f"--plugin=protoc-gen-{name}={PROGRAMS / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *plugins, *outputs, *files]
    done = subprocess.run(command, check=False, cwd=PROTOS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return generated_under(out)


def test_the_generated_modules_are_those_of_the_protos(fresh):
    committed = generated_under(PROTOS)
    assert sorted(committed) == sorted(fresh), "run make protos"
    differing = [name for name, text in fresh.items() if committed[name] != text]
    assert not differing, "run make protos"


def test_the_declared_protobuf_range_starts_where_generated_code_does(fresh):
    stamps = set(re.findall(r"# Protobuf Python Version: (\S+)", "\n".join(fresh.values())))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (declared,) = (d for d in project["dependencies"] if d.startswith("protobuf"))
    assert stamps == {re.search(r">=([\d.]+)", declared).group(1)}


@pytest.mark.parametrize(
    "arguments", [["lint"], ["format", "--diff", "--exit-code"]], ids=["lint", "format"]
)
def test_buf_has_nothing_to_say(arguments):
    command = [PROGRAMS / "buf", *arguments, "protos"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
