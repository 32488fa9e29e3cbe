"""Rules for all sources: small files and functions, no pickle, a complete catalogue of reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from decoupled_diloco import errors
from decoupled_diloco.errors import CATALOGUE, Reason
from tests.project.parsing import parsed

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (
    "protos",
    "synchronizer_server",
    "learner_client",
    "diloco_fleet",
    "benchmarks",
    "scripts",
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"torch.load", "torch.save", "torch.jit.load", "yaml.load", "eval", "exec"}


def files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return [path for path in found if "_pb2" not in path.name]


def too_long(text: str) -> Iterator[str]:
    """What is too long in one source, in words."""
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"file of {num_lines} lines"
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"function {node.name} of {num_lines} lines"


def unsafe(text: str) -> Iterator[str]:
    """What in one source could run code that came as data."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
            yield from sorted(names & UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom):
            if node.module in UNSAFE_MODULES:
                yield node.module
            for alias in node.names:
                if f"{node.module}.{alias.name}" in UNSAFE_CALLS:
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                yield ast.unparse(node.func)
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                    yield "allow_pickle"


def offenders(check, paths: list[Path]) -> str:
    return "\n".join(
        f"{path.relative_to(ROOT)}: {what}" for path in paths for what in check(path.read_text())
    )


def test_files_and_functions_are_small():
    found = offenders(too_long, files(*SHIPPED, "tests"))
    assert not found, found


def test_what_is_too_long_is_caught():
    long_function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert list(too_long(long_function)) == ["function f of 61 lines"]
    assert list(too_long("x = 1\n" * (MAX_FILE_LINES + 1))) == ["file of 401 lines"]
    assert list(too_long("x = 1\n" * MAX_FILE_LINES)) == []


def test_nothing_loads_a_pickle_or_runs_data():
    found = offenders(unsafe, files(*SHIPPED))
    assert not found, found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "numpy.load('x', allow_pickle=True)",
        "exec('1')",
    ],
)
def test_what_is_unsafe_is_caught(text):
    assert list(unsafe(text))


def test_every_reason_is_in_the_catalogue_under_its_own_name():
    assert set(CATALOGUE) == set(Reason)
    assert all(reason.name == reason.value for reason in Reason)


def test_the_catalogue_speaks_of_real_status_codes_and_exit_codes():
    exit_codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    for reason, entry in CATALOGUE.items():
        assert entry.status in grpc.StatusCode.__members__, reason
        assert entry.status not in {"OK", "UNKNOWN", "CANCELLED"}, reason
        assert entry.exit_code in exit_codes - {errors.EXIT_OK}, reason
        assert entry.retry or entry.exit_code != errors.EXIT_RETRY, reason


def test_no_two_test_files_share_a_name():
    names = [path.name for path in files("tests") if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
