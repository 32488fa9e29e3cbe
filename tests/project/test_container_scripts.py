"""The scripts round the container tests, with programs in place of Docker that do as told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

# What compose and buildx are asked is whether they are there.
NO_ENGINE = 'case "$1" in compose | buildx) ;; *) exit 1 ;; esac'
ENGINE = 'case "$*" in *"{{.Client.Version}}"*) echo version ;; esac'


class Machine:
    """A machine on which `docker` and `dockerd` are programs of the test.

    Args:
        folder: where they lie.
        docker: what `docker` does, as a shell script.
    """

    def __init__(self, folder: Path, docker: str) -> None:
        self.folder = folder
        self.asked_file = folder / "asked"
        self.asked_file.touch()
        self.program("docker", f'echo "$*" >> {self.asked_file}\n{docker}')
        self.program("dockerd", "echo 'no cgroups here'; exit 1")

    def program(self, name: str, script: str) -> Path:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def run(self, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(self.folder / "bin/python"),
            "CONTAINER_ENGINE_STATE": str(self.folder / "state"),
        }
        return subprocess.run(
            [script, *arguments],
            check=False,
            capture_output=True,
            text=True,
            env=environ,
            timeout=60,
        )

    @property
    def asked(self) -> list[str]:
        """Every command that `docker` was given."""
        return self.asked_file.read_text().splitlines()


def test_where_no_engine_can_be_started_the_tests_are_skipped_and_the_last_line_says_so(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, NO_ENGINE)
    done = machine.run(SCRIPTS / "container-tests.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("container tests: SKIPPED, no container engine")
    why = done.stderr.splitlines()[-1].removeprefix("container-engine: no container engine: ")
    assert why in {
        "dockerd does not start",
        "no dockerd answers this user, and starting one takes root",
    }
    if "does not start" in why:
        assert "no cgroups here" in done.stderr, "what dockerd said"


def test_an_engine_that_cannot_be_had_is_told_from_one_that_fails(tmp_path: Path) -> None:
    machine = Machine(tmp_path, NO_ENGINE)
    assert machine.run(SCRIPTS / "container-engine.sh", "up").returncode == 69
    for wrong in ([], ["up", "grafana"], ["away"]):
        done = machine.run(SCRIPTS / "container-engine.sh", *wrong)
        assert (done.returncode, done.stderr[:6]) == (64, "usage:")


@pytest.mark.parametrize(("arguments", "wanted"), [(["up"], False), (["up", "prometheus"], True)])
def test_what_is_there_is_taken_and_prometheus_looked_for_only_when_asked(
    tmp_path: Path, arguments: list[str], wanted: bool
) -> None:
    machine = Machine(tmp_path, ENGINE)
    done = machine.run(SCRIPTS / "container-engine.sh", *arguments)
    assert done.returncode == 0, done.stderr
    looked_for = {x.split()[2] for x in machine.asked if x.startswith("image inspect")}
    assert any("prometheus" in image for image in looked_for) is wanted
    assert not any(x.startswith(("pull ", "build ", "import ")) for x in machine.asked)


def test_stand_ins_have_the_names_that_dockerfile_and_compose_ask_for() -> None:
    text = (SCRIPTS / "container-engine.sh").read_text()
    names = dict(re.findall(r"(?m)^(\w+)_IMAGE=(.*)$", text))
    composed = {
        name: values["image"]
        for file in ("compose", "observability")
        for name, values in yaml.safe_load((ROOT / f"compose/{file}.yaml").read_text())[
            "services"
        ].items()
    }
    base = re.findall(r"(?m)^ARG BASE=(.*)$", (ROOT / "Dockerfile").read_text())
    assert [names["PYTHON"]] == base
    assert names["REDIS"] == composed["redis"]
    assert names["PROMETHEUS"] == composed["prometheus"]


# -- container-tests.sh, with every other script a stand-in, too ----------------------------------


def script_alone(machine: Machine, *, engine: str = "", build: str = "") -> Path:
    """A copy whose neighbours do as they are told."""
    folder = machine.folder / "scripts"
    folder.mkdir()
    for name, script in (("container-engine", engine), ("build-images", build)):
        shutil.copy(machine.program(name, script), folder / f"{name}.sh")
    return Path(shutil.copy(SCRIPTS / "container-tests.sh", folder))


def test_an_engine_that_fails_fails_the_tests(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ENGINE)
    done = machine.run(script_alone(machine, engine="exit 1"))
    assert done.returncode == 1
    assert "SKIPPED" not in done.stdout


@pytest.mark.parametrize(("failing", "code"), [("build", 7), ("python", 3), ("", 0)])
def test_everything_is_removed_however_the_tests_end(
    tmp_path: Path, failing: str, code: int
) -> None:
    machine = Machine(tmp_path, ENGINE)
    machine.program("python", f'echo "$@"; exit {code if failing == "python" else 0}')
    build = f"exit {code}" if failing == "build" else ""
    done = machine.run(script_alone(machine, build=build), "-k", "nothing")
    assert done.returncode == code, done.stderr
    assert ("tests/containers -k nothing" in done.stdout) is (failing != "build")
    [down] = [x for x in machine.asked if x.startswith("compose") and " down " in x]
    assert "--volumes --remove-orphans" in down
    assert done.stdout.splitlines()[-1].startswith(f"container tests: exit code {code} ")


def test_what_is_left_behind_is_a_failure(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 'case "$*" in "network ls"*) echo forgotten ;; esac')
    machine.program("python", "exit 0")
    done = machine.run(script_alone(machine))
    assert done.returncode == 1
    assert "something is left of diloco-test-" in done.stderr
    assert "forgotten" in done.stderr
