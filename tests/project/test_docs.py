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
    EXIT_USAGE,
)
from decoupled_diloco.setting_fields import settings_of
from diloco_fleet.cli import diloco
from diloco_fleet.fleet_settings import SECTIONS
from learner_client.cli import cli as diloco_learner
from synchronizer_server.cli import cli as diloco_synchronizer
from synchronizer_server.core.rounds import diagram
from synchronizer_server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_the_diagram_is_drawn_from_the_table():
    [block] = re.findall(r"```mermaid\n(.*?)\n```", ARCHITECTURE, re.DOTALL)
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
    for text in (README, ARCHITECTURE):
        for command, rest in re.findall(rf"(?m)\b{program} ([a-z]+)\b([^\n`|]*)", text):
            found = group.get_command(click.Context(group), command)
            assert found is not None, f"{program} {command}"
            flags = {flag for p in found.params for flag in p.opts}
            for flag in re.findall(r"(--[a-z-]+)", rest):
                assert flag in flags | {"--help"}, f"{program} {command} {flag}"


def test_the_time_outs_of_the_architecture_are_settings():
    table = ARCHITECTURE.split("## Time-outs")[1].split("## Errors")[0]
    known = {s.name for cls in (*SECTIONS.values(), ServerSettings) for s in settings_of(cls)}
    named = set(re.findall(r"`([a-z_]+_s)`", table))
    assert named, "the table names settings"
    assert named <= known


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
        EXIT_DRAINED,
    }
