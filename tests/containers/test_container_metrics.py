"""Prometheus, of the overlay for observability, sees the fleet as the dashboard shows it."""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.containers.compose_fleet import (
    COMPOSE,
    ComposeFleet,
    health,
    inspect,
    require_containers,
    wait_for,
)

require_containers()

FOLDER = COMPOSE / "observability"
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/decoupled-diloco.json").read_text())
QUERIES = [
    (f"{panel['title']}, {target['refId']}", target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
] + [(entry["name"], entry["expr"]) for entry in DASHBOARD["annotations"]["list"]]
QUIET = {
    "Take-overs",
    # What waits now, and pushes that were left out.
    *("What waits, A", "Waits, A", "Left out, and why, A"),
    # The fleet takes no snapshots.
    *("Newest snapshot, A", "Rounds since, A"),
}
"""Queries that may find nothing in a fleet of which nothing is amiss."""


class Prometheus:
    """The service `prometheus`.

    Args:
        port: on this machine.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, what: str, **values: str) -> dict[str, Any]:
        """The data of an answer, which must be one of success."""
        url = f"{self._url}{what}?{urllib.parse.urlencode(values)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            answer = json.loads(response.read())
        assert answer["status"] == "success", answer
        return dict(answer["data"])

    def query(self, expression: str) -> list[Any]:
        """What a query of the dashboard finds now."""
        plain = re.sub(r"\$__\w*interval", "1m", expression).replace("$learner", ".*")
        return list(self.ask("query", query=plain)["result"])


@pytest.fixture(scope="module")
def prometheus(fleet: ComposeFleet) -> Iterator[Prometheus]:
    """Started beside the fleet, and taken away again."""
    up = ("up", "--detach", "--no-build", "--no-deps", "--no-recreate", "--quiet-pull")
    fleet.compose(*up, "prometheus", overlay="observability")
    [container] = fleet.containers("prometheus")
    wait_for("Prometheus is well", lambda: health(container) == "healthy")
    yield Prometheus(fleet.prometheus_port)
    fleet.compose("rm", "--stop", "--force", "prometheus", overlay="observability")


def addresses(fleet: ComposeFleet) -> set[str]:
    """Where everybody exports metrics."""
    networks = [
        inspect(container)["NetworkSettings"]["Networks"]
        for container in fleet.containers("learner")
    ]
    found = {f"{x['IPAddress']}:8080" for entries in networks for x in entries.values()}
    return {"synchronizer:8080", "standby:8080", *found}


def test_both_synchronizers_and_every_learner_are_scraped(
    fleet: ComposeFleet, prometheus: Prometheus
) -> None:
    wanted = addresses(fleet)
    assert len(wanted) == 5

    def scraped() -> bool:
        targets = prometheus.ask("targets", state="active")["activeTargets"]
        health_of = {x["labels"]["instance"]: x["health"] for x in targets}
        return health_of == dict.fromkeys(wanted, "up")

    wait_for(f"{sorted(wanted)} are up", scraped)


def test_every_query_of_the_dashboard_is_accepted_and_finds_something(
    fleet: ComposeFleet, prometheus: Prometheus
) -> None:
    fleet.wait_whole()
    assert {where for where, _ in QUERIES} >= QUIET

    def empty() -> set[str]:
        return {where for where, expression in QUERIES if not prometheus.query(expression)}

    missing: set[str] = set()

    def all_found() -> bool:
        missing.clear()
        missing.update(empty() - QUIET)
        return not missing

    try:
        wait_for("data", all_found, patience_s=90)
    except AssertionError as error:
        raise AssertionError(f"{error} of {sorted(missing)}") from None


def test_what_prometheus_knows_is_what_the_fleet_does(
    fleet: ComposeFleet, prometheus: Prometheus
) -> None:
    def value(expression: str) -> float:
        [found] = prometheus.query(expression)
        return float(found["value"][1])

    before = wait_for("a global step", lambda: max(fleet.global_step(), 0) or None)
    wait_for("it is seen", lambda: value("max(diloco_global_step)") > before)
    assert value('sum(diloco_learners{state="live"})') == 3
    assert value("sum(diloco_leader)") == 1
    assert value("max(diloco_standbys_in_sync)") == 1


def test_every_alert_rule_is_evaluated(prometheus: Prometheus) -> None:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    wanted = {rule["alert"] for group in groups for rule in group["rules"]}

    def evaluated() -> bool:
        rules = [x for group in prometheus.ask("rules")["groups"] for x in group["rules"]]
        assert {rule["name"] for rule in rules} == wanted
        assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
        return all(rule["health"] == "ok" for rule in rules)

    wait_for("every rule is evaluated", evaluated)
