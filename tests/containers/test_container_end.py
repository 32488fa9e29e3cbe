"""A fleet of containers is told to stop, goes on where it was, and leaves what a run leaves."""

from __future__ import annotations

import json

from tests.containers.compose_fleet import (
    SERVICES,
    ComposeFleet,
    inspect,
    require_containers,
    wait_for,
)

require_containers()


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
    fleet.rises()
    assert set(fleet.learners("live")) <= learners


def test_the_run_directory_holds_what_a_run_leaves(fleet: ComposeFleet) -> None:
    script = "cat /var/lib/diloco/run/metrics/synchronizer-*.jsonl | head -n 1"
    line = fleet.compose("exec", "-T", "synchronizer", "sh", "-c", script)
    assert json.loads(line)["kind"]
