"""What compose/ and the Dockerfile promise, as far as it can be read: no engine is needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from decoupled_diloco.config import ENV_PREFIX
from decoupled_diloco.health import cli as diloco_health
from decoupled_diloco.setting_fields import settings_of
from decoupled_diloco.settings import RunSettings
from diloco_fleet.cli import diloco
from diloco_fleet.fleet_settings import SECTIONS
from learner_client.cli import cli as diloco_learner
from synchronizer_server.cli import cli as diloco_synchronizer
from synchronizer_server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
FILES = ("compose", "observability", "chaos", "small-disks")
TEXTS = {name: (ROOT / "compose" / f"{name}.yaml").read_text() for name in FILES}
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROLE = "org.decoupled-diloco.role"
PROGRAMS = {
    "diloco": diloco,
    "diloco-health": diloco_health,
    "diloco-learner": diloco_learner,
    "diloco-synchronizer": diloco_synchronizer,
}
ENDS = {"prepare", "export", "generate"}
"""Services that end by themselves."""

Service = dict[str, Any]


def services(*names: str) -> dict[str, Service]:
    found: dict[str, Service] = {}
    for name in names or FILES:
        for service, values in yaml.safe_load(TEXTS[name])["services"].items():
            found[service] = {**found.get(service, {}), **values}
    return found


SERVICES = services()


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def entrypoint(values: Service) -> list[str]:
    """What a service of ours runs: entry point and command."""
    default = "diloco-synchronizer" if "/synchronizer:" in values["image"] else "diloco-learner"
    return [*values.get("entrypoint", [default]), *values.get("command", [])]


def check_command(words: list[str]) -> None:
    """Every flag of a command line exists."""
    group = PROGRAMS[words[0]]
    command = group.get_command(click.Context(group), words[1])
    assert command is not None, words
    flags = {flag for parameter in command.params for flag in parameter.opts}
    for word in words[2:]:
        assert not word.startswith("--") or word.partition("=")[0] in flags, word


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened_and_says_its_role(name: str) -> None:
    values = SERVICES[name]
    assert values["labels"][ROLE]
    assert values["read_only"] is True
    assert values["init"] is True
    assert values["cap_drop"] == ["ALL"]
    assert values["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "pid", "ipc", "devices"} & set(values)
    assert values.get("cap_add", []) == (["NET_ADMIN"] if name == "link" else [])


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_long_lived_is_checked_and_started_again(name: str) -> None:
    values = SERVICES[name]
    if name in ENDS:
        assert values["healthcheck"] == {"disable": True}
    else:
        assert values["restart"] in {"unless-stopped", "on-failure"}
        assert values["healthcheck"]["test"]
        for other, condition in values.get("depends_on", {}).items():
            states = {"prepare": "completed_successfully", "standby": "started"}
            wanted = states.get(other, "healthy")
            assert condition == {"condition": f"service_{wanted}"}


def test_roles_are_those_that_faults_look_for() -> None:
    roles = {name: values["labels"][ROLE] for name, values in services("compose").items()}
    assert {name for name, role in roles.items() if role == "learner"} == {"learner", "learner-b"}
    assert {name for name, role in roles.items() if role == "synchronizer"} == {
        "synchronizer",
        "standby",
    }
    assert (roles["redis"], roles["evaluator"]) == ("redis", "evaluator")


def test_a_synchronizer_has_more_time_to_stop_than_it_takes() -> None:
    for name in ("synchronizer", "standby"):
        assert seconds(SERVICES[name]["stop_grace_period"]) > 2 * ServerSettings().drain_s


def test_redis_is_on_the_network_of_the_synchronizers_alone() -> None:
    assert yaml.safe_load(TEXTS["compose"])["networks"]["hub"] == {"internal": True}
    on_hub = {name for name, values in SERVICES.items() if "hub" in values.get("networks", [])}
    assert SERVICES["redis"]["networks"] == ["hub"]
    assert on_hub == {"redis", "synchronizer", "standby"}


def test_prometheus_scrapes_every_synchronizer_and_learner_and_nothing_that_is_not_there() -> None:
    path = ROOT / "compose" / "observability" / "prometheus.yml"
    targets: set[tuple[str, int]] = set()
    for job in yaml.safe_load(path.read_text())["scrape_configs"]:
        for static in job.get("static_configs", []):
            for name, _, port in (target.partition(":") for target in static["targets"]):
                targets.add((name, int(port)))
        for found in job.get("dns_sd_configs", []):
            targets |= {(name, found["port"]) for name in found["names"]}
    exporting = {
        (name, int(address.rpartition(":")[2]))
        for name, values in services("compose").items()
        for address in (
            values.get("environment", {}).get("DILOCO_HTTP_ADDRESS"),
            *(word for word in values.get("command", []) if word.startswith("--metrics-address=")),
        )
        if address
    }
    assert targets == exporting
    assert {SERVICES[name]["labels"][ROLE] for name, _ in targets} == {"synchronizer", "learner"}
    for name, _ in targets:
        assert set(SERVICES[name]["networks"]) & set(SERVICES["prometheus"]["networks"]), name


def test_small_disks_take_the_place_of_the_stores() -> None:
    for values in services("small-disks").values():
        [disk] = values["tmpfs"]
        target, _, options = disk.partition(":")
        assert target == values["environment"]["DILOCO_STORE"]
        assert "size=${STORE_SIZE:-256m}" in options
        owner = dict(option.partition("=")[::2] for option in options.split(","))
        assert f"\nUSER {owner['uid']}:{owner['gid']}\n" in DOCKERFILE, "its user writes to it"
    assert set(services("small-disks")) == {"synchronizer", "standby"}


def test_ports_are_published_on_loopback_alone() -> None:
    ports = [port for values in SERVICES.values() for port in values.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_commands_and_checks_exist(name: str) -> None:
    values = SERVICES[name]
    if "decoupled-diloco/" in values["image"] and name != "link":
        words = entrypoint(values)
        # `run --rm generate --prompt ...` adds to it.
        check_command(words)
    test = values["healthcheck"].get("test", [])
    if test[1:2] == ["diloco-health"]:
        check_command(test[1:])


def test_the_commands_of_the_dockerfile_exist() -> None:
    lines = DOCKERFILE.replace("\\\n", " ")
    found = [
        re.findall(r'"([^"]+)"', line)
        for line in re.findall(r"(?m)^(?:HEALTHCHECK.*?|)\s*(?:CMD|ENTRYPOINT) (\[.*\])$", lines)
    ]
    entries = [words for words in found if len(words) == 1]
    assert entries == [["diloco-synchronizer"], ["diloco-learner"]]
    checks = [words for words in found if words[0] == "diloco-health"]
    assert len(checks) == 2
    for words in checks:
        check_command(words)
    check_command(["diloco-synchronizer", *next(x for x in found if x[0] == "serve")])
    check_command(["diloco-learner", *next(x for x in found if x[0] == "train")])


def test_variables_are_settings_of_the_process_that_gets_them() -> None:
    known = {
        "prepare": [s for cls in SECTIONS.values() for s in settings_of(cls)],
        "synchronizer": [*settings_of(RunSettings), *settings_of(ServerSettings)],
        "standby": [*settings_of(RunSettings), *settings_of(ServerSettings)],
    }
    for name, values in SERVICES.items():
        given = {x for x in values.get("environment", {}) if x.startswith(ENV_PREFIX)}
        assert given <= {ENV_PREFIX + s.name.upper() for s in known.get(name, [])}, name


def test_the_example_names_every_variable_and_its_default() -> None:
    example = (ROOT / "compose" / ".env.example").read_text()
    named = dict(re.findall(r"(?m)^#([A-Z_]+)=(.*)$", example))
    used = {
        variable: default
        for text in TEXTS.values()
        for variable, default in re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text)
    }
    passed = {x for x, value in SERVICES["prepare"]["environment"].items() if value is None}
    assert set(named) == set(used) | passed
    differing = {k: v for k, v in used.items() if k != "DATA_DIR" and named[k] != v}
    assert not differing
    defaults = {
        s.name: s.default for name in ("run", "trainer") for s in settings_of(SECTIONS[name])
    }
    for variable in passed - {"DILOCO_TOTAL_GLOBAL_STEPS"}:
        assert named[variable] == str(defaults[variable.removeprefix(ENV_PREFIX).lower()])


def test_the_image_is_of_this_version_and_not_of_root() -> None:
    assert re.findall(r"(?m)^ARG VERSION=(.*)$", DOCKERFILE) == [PROJECT["version"]]
    assert re.findall(r"(?m)^USER (.*)$", DOCKERFILE) == ["10001:10001"]


def test_an_image_needs_the_dependencies_and_no_tools() -> None:
    script = ROOT / "scripts" / "image_requirements.py"
    done = subprocess.run(
        [sys.executable, script, "fast"], check=True, capture_output=True, text=True
    )
    extras = PROJECT["optional-dependencies"]
    assert done.stdout.split("\n")[:-1] == [*PROJECT["dependencies"], *extras["fast"]]


def test_an_image_is_made_of_what_the_dockerfile_copies_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for sources in re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", DOCKERFILE)
        for source in sources.split()
    }
    assert lines[1] == "*"
    assert allowed == copied | {"wheels"}
