"""The fields of a settings dataclass: their kinds, and values read, checked and written."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from decoupled_diloco.errors import Reason, UsageError

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a settings dataclass, as this module sees it.

    Attributes:
        name: the field's name, also the key in a file.
        kind: str, int, float, bool, Path or tuple (of strings).
        optional: True where None is allowed.
        default: the default value, ``dataclasses.MISSING`` where the setting is required.
        help: the text for ``--help``.
        secret: True where the value must not be shown or written.
    """

    name: str
    kind: type
    optional: bool
    default: object
    help: str
    secret: bool

    @property
    def flag(self) -> str:
        """The command-line option, for example ``--num-learners``."""
        return "--" + self.name.replace("_", "-")

    @property
    def expected(self) -> str:
        """What a value of this setting looks like, in words."""
        words = {
            str: "a text",
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            Path: "a path",
            tuple: "a list of texts",
        }
        return words[self.kind]


def setting(default: Any, help_text: str, *, secret: bool = False) -> Any:  # noqa: ANN401 - as field
    """A field of a settings dataclass: its default, and what its extremes do, for ``--help``."""
    return dataclasses.field(default=default, metadata={"help": help_text, "secret": secret})


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings of a dataclass, in the order of its fields.

    Args:
        cls: a dataclass whose fields have the types that the module's text names.
    """
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        kind, optional = _kind_of(hints[field.name])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append(
            Setting(
                name=field.name,
                kind=kind,
                optional=optional,
                default=default,
                help=str(field.metadata.get("help", "")),
                secret=bool(field.metadata.get("secret", False)),
            )
        )
    return tuple(found)


def _kind_of(hint: object) -> tuple[type, bool]:
    """Splits a type hint into its plain kind and whether None is allowed."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        optional = len(inner) < len(typing.get_args(hint))
        assert len(inner) == 1, f"a setting has one type, not {hint}"
        hint = inner[0]
    if typing.get_origin(hint) is tuple:
        assert typing.get_args(hint) == (str, ...), f"only tuples of texts are settings, not {hint}"
        return tuple, optional
    assert hint in (str, int, float, bool, Path), f"no setting can have the type {hint}"
    return typing.cast("type", hint), optional


def _wrong(setting: Setting, value: object, where: str) -> UsageError:
    shown = "***" if setting.secret else repr(value)
    return UsageError(
        Reason.CONFIG_INVALID,
        f"{where}: {setting.name} is {shown}; expected {setting.expected}",
        key=setting.name,
    )


def check_native(setting: Setting, value: object, where: str) -> object:
    """Checks a value that has a type already (TOML or click) and brings it to the field's type."""
    kind = setting.kind
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    if kind is tuple and isinstance(value, list | tuple):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
    elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    raise _wrong(setting, value, where)


def parse_text(setting: Setting, text: str, where: str) -> object:
    """Reads the text of an environment variable as the field's type."""
    if setting.optional and text.lower() in {"", "none"}:
        return None
    if setting.kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise _wrong(setting, text, where)
    if setting.kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if setting.kind in (int, float):
        try:
            return setting.kind(text)
        except ValueError as error:
            raise _wrong(setting, text, where) from error
    return check_native(setting, text, where)


def toml_value(value: object) -> str:
    """One value in TOML syntax (numbers, texts, truth values, lists of texts)."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
