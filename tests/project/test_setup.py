"""The environment that make sets up: which torch, and clear words where it cannot be."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup():
    """The script as a module."""
    path = ROOT / "scripts" / "setup_environment.py"
    spec = importlib.util.spec_from_file_location("setup_environment", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "version",
    ["2.5.1", "2.6.0", "2.6", "2.6.0+cu126", "2.10.0", "2.13.0+cpu", "2.99", "3.0.0"],
)
def test_the_range_of_torch_is_read_as_pip_reads_it(setup, version):
    wanted = setup.torch_range()
    assert setup.in_range(version, wanted) is (version in SpecifierSet(wanted))


def test_a_torch_that_is_missing_or_out_of_range_is_left_alone_with_a_clear_word(
    setup, monkeypatch
):
    answers = {"missing": (1, ""), "old": (0, '"1.13.1+cu117"'), "good": (0, '"2.9.0+cu130"')}

    def answer(name):
        code, output = answers[name]
        result = SimpleNamespace(returncode=code, stdout=output)
        monkeypatch.setattr(setup.subprocess, "run", lambda *args, **kwargs: result)
        return setup.find_existing_torch()

    assert answer("good") == "2.9.0+cu130"
    with pytest.raises(SystemExit, match="has no working torch"):
        answer("missing")
    with pytest.raises(SystemExit, match=r"is 1\.13\.1\+cu117 and this needs >=2\.6,<3"):
        answer("old")


def test_an_existing_torch_is_never_installed_over(setup, monkeypatch):
    calls = []

    def record(python, *arguments):
        names = [Path(a) for a in arguments if a.endswith(".txt")]
        calls.append((arguments, names[0].read_text()))

    monkeypatch.setattr(setup, "pip", record)
    setup.install_around(Path("python"), "2.9.0")
    ((arguments, text),) = calls
    assert "--no-deps" in arguments
    assert "numpy==" in text
    assert not re.search(r"^torch\b", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("choice", "index", "expected"),
    [
        ("cpu", None, ["--extra-index-url", "probed"]),
        ("cpu", "", []),
        ("cpu", "mine", ["--extra-index-url", "mine"]),
        ("cuda", None, []),
        ("cuda", "mine", ["--extra-index-url", "mine"]),
    ],
)
def test_the_index_for_torch_follows_the_choice(setup, monkeypatch, choice, index, expected):
    seen = []
    monkeypatch.setattr(setup, "pip", lambda python, *arguments: seen.extend(arguments))
    monkeypatch.setattr(setup, "probe_cpu_index", lambda: "probed")
    setup.install_pinned(Path("python"), choice, index)
    assert seen == [*expected, "--requirement", str(setup.LOCK)]


def test_the_lock_pins_everything_that_pyproject_asks_for():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = document["project"]["optional-dependencies"].values()
    wanted = [
        *document["project"]["dependencies"],
        *document["dependency-groups"]["dev"],
        *(requirement for extra in extras for requirement in extra),
    ]
    for requirement in map(Requirement, wanted):
        assert pins[requirement.name] in requirement.specifier, requirement
    assert pins["torch"] == "2.13.0"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["TORCH=gpu", "test"], "TORCH is 'gpu'; one of cpu, cuda, existing"),
        (["proof-of-nothing"], "no proof is called of-nothing"),
    ],
)
def test_make_refuses_what_it_does_not_know(arguments, message):
    done = subprocess.run(
        ["make", *arguments], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert message in done.stderr


def test_setup_refuses_a_python_that_cannot_serve():
    done = subprocess.run(
        [ROOT / "scripts" / "setup.sh", "--print-python"],
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/nonexistent/python"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 64
    assert "/nonexistent/python; it must be 3.11 or later" in done.stderr
    done = subprocess.run(
        [ROOT / "scripts" / "setup.sh", "--print-python"],
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == sys.executable
