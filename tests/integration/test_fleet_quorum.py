"""A quorum of everybody, and one of them dead: the fleet waits and says what for."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from fleet_harness import Fleet, assert_refused, diloco, run_command

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(
        tmp_path_factory.mktemp("quorum"),
        *("--learners", "4", "--quorum", "4", "--no-grace", "--restart", "never"),
        *("--global-steps", "0", "--pace", "0.2", "--evaluate-every", "1000"),
    )
    try:
        yield fleet
    finally:
        fleet.close()


def quorum_wait(fleet: Fleet) -> dict[str, Any] | None:
    """The wait for a quorum that names the dead learner, once the status shows it."""
    for wait in fleet.status().get("waits", ()):
        told = "3 of 4" in wait["detail"] and "not live: learner-2" in wait["detail"]
        if wait["reason"] == "quorum" and told:
            return dict(wait)
    return None


def test_a_round_needs_everybody(fleet: Fleet) -> None:
    rounds = fleet.wait_for_rounds(8)
    everybody = {f"learner-{index}" for index in range(4)}
    for line in rounds:
        assert set(line["contributors"]) == everybody, line["dropped"]


def test_it_waits_for_the_dead_and_says_so(fleet: Fleet) -> None:
    """Status and live lines name the quorum and who is missing; nothing is merged meanwhile."""
    fleet.kill("learner-2")
    fleet.wait_until(lambda: quorum_wait(fleet), "the wait to be told")
    global_step = fleet.global_step()
    steps = len(fleet.steps(0))
    fleet.wait_until(lambda: len(fleet.steps(0)) >= steps + 10, "the others to train on")
    assert fleet.global_step() == global_step, "no round without the quorum"
    waits = fleet.lines("synchronizer", "wait")
    told = [wait["detail"] for wait in waits if wait["reason"] == "quorum"]
    assert "not live: learner-2" in told[-1]
    line = f"round {global_step + 1} has waited"
    fleet.wait_until(
        lambda: any(line in x and ", quorum: " in x for x in fleet.text().splitlines()),
        "the live line to say it",
    )

    result = diloco("status", "--run-dir", str(fleet.files.root), "--json")
    assert result.returncode == 0, result.stderr
    status = json.loads(result.stdout)
    assert status["status"]["quorum"] == 4
    assert "quorum" in {entry["reason"] for entry in status["status"]["waits"]}
    states = {entry["name"]: entry["state"] for entry in status["fleet"]["processes"]}
    assert states["learner-2"] == "failed", "the policy was never to start it again"
    assert states["learner-0"] == "running"


def test_it_goes_on_when_the_missing_one_is_back(fleet: Fleet) -> None:
    """Somebody starts the learner by hand: its shard and its id are still its own."""
    global_step = fleet.global_step()
    root = fleet.files.root
    arguments = ("--address", fleet.state().address, "--run-dir", str(root))
    learner = ("learner_client.cli", "train", *arguments, "--learner-id", "learner-2")
    with fleet.start_other(*learner, output=root.parent / "learner-2.txt"):
        fleet.wait_until(lambda: fleet.global_step() >= global_step + 4, "rounds to go on")
        assert "learner-2" in fleet.rounds()[-1]["contributors"]
    fleet.wait_until(lambda: quorum_wait(fleet), "the wait to be told again")


def test_what_is_taken_is_refused(fleet: Fleet) -> None:
    """The port, the store, the run directory and the shards of a running fleet."""
    address, root = fleet.state().address, str(fleet.files.root)
    port = address.rpartition(":")[2]
    other = str(fleet.files.root.parent / "other")
    result = diloco("run", "--run-dir", other, "--learners", "1", "--port", port)
    assert_refused(result, "PORT_IN_USE", port)
    serve = ("synchronizer_server.cli", "serve")
    result = run_command(*serve, "--address", address, "--store", other)
    assert_refused(result, "PORT_IN_USE", port)
    result = run_command(
        *(*serve, "--address", "127.0.0.1:0", "--store", str(fleet.files.store)),
        *("--run-id", fleet.state().run_id),
    )
    assert_refused(result, "STORE_LOCKED", str(fleet.files.store), code=74)
    result = diloco("run", "--run-dir", root, "--resume")
    assert_refused(result, "CONFIG_CONFLICT", "a fleet is running", root)
    extra = ("--address", address, "--run-dir", root, "--learner-id", "learner-9")
    result = run_command("learner_client.cli", "train", *extra)
    assert_refused(result, "NO_SHARD_LEFT", "all 4 data shards")
    states = {entry["learner_id"]: entry["state"] for entry in fleet.status()["learners"]}
    assert set(states) == {f"learner-{index}" for index in range(4)}
    assert states["learner-0"] == "live"


def test_a_second_interrupt_kills_at_once(fleet: Fleet) -> None:
    """Ctrl-C twice, while a frozen learner holds up the drain: nothing is left."""
    fleet.kill("learner-0", signal.SIGSTOP)
    fleet.interrupt()
    fleet.wait_until(lambda: fleet.lines("fleet", "drain"), "the drain")
    fleet.interrupt()
    assert fleet.wait() == 143
    assert not fleet.pids()
    assert [end["outcome"] for end in fleet.lines("fleet", "end")] == ["killed"]
