"""Stores on small disks: a fleet changes over to them while it trains, and outlives a full one."""

from __future__ import annotations

from pathlib import Path

from tests.containers.compose_fleet import (
    ComposeFleet,
    health,
    require_containers,
    run,
    wait_for,
)

require_containers()

SMALL_STORE = "/var/lib/diloco/small-store"

FULL = """
about = "The disk of the leader is full for a while."
duration_s = 12
[steady]
uptime = 1.0
rounds_lost = 0
crashes = 0
expired = 0
[[faults]]
fault = "disk-full"
who = "the leader"
at_s = [1]
duration_s = 8
recovery_s = 60
"""


def test_a_fleet_changes_over_to_small_disks_one_at_a_time(fleet: ComposeFleet) -> None:
    """As docs/deploy-compose.md says: who has no store is filled by the other one."""
    fleet.wait_whole()
    known = set(fleet.learners("live"))
    before, (leader, term) = fleet.global_step(), wait_for("a leader", fleet.leader)
    follower = {"synchronizer": "standby", "standby": "synchronizer"}[leader]
    up = ("up", "--detach", "--no-build", "--no-deps")
    for service in (follower, leader):
        fleet.compose(*up, service, overlay="small-disks")
        container = fleet.container(service)
        wait_for(f"{service} is well", lambda c=container: health(c) == "healthy")
        wait_for("a standby is in sync", fleet.in_sync)
        mounted = run("docker", "exec", container, "df", "--output=fstype", SMALL_STORE)
        assert mounted.split()[-1] == "tmpfs"
    fleet.wait_whole()
    assert set(fleet.learners("live")) == known
    assert wait_for("a leader", fleet.leader)[1] > term
    assert fleet.global_step() > before


def test_a_full_disk_of_the_leader_loses_nothing(fleet: ComposeFleet, tmp_path: Path) -> None:
    fleet.wait_whole()
    before = fleet.global_step()
    scenario = tmp_path / "disk-full.toml"
    scenario.write_text(FULL)
    since = run("date", "--utc", "+%FT%TZ").strip()
    result = fleet.strike(str(scenario), tmp_path / "result")
    assert result["verdict"] == "passed"
    assert result["uptime"] == 1.0
    assert result["rounds_lost"] == 0
    assert all(x is not None for x in result["recovery_s"].values())
    assert fleet.global_step() > before
    logs = fleet.compose("logs", "--since", since, "--no-color", "synchronizer", "standby")
    assert "DISK_FULL" in logs, "the leader has felt it"
    fleet.wait_whole()
