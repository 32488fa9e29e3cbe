"""A fleet of containers as a test sees it: compose, the engine, and `diloco` on published ports."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
PATIENCE_S = 180.0
CHAOS = (sys.executable, "-m", "diloco_fleet.cli", "chaos", "run", "--injector", "docker")
SERVICES = {"redis": 1, "synchronizer": 2, "learner": 3, "evaluator": 1}
"""Containers by role."""
NETWORKS = {
    name: service["networks"]
    for name, service in yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"].items()
    if "networks" in service
}
"""Networks by service."""


def require_containers() -> None:
    """Skips a module where nobody has started an engine and built the images."""
    if os.environ.get("CONTAINER_TESTS") != "1":
        pytest.skip("run scripts/container-tests.sh", allow_module_level=True)


def run(*command: str, check: bool = True, environ: Mapping[str, str] | None = None) -> str:
    """The standard output of a command that must succeed."""
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, env=environ
    )
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_for(what: str, look: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T:
    """Looks again and again until there is something to see."""
    give_up = time.monotonic() + patience_s
    while (seen := look()) is None or seen is False:
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {patience_s:.0f} s: {what}")
        time.sleep(0.5)
    return seen


class ComposeFleet:
    """The compose project of this run of the tests; scripts/container-tests.sh removes it."""

    def __init__(self, **settings: object) -> None:
        *self.ports, self.page_port, standby_page_port, self.prometheus_port = _free_ports(5)
        self.environ = {
            **os.environ,
            "COMPOSE_ENV_FILES": os.devnull,
            "SYNCHRONIZER_PORT": str(self.ports[0]),
            "STANDBY_PORT": str(self.ports[1]),
            "STATUS_PORT": str(self.page_port),
            "STANDBY_STATUS_PORT": str(standby_page_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
            **{name: str(value) for name, value in settings.items()},
        }

    @property
    def project(self) -> str:
        """The compose project."""
        return self.environ["COMPOSE_PROJECT_NAME"]

    def compose(self, *arguments: str, overlay: str = "", check: bool = True) -> str:
        """A command of compose, with an overlay of compose/ where it is named."""
        files = [COMPOSE / f"{name}.yaml" for name in ("compose", overlay) if overlay and name]
        flags = [part for file in files for part in ("--file", str(file))]
        return run("docker", "compose", *flags, *arguments, check=check, environ=self.environ)

    def diloco(self, *arguments: str, check: bool = True) -> str:
        """The `diloco` command on this machine, against the published ports."""
        address = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        command = (sys.executable, "-m", "diloco_fleet.cli", *arguments, "--address", address)
        return run(*command, check=check)

    def strike(self, scenario: str, folder: Path, *flags: str) -> dict[str, Any]:
        """Runs a scenario on the fleet, which must pass; returns its result."""
        shutil.rmtree(folder, ignore_errors=True)
        command = (*CHAOS, scenario, "--project", self.project, "--out", str(folder), *flags)
        run(*command)
        for name in ("chaos.md", "chaos.png"):
            assert (folder / name).stat().st_size
        result: dict[str, Any] = json.loads((folder / "chaos.json").read_text())
        return result

    def status(self) -> dict[str, Any] | None:
        """What `diloco status` knows; None while nobody answers."""
        try:
            seen = json.loads(self.diloco("status", "--json"))
        except (AssertionError, ValueError):
            return None
        return seen if seen["status"] is not None else None

    def page(self, path: str) -> str:
        """What the synchronizer's HTTP port on this machine answers."""
        url = f"http://127.0.0.1:{self.page_port}{path}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())

    def leader(self) -> tuple[str, int] | None:
        """Service that leads, and its term; None while nobody does."""
        seen = self.status()
        leading = [x for x in seen["synchronizers"] if x["role"] == "leading"] if seen else []
        if not leading:
            return None
        newest = max(leading, key=lambda x: x["term"])
        by_port = dict(zip(self.ports, ("synchronizer", "standby"), strict=True))
        return by_port[int(newest["address"].rpartition(":")[2])], int(newest["term"])

    def in_sync(self) -> bool:
        """Whether a standby would lose nothing."""
        seen = self.status()
        replicas = seen["status"]["replication"]["replicas"] if seen else []
        return any(x["connected"] and x["in_sync"] for x in replicas)

    def rises(self, steps: int = 5) -> None:
        """The global step goes on."""
        before = wait_for("a global step", lambda: max(self.global_step(), 0) or None)
        wait_for(f"{steps} more global steps", lambda: self.global_step() >= before + steps)

    def global_step(self) -> int:
        """Last committed global step; -1 while nobody leads."""
        seen = self.status()
        return int(seen["status"]["global_step"]) if seen and self.leads(seen) else -1

    @staticmethod
    def leads(seen: Mapping[str, Any]) -> bool:
        return any(x["role"] == "leading" for x in seen["synchronizers"])

    def learners(self, *states: str) -> dict[str, dict[str, Any]]:
        """Learners by id, in the given states."""
        seen = self.status()
        known = seen["status"].get("learners", []) if seen else []
        return {x["learner_id"]: x for x in known if not states or x["state"] in states}

    def containers(self, role: str) -> list[str]:
        """Ids of the containers of a role, running or not."""
        project = f"label=com.docker.compose.project={self.project}"
        labelled = f"label=org.decoupled-diloco.role={role}"
        found = run("docker", "ps", "-aq", "--no-trunc", "--filter", project, "--filter", labelled)
        return found.split()

    def wait_whole(self) -> None:
        """Waits until everybody is well, live and where compose has put it, and in sync."""
        try:
            wait_for("the fleet is whole", lambda: not self.missing())
        except AssertionError as error:
            raise AssertionError(f"{error}: {', '.join(self.missing())}") from None

    def missing(self) -> list[str]:
        """What the fleet lacks, in words."""
        found = []
        for role, number in SERVICES.items():
            containers = self.containers(role)
            found += [] if len(containers) == number else [f"{len(containers)} of {role}"]
            for known in map(inspect, containers):
                name, networks = known["Name"], set(known["NetworkSettings"]["Networks"])
                found += [] if health_of(known) == "healthy" else [f"{name} is {health_of(known)}"]
                at_home = {f"{self.project}_{x}" for x in NETWORKS[known_service(known)]}
                found += [] if networks == at_home else [f"{name} is on {sorted(networks)}"]
        live = len(self.learners("live"))
        found += [] if live == SERVICES["learner"] else [f"{live} learners are live"]
        return found if self.in_sync() else [*found, "no standby is in sync"]

    def container(self, service: str) -> str:
        """Id of the only container of a service."""
        (found,) = self.compose("ps", "--all", "--no-trunc", "--quiet", service).split()
        return found


def inspect(container: str) -> dict[str, Any]:
    """What the engine knows of a container."""
    (known,) = json.loads(run("docker", "inspect", container))
    return dict(known)


def health(container: str) -> str:
    """State of a container, or its health where it runs and has a check."""
    return health_of(inspect(container))


def health_of(known: Mapping[str, Any]) -> str:
    """The same, of what the engine knows of it."""
    state = known["State"]
    checked = state["Status"] == "running" and state.get("Health", {}).get("Status")
    return str(checked or state["Status"])


def known_service(known: Mapping[str, Any]) -> str:
    """Service of a container, of what the engine knows of it."""
    return str(known["Config"]["Labels"]["com.docker.compose.service"])


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
