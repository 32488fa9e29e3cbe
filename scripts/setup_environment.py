#!/usr/bin/env python3
"""Makes or refreshes the virtual environment that `make run` and `make test` use.

Run it with the Python that the environment shall have; it needs nothing but the standard library.

    --torch cpu       torch as pinned in requirements.lock, a CPU build where one can be had
    --torch cuda      torch as pinned, the build that pip's index gives (with CUDA on Linux)
    --torch existing  the torch of this Python, never replaced; it must be in pyproject's range
"""

from __future__ import annotations

import argparse
import json
import os
import re
import site
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
CHOICE_FILE = "diloco-torch"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S = 5.0


def main() -> None:
    """Parses the arguments and sets the environment up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--torch", choices=["cpu", "cuda", "existing"], default="cpu")
    parser.add_argument(
        "--index", help="extra package index for torch; empty for none; probed where not given"
    )
    args = parser.parse_args()
    existing = find_existing_torch() if args.torch == "existing" else None
    python = make_environment(args.venv, args.torch)
    if existing is None:
        install_pinned(python, args.torch, args.index)
    else:
        install_around(python, existing)
    pip(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    if args.torch == "cuda":
        check_cuda_build(python)
    (args.venv / CHOICE_FILE).write_text(args.torch + "\n")


def make_environment(folder: Path, choice: str) -> Path:
    """Creates the environment, or keeps the one there if it was made for the same choice."""
    python = folder / "bin" / "python"
    made_for = folder / CHOICE_FILE
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    kept = (
        python.exists()
        and (folder / "lib" / f"python{version}").is_dir()
        and made_for.exists()
        and made_for.read_text().strip() == choice
    )
    if not kept:
        say(f"creating {folder} with Python {version}, torch: {choice}")
        venv.create(folder, clear=True, with_pip=True, system_site_packages=choice == "existing")
    if choice == "existing" and sys.prefix != sys.base_prefix:
        # An environment made inside another one sees only the base Python's packages.
        packages = folder / "lib" / f"python{version}" / "site-packages"
        (packages / "outer-environment.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def find_existing_torch() -> str:
    """Returns the version of this Python's torch, or stops with the reason why it cannot serve."""
    command = "import json, torch; print(json.dumps(torch.__version__))"
    found = subprocess.run(
        [sys.executable, "-c", command], check=False, capture_output=True, text=True
    )
    wanted = torch_range()
    if found.returncode != 0:
        stop(
            f"TORCH=existing, but {sys.executable} has no working torch; name the Python that has "
            "one (make PYTHON=/path/to/python TORCH=existing ...) or use TORCH=cpu or TORCH=cuda"
        )
    version = str(json.loads(found.stdout))
    if not in_range(version, wanted):
        stop(
            f"TORCH=existing, but the torch of {sys.executable} is {version} and this needs "
            f"{wanted}; it is left as it is; use TORCH=cpu or TORCH=cuda for an environment of "
            "its own"
        )
    return version


def torch_range() -> str:
    """The range of torch that pyproject.toml accepts, for example ``>=2.6,<3``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = (d for d in project["dependencies"] if re.match(r"torch\b", d))
    return str(found).removeprefix("torch").strip()


def in_range(version: str, wanted: str) -> bool:
    """Whether a version lies in a range of ``>=`` and ``<`` bounds; local parts do not count."""

    def parts(text: str) -> list[int]:
        numbers = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-z]", text)[0])]
        return numbers + [0] * (4 - len(numbers))

    at = parts(version)
    for bound in wanted.split(","):
        operator, limit = re.fullmatch(r"\s*(>=|<)\s*(\S+)\s*", bound).groups()  # type: ignore[union-attr]
        if (at < parts(limit)) == (operator == ">="):
            return False
    return True


def install_pinned(python: Path, choice: str, index: str | None) -> None:
    """Installs all of requirements.lock."""
    options = []
    if choice == "cpu":
        url = probe_cpu_index() if index is None else index
        options = ["--extra-index-url", url] if url else []
    elif index:
        options = ["--extra-index-url", index]
    say("installing requirements.lock, torch among it: this takes a few minutes once")
    pip(python, *options, "--requirement", str(LOCK))


def install_around(python: Path, version: str) -> None:
    """Installs requirements.lock without torch and without following any dependency to it."""
    say(f"keeping the installed torch {version}")
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("torch==")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as without_torch:
        without_torch.write("\n".join(lines) + "\n")
        without_torch.flush()
        pip(python, "--no-deps", "--requirement", without_torch.name)


def probe_cpu_index() -> str:
    """PyTorch's index of CPU builds where it answers; elsewhere pip's own index decides.

    Only Linux needs it: there the default build carries gigabytes of CUDA. A CPU build's version
    (2.13.0+cpu) sorts above the plain one, so pip prefers it by itself.
    """
    if not sys.platform.startswith("linux"):
        return ""
    request = urllib.request.Request(f"{CPU_INDEX}/torch/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S):
            return CPU_INDEX
    except (urllib.error.URLError, OSError, ValueError):
        say("no index of CPU builds within reach: torch comes from pip's own index")
        return ""


def check_cuda_build(python: Path) -> None:
    """Stops where torch came without CUDA although it was asked for."""
    command = "import sys, torch; sys.exit(torch.version.cuda is None)"
    if subprocess.run([python, "-c", command], check=False).returncode != 0:
        stop(
            "TORCH=cuda, but pip's index gave a torch without CUDA; install one yourself and use "
            "TORCH=existing, or name an index that has one: TORCH_INDEX=URL"
        )


def pip(python: Path, *arguments: str) -> None:
    """Runs pip install in the environment; stops with its exit code where it fails."""
    environ = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    command = [str(python), "-m", "pip", "install", "-qq", "--no-compile", *arguments]
    done = subprocess.run(command, check=False, env=environ)
    if done.returncode != 0:
        stop(f"failed: {' '.join(command)}")


def say(text: str) -> None:
    """Prints one line of progress."""
    print(f"setup: {text}", flush=True)


def stop(text: str) -> None:
    """Ends with one line that says why."""
    sys.exit(f"error: {text}")


if __name__ == "__main__":
    main()
