"""`diloco chaos run --injector docker`: what is promised of a fault holds, and everything heals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_fleet.chaos.scenario_file import SHIPPED, load_scenario
from tests.containers.compose_fleet import (
    CHAOS,
    ROOT,
    SERVICES,
    ComposeFleet,
    inspect,
    require_containers,
    run,
    wait_for,
)

require_containers()

ARTIFACTS = Path(os.environ.get("ARTIFACTS", ROOT / "artifacts"))
QUEUES = Path("/proc/self/net/netfilter/nfnetlink_queue")
"""Queues of packets that somebody listens to."""
# Longer than the longest scenario waits, so that its own words are seen first.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def whole(fleet: ComposeFleet) -> ComposeFleet:
    """The fleet, whole before and after; of a fault no network, no limit and no rule is left."""
    fleet.wait_whole()
    yield fleet
    fleet.wait_whole()
    assert not chaos_networks(fleet)
    assert not disciplines(fleet)
    assert not holding_rules(fleet)


def chaos_networks(fleet: ComposeFleet) -> list[str]:
    """Networks that faults have made."""
    return run("docker", "network", "ls", "-q", "--filter", f"name={fleet.project}-chaos").split()


def links(fleet: ComposeFleet) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """How to run a command inside each container, and the host's ends of its links."""
    names = dict(line.split(": ")[:2] for line in run("ip", "-o", "link").splitlines())
    for role in ("learner", "synchronizer", "redis"):
        for container in fleet.containers(role):
            inside = ("nsenter", "--target", str(inspect(container)["State"]["Pid"]), "--net")
            lines = run(*inside, "ip", "-o", "link").splitlines()
            ends = [names.get(x.split(": ")[1].partition("@if")[2], "") for x in lines]
            yield inside, [end.partition("@")[0] for end in ends if end]


def disciplines(fleet: ComposeFleet) -> list[str]:
    """What shapes the links of the fleet, at either end."""
    found = []
    for inside, ends in links(fleet):
        found += run(*inside, "tc", "qdisc", "show").splitlines()
        for end in ends:
            found += run("tc", "qdisc", "show", "dev", end).splitlines()
    return [line for line in found if "tbf" in line or "netem" in line]


def holding_rules(fleet: ComposeFleet) -> list[str]:
    """Rules that hand packets to user space: of the fleet's links, or of gone ones to nobody."""
    found, own = [], set()
    savers = [x for x in ("iptables-save", "ip6tables-save") if shutil.which(x)]
    for inside, ends in links(fleet):
        own |= set(ends)
        for saver in savers:
            found += queueing(run(*inside, saver, "--table", "mangle"))
    there = {x.split(": ")[1].partition("@")[0] for x in run("ip", "-o", "link").splitlines()}
    heard = {x.split()[0] for x in QUEUES.read_text().splitlines()} if QUEUES.exists() else set()
    for rule in (x for saver in savers for x in queueing(run(saver, "--table", "mangle"))):
        devices = set(re.findall(r"--physdev-(?:in|out) (\S+)", rule))
        queue = rule.partition("--queue-num ")[2].split()[0]
        if devices & own or (not devices <= there and queue not in heard):
            found.append(rule)
    return found


def queueing(rules: str) -> list[str]:
    """Those of iptables' rules that hand packets to a queue."""
    return [rule for rule in rules.splitlines() if "-j NFQUEUE" in rule]


def leads(fleet: ComposeFleet) -> tuple[str, int]:
    """Who leads, in which term."""
    return wait_for("a leader", fleet.leader)


def found_by(result: dict[str, Any], name: str) -> float:
    """What was found for a query of the hypothesis."""
    [found] = [check["found"] for check in result["checks"] if check["name"] == name]
    return float(found.split()[0])


# -- scenarios -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_scenario_passes(name: str, whole: ComposeFleet) -> None:
    before, (leader, term) = whole.global_step(), leads(whole)
    result = whole.strike(name, ARTIFACTS / f"containers-{name}", "--short")
    assert result["verdict"] == "passed"
    assert result["injector"] == "docker"
    assert whole.global_step() > before
    assert result["rounds"] > 0
    assert result["uptime"] == 1.0
    assert result["rounds_lost"] == 0
    assert result["unhealed"] == []
    assert result["recovery_s"], "something has happened"
    for check in result["checks"]:
        assert check["holds"], check
    longest = max(fault.recovery_s for fault in load_scenario(name, short=True).faults)
    assert all(x is not None and x <= longest for x in result["recovery_s"].values())
    if name == "leader-kill":
        assert result["leader_changes"] == 1
        assert leads(whole)[0] != leader
        assert leads(whole)[1] > term
    elif name == "redis-kill":
        assert {x["fault"] for x in result["strikes"]} == {"kill", "redis-loss"}
        assert result["leader_changes"] == 0
        assert leads(whole) == (leader, term)
    elif name == "slow-link":
        assert found_by(result, "expired") == 0
        assert found_by(result, "silent_s") <= 3.0


