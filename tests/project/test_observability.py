"""Dashboard, alert rules and documents speak of metrics that the code exports, and of no others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from decoupled_diloco.errors import Reason
from decoupled_diloco.metrics import BUILD_INFO, Kind, MetricSpec, Sheet
from decoupled_diloco.setting_fields import settings_of
from diloco_fleet.cli import diloco
from diloco_fleet.fleet_settings import SECTIONS
from learner_client.core.connection import State
from learner_client.metrics import TABLE as LEARNER
from learner_client.settings import LearnerSettings
from synchronizer_server.core.effects import Outcome
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.metric_table import FORGOTTEN_S, MOST_LEARNERS
from synchronizer_server.metric_table import TABLE as SYNCHRONIZER
from synchronizer_server.metrics import STATES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "compose" / "observability"
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
RULES_TEST = Path(__file__).with_name("alert_cases.yml")
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/decoupled-diloco.json").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
CONFIG = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGET_LABELS = {"job", "instance", "le"}
GRID_COLUMNS = 24


def sampled(spec: MetricSpec) -> list[str]:
    """Names under which a metric is queried."""
    parts = {
        Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
        Kind.SUMMARY: ("_sum", "_count"),
    }.get(spec.kind, ("",))
    return [spec.name + part for part in parts]


SPECS = {name: spec for spec in (*SYNCHRONIZER, *LEARNER) for name in sampled(spec)}
LEARNER_SPECS = {spec.name for spec in LEARNER} - {BUILD_INFO.name}


def labels_of(name: str) -> set[str]:
    own = {"learner"} if SPECS[name].name in LEARNER_SPECS else set()
    return {*SPECS[name].labels, *own, *TARGET_LABELS}


def wait_words() -> set[str]:
    table = ARCHITECTURE.split("## Waiting has a reason")[1].split("## Time-outs")[0]
    return set(re.findall(r"`([a-z_]+)`", table))


LABEL_VALUES = {
    "state": {*STATES, *map(str, LearnerState), *map(str, State), "free", "leased"},
    "reason": {*map(str, Reason), *wait_words(), "join", "data"},
    "outcome": set(map(str, Outcome)),
    "subject": {"round", "seed", "snapshot", "data", "recovery", "leadership"},
    "part": {"step", "quorum", "sync", "grace", "opening"},
    "result": {"complete", "failed"},
    "leg": {"push", "update", "observer"},
    "job": {job["job_name"] for job in CONFIG["scrape_configs"]},
}


def problems(expression: str) -> Iterator[str]:
    """What in a query the code does not export, in words."""
    for name in re.findall(r"\bdiloco_\w+", expression):
        if name not in SPECS:
            yield f"{name}: no such metric"
    for name, matchers in re.findall(r"\b(\w+)\{([^}]*)\}", expression):
        for label, values in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
            if name in SPECS and label not in labels_of(name):
                yield f"{name} has no label {label}"
            for value in [] if "$" in values else values.split("|"):
                if value not in LABEL_VALUES.get(label, {value}):
                    yield f"{label} is never {value}"


def queries() -> Iterator[tuple[str, str]]:
    """Every query, with where it stands."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield (
                variable["name"],
                re.fullmatch(r"label_values\((\w+), \w+\)", variable["query"]["query"])[1],
            )
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]


def test_every_query_is_of_metrics_labels_and_values_that_the_code_exports():
    found = [f"{where}: {what}" for where, query in queries() for what in problems(query)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "query",
    [
        "diloco_nothing",
        "rate(diloco_merge_duration_seconds[1m])",
        'diloco_learners{colour="red"}',
        'diloco_learners{state="tired"}',
        'diloco_wait_seconds{reason=~"quorum|weather"}',
        'up{job="other"} == 0',
    ],
)
def test_a_query_of_something_else_is_caught(query):
    assert list(problems(query))


# -- documents -----------------------------------------------------------------------------------


def rows(title: str) -> list[str]:
    section = OPERATIONS.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"(?m)^\| `diloco_.*$", section)


@pytest.mark.parametrize(
    ("title", "table"),
    [
        ("Metrics of a synchronizer", SYNCHRONIZER),
        ("Metrics of a learner", tuple(spec for spec in LEARNER if spec is not BUILD_INFO)),
    ],
)
def test_the_documents_list_every_metric_as_the_code_describes_it(title, table):
    wanted = [
        f"| `{s.name}` | {s.kind} | {', '.join(f'`{x}`' for x in s.labels)} | {s.text} |"
        for s in table
    ]
    assert rows(title) == wanted


def test_the_documents_say_when_a_learner_is_forgotten():
    words = OPERATIONS.replace("\n", " ")
    assert f"or {FORGOTTEN_S / 60:.0f} minutes after it was last heard" in words
    assert f"of more than {MOST_LEARNERS} learners" in words


