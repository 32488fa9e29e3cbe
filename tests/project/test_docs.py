"""The documents say what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest

from decoupled_diloco.errors import (
    EXIT_DRAINED,
    EXIT_INCOMPATIBLE,
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_RETRY,
    EXIT_STORAGE,
    EXIT_TOLD_TO_LEAVE,
    EXIT_USAGE,
)
from decoupled_diloco.setting_fields import settings_of
from diloco_fleet.cli import diloco
from diloco_fleet.fleet_settings import SECTIONS
from learner_client.cli import cli as diloco_learner
from learner_client.settings import LearnerSettings
from synchronizer_server.cli import cli as diloco_synchronizer
from synchronizer_server.core.rounds import diagram
from synchronizer_server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
CHAOS = (ROOT / "docs/chaos.md").read_text(encoding="utf-8")
RESILIENCE = (ROOT / "docs/resilience.md").read_text(encoding="utf-8")

KNOWN = {
    s.name
    for cls in (*SECTIONS.values(), ServerSettings, LearnerSettings)
    for s in settings_of(cls)
}


def test_the_diagram_is_drawn_from_the_table():
    [block] = re.findall(r"```mermaid\n(stateDiagram.*?)\n```", ARCHITECTURE, re.DOTALL)
    assert block == diagram()


def test_the_readme_names_settings_that_exist_with_values_that_are_accepted():
    [block] = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    for section, values in tomllib.loads(block).items():
        known = {s.name for s in settings_of(SECTIONS[section])}
        assert set(values) <= known, section
        converted = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        SECTIONS[section](**converted)


@pytest.mark.parametrize(
    ("program", "group"),
    [
        ("diloco", diloco),
        ("diloco-learner", diloco_learner),
        ("diloco-synchronizer", diloco_synchronizer),
    ],
)
def test_commands_and_flags_of_the_documents_exist(program, group):
    for text in (README, ARCHITECTURE, RESILIENCE, CHAOS):
        for command, rest in re.findall(rf"(?m)\b{program} ([a-z]+)\b([^\n`|]*)", text):
            found = group.get_command(click.Context(group), command)
            assert found is not None, f"{program} {command}"
            if isinstance(found, click.Group):
                within = rest.split()[0]
                found = found.get_command(click.Context(found), within)
                assert found is not None, f"{program} {command} {within}"
            flags = {flag for p in found.params for flag in p.opts}
            for flag in re.findall(r"(--[a-z-]+)", rest):
                assert flag in flags | {"--help"}, f"{program} {command} {flag}"


def test_the_time_outs_of_the_architecture_are_settings():
    table = ARCHITECTURE.split("## Time-outs")[1].split("## Errors")[0]
    named = set(re.findall(r"`([a-z_]+_s)`", table))
    assert named, "the table names settings"
    assert named <= KNOWN


def test_the_time_outs_of_resilience_are_all_that_are_settings():
    table = RESILIENCE.split("## Time-outs")[1].split("## How a learner comes back")[0]
    times = {name for name in KNOWN if name.endswith("_s")}
    assert set(re.findall(r"\b([a-z_]+_s)\b", table)) == times - {"checkpoint_every_s"}


def test_the_tests_that_resilience_names_exist():
    named = set(re.findall(r"\btest_\w+\.py", RESILIENCE))
    assert named
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("package", ["synchronizer_server", "learner_client", "diloco_fleet"])
def test_the_architecture_lists_every_module_once(package):
    table = ARCHITECTURE.split(f"| in `{package}` | |\n")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[1:]]
    listed = sorted(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    root = ROOT / package
    modules = [path.name for path in root.glob("*.py") if path.name != "__init__.py"]
    packages = [f"{path.parent.name}/" for path in root.glob("*/__init__.py")]
    assert listed == sorted(modules + packages)


def test_the_exit_code_of_a_drained_learner_is_what_orchestrators_are_told():
    assert EXIT_TOLD_TO_LEAVE == 80


def test_the_exit_codes_of_the_architecture_are_those_of_the_catalogue():
    table = ARCHITECTURE.split("The exit codes:")[1].split("## Vocabulary")[0]
    codes = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", table)}
    assert codes == {
        EXIT_OK,
        EXIT_USAGE,
        EXIT_INCOMPATIBLE,
        EXIT_INTERNAL,
        EXIT_STORAGE,
        EXIT_RETRY,
        EXIT_TOLD_TO_LEAVE,
        EXIT_DRAINED,
    }
