"""A fleet of containers trains, loses its leader and its learners, and ends as it is told."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.containers.compose_fleet import (
    COMPOSE,
    ComposeFleet,
    health,
    inspect,
    require_containers,
    run,
    wait_for,
)

require_containers()

SERVICES = {"redis": 1, "synchronizer": 2, "learner": 3, "evaluator": 1}
"""Containers by role."""


def rises(fleet: ComposeFleet, steps: int = 5) -> None:
    """The global step goes on."""
    before = wait_for("a global step", lambda: max(fleet.global_step(), 0) or None)
    wait_for(f"{steps} more global steps", lambda: fleet.global_step() >= before + steps)


def facts(pid: str) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("overlays", [(), ("observability",), ("chaos",)])
def test_compose_accepts_the_files(overlays: tuple[str, ...]) -> None:
    files = [COMPOSE / f"{name}.yaml" for name in ("compose", *overlays)]
    flags = [part for file in files for part in ("--file", str(file))]
    fleet = ComposeFleet()
    fleet.compose(*flags, "--profile", "tools", "config", "--quiet")


def test_every_container_gets_well(fleet: ComposeFleet) -> None:
    for role, number in SERVICES.items():
        containers = fleet.containers(role)
        assert len(containers) == number, role
        for container in containers:
            wait_for(f"{role} is well", lambda c=container: health(c) == "healthy")


def test_it_trains_and_every_learner_has_an_id_of_its_own(fleet: ComposeFleet) -> None:
    wait_for("three live learners", lambda: len(fleet.learners("live")) == 3)
    hosts = {x["labels"]["host"] for x in fleet.learners("live").values()}
    assert hosts == {container[:12] for container in fleet.containers("learner")}
    rises(fleet)


def test_nothing_runs_as_root_has_a_capability_or_writes_its_root(fleet: ComposeFleet) -> None:
    for role in SERVICES:
        for container in fleet.containers(role):
            for pid in run("docker", "top", container, "-eo", "pid").split()[1:]:
                status = facts(pid)
                assert "0" not in status["Uid"].split(), role
                assert int(status["CapEff"], 16) == 0, role
                assert status["NoNewPrivs"] == "1", role
            # As root, whom nothing but the file system itself refuses.
            attempt = ("sh", "-c", "touch /opt/x 2>&1 || true")
            refusal = run("docker", "exec", "--user", "0", container, *attempt)
            assert "Read-only file system" in refusal, role


def test_status_page_and_metrics_are_served(fleet: ComposeFleet) -> None:
    assert "<html" in fleet.page("/")
    assert json.loads(fleet.page("/status.json"))
    assert "diloco_build_info" in fleet.page("/metrics")
    read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/metrics').read())"
    for service in ("learner", "learner-b"):
        said = fleet.compose("exec", "-T", service, "python", "-c", read)
        assert "diloco_learner_step" in said, service


def test_redis_is_reached_by_synchronizers_alone(fleet: ComposeFleet) -> None:
    attempt = "import socket; socket.create_connection(('redis', 6379), 3); print('reached')"
    for service, reached in (("standby", True), ("learner", False), ("learner-b", False)):
        said = fleet.compose("exec", "-T", service, "python", "-c", attempt, check=False)
        assert ("reached" in said) is reached, service


def test_the_standby_leads_once_the_leader_is_killed_and_the_old_one_comes_back(
    fleet: ComposeFleet,
) -> None:
    service, term = wait_for("a leader", fleet.leader)
    other = {"synchronizer": "standby", "standby": "synchronizer"}[service]
    container = fleet.container(service)
    os.kill(inspect(container)["State"]["Pid"], signal.SIGKILL)

    def replaced() -> bool:
        leader = fleet.leader()
        return leader is not None and leader[0] == other and leader[1] > term

    wait_for(f"{other} leads", replaced)
    rises(fleet)
    wait_for("it was started again", lambda: inspect(container)["RestartCount"] >= 1)
    wait_for("it is well", lambda: health(container) == "healthy")

    def in_sync() -> bool:
        seen = fleet.status()
        replicas = seen["status"]["replication"]["replicas"] if seen else []
        return any(x["connected"] and x["in_sync"] for x in replicas)

    wait_for("it is in sync again", in_sync)
    assert len(fleet.learners()) == 3


def test_a_killed_learner_comes_back_as_the_same_one(fleet: ComposeFleet) -> None:
    container = fleet.containers("learner")[0]
    wait_for("three live learners", lambda: len(fleet.learners("live")) == 3)
    known = set(fleet.learners())
    os.kill(inspect(container)["State"]["Pid"], signal.SIGKILL)
    wait_for("it was started again", lambda: inspect(container)["RestartCount"] >= 1)
    rises(fleet)
    wait_for("three live learners", lambda: len(fleet.learners("live")) == 3)
    assert set(fleet.learners()) == known


def test_learners_are_scaled_up_and_a_drained_one_stays_away(fleet: ComposeFleet) -> None:
    known = set(fleet.learners())
    up = ("up", "--detach", "--no-build", "--no-recreate", "--scale", "learner=3")
    fleet.compose(*up)
    wait_for("four live learners", lambda: len(fleet.learners("live")) == 4)
    (fresh,) = set(fleet.learners()) - known
    host = fleet.learners()[fresh]["labels"]["host"]
    fleet.diloco("drain", fresh)
    wait_for("it has ended", lambda: inspect(host)["State"]["Status"] == "exited")
    assert inspect(host)["State"]["ExitCode"] == 0
    assert fresh in fleet.learners("drained")
    rises(fleet)
    assert inspect(host)["State"]["Status"] == "exited"
    run("docker", "rm", "--volumes", host)


def test_the_model_is_written_and_used_while_the_fleet_trains(fleet: ComposeFleet) -> None:
    fleet.compose("run", "--rm", "--no-deps", "-T", "export")
    text = fleet.compose(
        "run", "--rm", "--no-deps", "-T", "generate", "--prompt", "The ", "--tokens", "20"
    )
    assert text.startswith("The ")


def test_the_link_of_a_datacenter_is_slow_until_the_overlay_is_taken_away(
    fleet: ComposeFleet,
) -> None:
    files = ("--file", str(COMPOSE / "compose.yaml"), "--file", str(COMPOSE / "chaos.yaml"))
    fleet.compose(*files, "up", "--detach", "--no-build", "--no-deps", "--no-recreate", "link")
    (link,) = fleet.containers("link")
    wait_for("the link is slow", lambda: health(link) == "healthy")
    attach = ("--network", f"container:{fleet.container('learner-b')}", "--entrypoint", "tc")
    image = inspect(link)["Config"]["Image"]
    show = ("docker", "run", "--rm", *attach, image, "qdisc", "show", "dev", "eth0")
    assert "tbf" in run(*show)
    fleet.compose(*files, "rm", "--stop", "--force", "link")
    assert "tbf" not in run(*show)
    rises(fleet)


def test_it_stops_without_force_and_goes_on_where_it_was(fleet: ComposeFleet) -> None:
    before = wait_for("a global step", lambda: max(fleet.global_step(), 0) or None)
    term = wait_for("a leader", fleet.leader)[1]
    learners = set(fleet.learners())
    fleet.compose("stop")
    for role in SERVICES:
        for container in fleet.containers(role):
            # 137 is the kill that follows where the grace period was too short.
            assert inspect(container)["State"]["ExitCode"] in {0, 143}, role
    model = fleet.compose("run", "--rm", "--no-deps", "-T", "generate", "--tokens", "5")
    assert model
    fleet.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "learner=2")
    after = wait_for("a leader of a later term", lambda: (fleet.leader() or ("", 0))[1] > term)
    assert after
    assert fleet.global_step() == -1 or fleet.global_step() >= before
    rises(fleet)
    assert set(fleet.learners("live")) <= learners


def test_the_run_directory_holds_what_a_run_leaves(fleet: ComposeFleet) -> None:
    script = "cat /var/lib/diloco/run/metrics/synchronizer-*.jsonl | head -n 1"
    line = fleet.compose("exec", "-T", "synchronizer", "sh", "-c", script)
    assert json.loads(line)["kind"]