def test_the_documents_name_no_metric_that_is_not_there():
    names = set(re.findall(r"\bdiloco_\w+", OPERATIONS))
    known = {*SPECS, *(spec.name for spec in (*SYNCHRONIZER, *LEARNER))}
    assert names <= known


def test_every_alert_has_a_runbook_that_says_what_it_means_what_to_check_and_what_to_do():
    sections = dict(re.findall(r"(?ms)^### (\w+)\n(.*?)(?=^### |\Z)", OPERATIONS))
    assert sorted(sections) == sorted(rule["alert"] for rule in ALERTS)
    for rule in ALERTS:
        name = rule["alert"]
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
        assert rule["annotations"]["summary"].endswith("."), name
        assert rule["labels"]["severity"] in {"critical", "warning"}, name
        for word in ("Meaning", "Check", "Remedy"):
            assert f"- **{word}**: " in sections[name], f"{name}: {word}"


def test_the_runbooks_name_commands_and_settings_that_exist():
    for name in re.findall(r"`diloco ([a-z]+)\b", OPERATIONS):
        assert diloco.get_command(click.Context(diloco), name) is not None, name
    known = {s.name for cls in (*SECTIONS.values(), LearnerSettings) for s in settings_of(cls)}
    alerts = OPERATIONS.split("## Alerts")[1]
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?: = [a-z-]+)?`", alerts))
    named = {x for x in named if not x.startswith("diloco_")}
    assert {"sync_interval", "norm_bound_factor"} <= named
    assert named - {"store_lost"} <= known


def test_the_links_of_the_runbooks_lead_somewhere():
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"(?m)^#+ (.*)$", OPERATIONS)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", OPERATIONS)) <= anchors


# -- dashboard -----------------------------------------------------------------------------------


def test_the_dashboard_is_found_by_its_uid_and_asks_the_data_source_that_is_chosen():
    assert DASHBOARD["uid"] == "decoupled-diloco"
    assert "id" not in DASHBOARD, "that is given where it is loaded"
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"

    def sources(value: Any) -> Iterator[object]:
        if isinstance(value, dict):
            if "datasource" in value:
                yield value["datasource"]
            for inner in value.values():
                yield from sources(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from sources(inner)

    assert all(x == {"type": "prometheus", "uid": "${datasource}"} for x in sources(DASHBOARD))


def test_panels_say_what_they_show_and_do_not_cover_each_other():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= GRID_COLUMNS, panel["title"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            asked = set().union(
                *(labels_of(x) for x in re.findall(r"\bdiloco_\w+", target["expr"]))
            )
            assert shown <= asked, panel["title"]


def test_what_is_provisioned_is_what_is_mounted():
    [provider] = yaml.safe_load(
        (FOLDER / "grafana/provisioning/dashboards/diloco.yml").read_text()
    )["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    [source] = yaml.safe_load(
        (FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")


# -- promtool ------------------------------------------------------------------------------------


def promtool(*arguments: str, given: bytes = b"") -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not on PATH; Debian has it in the package prometheus")
    done = subprocess.run(
        [program, *arguments], check=False, capture_output=True, input=given, timeout=60
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("table", [SYNCHRONIZER, LEARNER])
def test_promtool_finds_nothing_wrong_with_names_and_texts(table):
    sheet = Sheet(table)
    for spec in table:
        labels = dict.fromkeys(spec.labels, "x")
        if spec.kind is Kind.HISTOGRAM:
            sheet.histogram(spec.name, spec.histogram((1.0,)))
        elif spec.kind is Kind.SUMMARY:
            sheet.summary(spec.name, count=1, total=1.0, **labels)
        else:
            sheet.put(spec.name, 1.0, **labels)
    registry = CollectorRegistry()
    registry.collect = sheet.families
    promtool("check", "metrics", given=generate_latest(registry))


def test_every_alert_has_a_case_in_which_it_fires():
    cases = yaml.safe_load(RULES_TEST.read_text())["tests"]
    asked = [alert for case in cases for alert in case["alert_rule_test"]]
    assert {x["alertname"] for x in asked if x["exp_alerts"]} == {x["alert"] for x in ALERTS}


def test_promtool_accepts_configuration_and_rules():
    promtool("check", "config", str(FOLDER / "prometheus.yml"))


def test_alerts_fire_when_they_should_and_not_before():
    promtool("test", "rules", str(RULES_TEST))


def test_promtool_can_read_every_query_of_the_dashboard(tmp_path):
    asked = [
        re.sub(r"\$__\w*interval", "1m", target["expr"]).replace("$learner", ".*")
        for panel in PANELS
        for target in panel["targets"]
    ]
    rules = [{"record": f"query:{i}", "expr": expression} for i, expression in enumerate(asked)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(path))
