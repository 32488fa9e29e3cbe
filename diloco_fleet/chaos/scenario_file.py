"""Scenarios as TOML: read, checked, shortened; those that are shipped, by name.

::

    about = "..."
    duration_s = 120            # without an end, a scenario is refused
    [fleet]                     # what is started for it
    learners = 3
    [fleet.run]                 # settings, as in the file of `diloco run`
    [steady]                    # what must hold meanwhile
    rounds_lost = 0
    [[faults]]
    fault = "kill"
    who = "random learner"
    at_s = [20, 60]
    short = { at_s = [10] }     # replaces keys in the short form
    [short]                     # the same for the whole
    duration_s = 30
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeVar

from decoupled_diloco.config import refuse_unknown
from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.chaos.scenario import AbortWhen, Fault, FleetShape, Hypothesis, Scenario

T = TypeVar("T")
Table = dict[str, Any]

SHIPPED: Final = (
    "learner-kill", "learner-churn", "leader-kill", "redis-kill", "datacenter-partition",
    "slow-link", "straggler", "everything",
)  # fmt: skip
"""Names of the shipped scenarios, in the order in which all of them are run."""

SECTIONS: Final = ("run", "trainer", "fleet")
"""Those of the settings of a fleet, without importing them, which takes seconds."""

_MAX_BYTES: Final = 1 << 20
_DEEPEST: Final = 16
"""Tables and lists within each other; dotted keys nest without any bound of the parser."""
_LARGEST: Final = (1 << 63) - 1
_SHORT: Final = "short"
_TOP: Final = ("about", "duration_s", "ready_s", "settle_s")
_TABLES: Final = ("fleet", "steady", "abort")


def load_scenario(name: str, *, short: bool = False) -> Scenario:
    """Reads a scenario.

    Args:
        name: of a shipped one, or a path that ends in ``.toml``.
        short: its short form.

    Raises:
        UsageError: CONFIG_UNKNOWN_KEY for a name or key that nobody knows, with the nearest one;
            CONFIG_INVALID for what is wrong in it.
    """
    if name.endswith(".toml"):
        path = Path(name)
        try:
            if path.stat().st_size > _MAX_BYTES or not path.is_file():
                raise OSError(f"no regular file of at most {_MAX_BYTES} bytes")
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                Reason.CONFIG_INVALID, f"scenario {path} cannot be read: {what}", path=path
            ) from error
        return parse_scenario(text, path.stem, where=str(path), short=short)
    refuse_unknown([name], SHIPPED, "diloco chaos (a file ends in .toml)", "scenario")
    shipped = resources.files("diloco_fleet.chaos") / "scenarios" / f"{name}.toml"
    text = shipped.read_text(encoding="utf-8")
    return parse_scenario(text, name, where=name, short=short)


def parse_scenario(text: str, name: str, *, where: str, short: bool = False) -> Scenario:
    """Parses the TOML of a scenario; see `load_scenario`.

    Args:
        text: the file.
        name: of the scenario.
        where: the file, for people.
        short: take the short form.
    """
    try:
        document = tomllib.loads(text)
        if _is_deep(document):
            raise ValueError(f"tables and lists within each other, more than {_DEEPEST}")
    except (ValueError, RecursionError) as error:
        raise UsageError(Reason.CONFIG_INVALID, f"scenario {where}: {error}") from error
    where = f"scenario {where}"
    refuse_unknown(document, [*_TOP, *_TABLES, "faults", _SHORT], where, "key")
    changes = _table(document.pop(_SHORT, {}), f"{where}, [short]")
    refuse_unknown(changes, [*_TOP, *_TABLES], f"{where}, [short]", "key")
    if short:
        document = _merged(document, changes)
    if "duration_s" not in document:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"{where}: it has no end: give duration_s, the seconds within which faults begin",
        )
    faults = document.pop("faults", [])
    if not isinstance(faults, list) or not faults:
        raise UsageError(
            Reason.CONFIG_INVALID, f"{where}: it has no fault; faults are tables: [[faults]]"
        )
    values: Table = {key: document[key] for key in _TOP if key in document}
    for key, cls in (("steady", Hypothesis), ("abort", AbortWhen)):
        if key in document or key == "steady":
            place = f"{where}, [{key}]"
            values[key] = _build(cls, _table(document.get(key, {}), place), place)
    if "fleet" in document:
        values["fleet"] = _fleet(document["fleet"], f"{where}, [fleet]")
    values["faults"] = tuple(
        _fault(entry, f"{where}, fault {number}", short=short)
        for number, entry in enumerate(faults, 1)
    )
    return _build(Scenario, {"name": name, **values}, where)


def _is_deep(document: Table) -> bool:
    """Whether tables and lists lie within each other more than `_DEEPEST` times."""
    values: list[Any] = [document]
    for _ in range(_DEEPEST):
        found = [value for value in values if isinstance(value, dict | list)]
        values = [x for y in found for x in (y.values() if isinstance(y, dict) else y)]
    return any(isinstance(value, dict | list) for value in values)


def _fault(entry: object, where: str, *, short: bool) -> Fault:
    table = dict(_table(entry, where))
    changes = _table(table.pop(_SHORT, {}), f"{where}, short")
    refuse_unknown(changes, [field.name for field in fields(Fault)], f"{where}, short", "key")
    return _build(Fault, {**table, **changes} if short else table, where)


def _fleet(entry: object, where: str) -> FleetShape:
    table = _table(entry, where)
    plain = {key: value for key, value in table.items() if key not in SECTIONS}
    refuse_unknown(plain, ["learners", "standby", *SECTIONS], where, "key")
    sections = {name: _table(table[name], f"{where}.{name}") for name in SECTIONS if name in table}
    return _build(FleetShape, {**plain, "settings": sections}, where)


def _table(value: object, where: str) -> Table:
    if not isinstance(value, dict):
        raise UsageError(Reason.CONFIG_INVALID, f"{where} must be a table")
    return value


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Table:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merged(typing.cast("Table", old), value) if both else value
    return merged


def _build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Makes a value of a dataclass from a table; a refusal says where it stands."""
    entries = fields(cls)  # type: ignore[arg-type]
    refuse_unknown(table, [entry.name for entry in entries], where, "key")
    hints = typing.get_type_hints(cls)
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in table.items()}
    for entry in entries:
        if entry.name not in table and entry.default is entry.default_factory is MISSING:
            raise UsageError(Reason.CONFIG_INVALID, f"{where}: {entry.name} is missing")
    try:
        return cls(**values)
    except UsageError as error:
        raise UsageError(error.reason, f"{where}: {error.message}") from error


def _convert(hint: Any, value: object, where: str) -> object:  # noqa: ANN401 - a type hint
    """Checks a value of TOML against the hint of its field."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    if typing.get_origin(hint) is tuple:
        inner = kinds[0]
        if isinstance(value, list):
            return tuple(_convert(inner, entry, where) for entry in value)
        if isinstance(value, tuple):
            return value
        raise UsageError(Reason.CONFIG_INVALID, f"{where} is {value!r}; expected a list")
    if typing.get_origin(hint) is not None and len(kinds) > 1:
        return value  # a mapping: checked where it is read
    [kind] = kinds
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise UsageError(Reason.CONFIG_INVALID, f"{where} is a number of more than 64 bits")
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _member(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    words = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
    raise UsageError(
        Reason.CONFIG_INVALID, f"{where} is {value!r}; expected {words.get(kind, 'a table')}"
    )


def _member(kind: type[StrEnum], value: object, where: str) -> StrEnum:
    place, _, noun = where.rpartition(": ")
    refuse_unknown([str(value)], list(kind), place, noun)
    return kind(str(value))
