"""A fleet of containers trains, loses its leader and a learner, is scaled and looked at."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.containers.compose_fleet import (
    SERVICES,
    ComposeFleet,
    health,
    inspect,
    require_containers,
    run,
    wait_for,
)

require_containers()


def facts(pid: str) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("overlay", ["", "observability", "chaos", "small-disks"])
def test_compose_accepts_the_files(overlay: str) -> None:
    ComposeFleet().compose("--profile", "tools", "config", "--quiet", overlay=overlay)


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
    fleet.rises()


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
    fleet.rises()
    wait_for("it was started again", lambda: inspect(container)["RestartCount"] >= 1)
    wait_for("it is well", lambda: health(container) == "healthy")
    wait_for("it is in sync again", fleet.in_sync)
    assert len(fleet.learners()) == 3


def test_a_killed_learner_comes_back_as_the_same_one(fleet: ComposeFleet) -> None:
    container = fleet.containers("learner")[0]
    wait_for("three live learners", lambda: len(fleet.learners("live")) == 3)
    known = set(fleet.learners())
    os.kill(inspect(container)["State"]["Pid"], signal.SIGKILL)
    wait_for("it was started again", lambda: inspect(container)["RestartCount"] >= 1)
    fleet.rises()
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
    fleet.rises()
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
    up = ("up", "--detach", "--no-build", "--no-deps", "--no-recreate")
    fleet.compose(*up, "link", overlay="chaos")
    (link,) = fleet.containers("link")
    wait_for("the link is slow", lambda: health(link) == "healthy")
    attach = ("--network", f"container:{fleet.container('learner-b')}", "--entrypoint", "tc")
    image = inspect(link)["Config"]["Image"]
    show = ("docker", "run", "--rm", *attach, image, "qdisc", "show", "dev", "eth0")
    assert "tbf" in run(*show)
    # Who is started again has another network, in which nothing is slow yet.
    os.kill(inspect(fleet.container("learner-b"))["State"]["Pid"], signal.SIGKILL)
    wait_for("the link was made anew", lambda: inspect(link)["RestartCount"] > 0)
    wait_for("the link is slow again", lambda: "tbf" in run(*show, check=False))
    fleet.compose("rm", "--stop", "--force", "link", overlay="chaos")
    assert "tbf" not in run(*show)
    fleet.rises()