SLOW_FROZEN_AND_CUT_OFF = """
about = "Everybody is disturbed, for longer than anybody waits."
duration_s = 400
[steady]
uptime = 1.0
[[faults]]
fault = "bandwidth"
who = "learner-0"
mbit_per_s = 10
at_s = [0]
duration_s = 300
[[faults]]
fault = "freeze"
who = "learner-1"
at_s = [0]
duration_s = 300
[[faults]]
fault = "partition"
between = ["the follower, learner-2", "rest"]
at_s = [0]
duration_s = 300
"""


def test_an_interrupted_scenario_heals_everything(whole: ComposeFleet, tmp_path: Path) -> None:
    scenario = tmp_path / "disturbed.toml"
    scenario.write_text(SLOW_FROZEN_AND_CUT_OFF)
    folder = tmp_path / "result"
    # A shell's job in the background heeds no Ctrl-C, nor do its children: these do.
    heeding = ("env", "--default-signal=INT")
    command = (*heeding, *CHAOS, str(scenario), "--project", whole.project, "--out", str(folder))
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        learners = whole.containers("learner")
        frozen = [lambda c=x: inspect(c)["State"]["Paused"] for x in learners]
        wait_for("a learner is frozen", lambda: any(is_frozen() for is_frozen in frozen))
        wait_for("a datacenter is cut off", lambda: chaos_networks(whole))
        wait_for("a link is slow", lambda: disciplines(whole))
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 143, said
    assert "SIGINT: healing everything" in said
    assert "everything is healed" in said
    result = json.loads((folder / "chaos.json").read_text())
    assert result["verdict"] == "interrupted"
    assert all(x["began_s"] is not None and x["problem"] == "" for x in result["strikes"])
    assert result["unhealed"] == []


# -- refusals --------------------------------------------------------------------------------------

AS_NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    # May read everything, wherever this project lies, and write nothing: a socket takes writing.
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
WITHOUT_NET_ADMIN = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")


def lives(fleet: ComposeFleet) -> dict[str, tuple[int, bool, list[str]]]:
    """What a fault would change of each container."""
    found = [inspect(container) for role in SERVICES for container in fleet.containers(role)]
    return {
        x["Name"]: (
            x["State"]["Pid"],
            x["State"]["Paused"],
            sorted(x["NetworkSettings"]["Networks"]),
        )
        for x in found
    }


def refused(fleet: ComposeFleet, scenario: str, *, by: tuple[str, ...] = (), **environ: str) -> str:
    """What is said of a scenario that is refused before anything begins."""
    before = lives(fleet)
    project = environ.pop("project", fleet.project)
    command = (*by, *CHAOS, scenario, "--short", "--project", project)
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )
    assert done.returncode == 64, done.stdout + done.stderr
    assert "steady state" not in done.stdout
    [line] = done.stderr.splitlines()
    assert lives(fleet) == before
    return line


def test_a_project_that_is_not_there(fleet: ComposeFleet) -> None:
    said = refused(fleet, "learner-kill", project="nobody-there")
    assert said.startswith("error: TARGET_NOT_FOUND: the engine has no learner of project nobody-")


def test_an_engine_that_does_not_run(fleet: ComposeFleet, tmp_path: Path) -> None:
    said = refused(fleet, "learner-kill", DOCKER_HOST=f"unix://{tmp_path}/docker.sock")
    assert said.startswith("error: ENGINE_UNAVAILABLE: the container engine does not answer; start")


def test_a_user_who_may_not_use_the_socket(fleet: ComposeFleet, tmp_path: Path) -> None:
    said = refused(fleet, "learner-kill", by=AS_NOBODY, HOME=str(tmp_path))
    assert said.startswith("error: ENGINE_UNAVAILABLE: no permission to the socket of the contain")


def test_links_without_net_admin(fleet: ComposeFleet) -> None:
    said = refused(fleet, "slow-link", by=WITHOUT_NET_ADMIN)
    assert said.startswith("error: FAULT_IMPOSSIBLE: scenario slow-link, fault bandwidth: ")
    assert "NET_ADMIN is missing" in said


ONE_FAULT = """
about = "One fault."
duration_s = 5
[steady]
uptime = 1.0
[[faults]]
fault = "{fault}"
who = "{who}"
at_s = [1]
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ONE_FAULT.format(fault="meteor", who="learner-0"), "CONFIG_UNKNOWN_KEY"),
        (ONE_FAULT.format(fault="kill", who="learner-9"), "TARGET_NOT_FOUND"),
        (
            ONE_FAULT.format(fault="kill", who="learner-0").replace("duration_s = 5\n", ""),
            "it has no end",
        ),
        (
            ONE_FAULT.format(fault="disk-full", who="the leader") + "duration_s = 2",
            "a store lies on a disk of the host, which must not be filled",
        ),
    ],
    ids=["unknown-fault", "unknown-target", "no-end", "disk-of-the-host"],
)
def test_a_scenario_that_cannot_be_done(
    text: str, words: str, fleet: ComposeFleet, tmp_path: Path
) -> None:
    scenario = tmp_path / "wrong.toml"
    scenario.write_text(text)
    assert words in refused(fleet, str(scenario))
