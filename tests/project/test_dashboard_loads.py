"""The dashboard is one that Grafana loads, by Grafana's own model of dashboards."""

from __future__ import annotations

import copy
import json
import typing
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus, stat, timeseries

with warnings.catch_warnings():
    # Its authors prefer the next schema, of which this file is none.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel, RowPanel

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads(
    (ROOT / "compose/observability/grafana/dashboards/decoupled-diloco.json").read_text()
)
OPTIONS = {"stat": stat.Options, "timeseries": timeseries.Options}
FIELDS = {"timeseries": timeseries.FieldConfig}


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    register_default_plugins()


def unknown(given: object, known: object, where: str = "") -> Iterator[str]:
    """What a dashboard says that the model has not kept."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key not in known:
                # The model writes no null where it has no value.
                yield from [] if value is None else [f"{where}.{key} is unknown"]
            else:
                yield from unknown(value, known[key], f"{where}.{key}")
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for index, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from unknown(one, other, f"{where}[{index}]")
    elif given != known:
        yield f"{where} is {known!r} instead of {given!r}"


def mistyped(value: object, hint: Any, where: str = "") -> Iterator[str]:
    """Values that are not of the type that the model says they have."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if type(value).__module__.startswith("grafana_foundation_sdk") and not isinstance(value, Enum):
        hints = typing.get_type_hints(type(value))
        for name, entry in vars(value).items():
            yield from mistyped(entry, hints[name], f"{where}.{name}")
    elif origin in (Union, UnionType):
        found = [list(mistyped(value, one, where)) for one in inner]
        yield from [] if [] in found else found[0]
    elif origin is list and isinstance(value, list):
        for index, entry in enumerate(value):
            yield from mistyped(entry, inner[0], f"{where}[{index}]")
    elif origin is dict and isinstance(value, dict):
        for key, entry in value.items():
            yield from mistyped(entry, inner[1], f"{where}.{key}")
    elif origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        choices = inner or [member.value for member in hint]
        if value not in choices:
            yield f"{where} is {value!r}; one of {choices}"
    elif hint not in (object, Any):
        kinds = (int, float) if hint is float else origin or hint
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            yield f"{where} is {value!r}; expected {hint}"


def problems(text: dict[str, Any]) -> list[str]:
    """What is wrong with a dashboard."""
    loaded = Dashboard.from_json(text)
    written = json.loads(json.dumps(loaded, cls=JSONEncoder))
    return [*unknown(text, written), *mistyped(loaded, Dashboard)]


def test_grafana_knows_everything_that_the_dashboard_says() -> None:
    assert problems(DASHBOARD) == []


def test_every_panel_is_one_that_grafana_has_and_asks_prometheus() -> None:
    panels = Dashboard.from_json(DASHBOARD).panels
    assert len(panels) == len(DASHBOARD["panels"])
    for panel in panels:
        if isinstance(panel, RowPanel):
            continue
        assert isinstance(panel, Panel)
        assert isinstance(panel.options, OPTIONS[panel.type_val]), panel.title
        custom = panel.field_config.defaults.custom
        assert custom is None or isinstance(custom, FIELDS[panel.type_val]), panel.title
        assert panel.targets, panel.title
        assert all(isinstance(x, prometheus.Dataquery) for x in panel.targets), panel.title


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("panels", 1, "options", "colourMode"), "value", "colourMode is unknown"),
        (("panels", 1, "options", "colorMode"), "loud", "loud"),
        (("panels", 1, "targets", 0, "expression"), "up", "expression is unknown"),
        (("panels", 1, "targets", 0, "instant"), "yes", "instant"),
        (("panels", 1, "gridPos", "w"), "half", "half"),
        (("panels", 10, "fieldConfig", "defaults", "custom", "lineWidth"), "2", "line_width"),
        (("templating", "list", 1, "type"), "question", "question"),
    ],
)
def test_a_dashboard_with_a_mistake_is_caught(
    path: tuple[str | int, ...], value: object, words: str
) -> None:
    spoiled = copy.deepcopy(DASHBOARD)
    place: Any = spoiled
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert words in "\n".join(problems(spoiled))
