"""Settings from four sources with one precedence: flag > environment > TOML file > default.

Settings are frozen dataclasses. A field's type is one of str, int, float, bool, Path,
``tuple[str, ...]`` or one of these ``| None``; its metadata holds ``help`` (what it does and what
each extreme costs) and, for what must not be shown or written, ``secret=True``.

One file serves several dataclasses, a section (table) each; what nobody knows is refused with the
nearest known name, so that a typing mistake never becomes a silently ignored setting.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import functools
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, NoReturn, ParamSpec, TypeVar

import click

from decoupled_diloco.errors import CATALOGUE, EXIT_USAGE, DilocoError, Reason, UsageError
from decoupled_diloco.fault_points import VARIABLE as FAULTS
from decoupled_diloco.setting_fields import (
    Setting,
    check_native,
    parse_text,
    settings_of,
    toml_value,
)

T = TypeVar("T")
P = ParamSpec("P")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])
Origin = Literal["flag", "env", "file", "default"]

_MAX_FILE_BYTES: Final = 1 << 20
ENV_PREFIX: Final = "DILOCO_"
"""Prefix of the environment variables that carry settings: ``DILOCO_QUORUM`` sets ``quorum``."""

EXIT_INTERRUPTED: Final = 130
"""Exit code after Ctrl-C where the command did not drain by itself."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[T]):
    """Resolved settings and where each of them came from.

    Attributes:
        value: the settings.
        origins: source of each setting, by name.
        section: section of the file that holds them; None for the top level.
    """

    value: T
    origins: Mapping[str, Origin]
    section: str | None = None

    def describe(self) -> list[str]:
        """One line per setting that is not the default: ``section.name = value  (origin)``."""
        lines = []
        prefix = f"{self.section}." if self.section else ""
        for setting in settings_of(type(self.value)):
            origin = self.origins[setting.name]
            if origin != "default":
                value = getattr(self.value, setting.name)
                text = "***" if setting.secret else toml_value(value)
                lines.append(f"{prefix}{setting.name} = {text}  ({origin})")
        return lines

    def to_toml(self) -> str:
        """The resolved settings as a section of a TOML file, from which they load again.

        Secrets, and optional settings that are not set, are left out.
        """
        lines = [f"[{self.section}]"] if self.section else []
        for setting in settings_of(type(self.value)):
            value = getattr(self.value, setting.name)
            if value is not None and not setting.secret:
                lines.append(f"{setting.name} = {toml_value(value)}")
        return "\n".join(lines) + "\n"


def load_settings(
    cls: type[T],
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
    section: str | None = None,
    others: Mapping[str, type[Any]] = MappingProxyType({}),
    prefix: str = ENV_PREFIX,
) -> Loaded[T]:
    """Resolves the settings of one dataclass.

    Args:
        cls: frozen dataclass to fill; it checks its own values in ``__post_init__``.
        flags: parameters of the command line by name. None and an empty tuple mean "not given";
            names that are no settings of ``cls`` are left to the caller.
        environ: the environment, usually ``os.environ``.
        file: TOML file, or None.
        section: table of the file that holds these settings; None for its top level.
        others: the other sections of the same file with their dataclasses. Their sections in the
            file and their variables in the environment are known, all the rest is refused.
        prefix: prefix of the environment variables.

    Raises:
        UsageError: CONFIG_UNKNOWN_KEY for a key or variable that nobody knows (with the nearest
            name), CONFIG_INVALID for a wrong type, a missing required setting or a file that
            cannot be read; and what ``cls`` itself raises.
    """
    in_file = read_section(file, section, cls, others) if file is not None else {}
    check_environ(environ, [cls, *others.values()], prefix=prefix)
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for setting in settings_of(cls):
        name, variable = setting.name, prefix + setting.name.upper()
        flag = flags.get(name)
        if flag is not None and flag != ():
            origins[name], values[name] = (
                "flag",
                check_native(setting, flag, f"flag {setting.flag}"),
            )
        elif variable in environ:
            text = environ[variable]
            origins[name], values[name] = "env", parse_text(setting, text, f"variable {variable}")
        elif name in in_file:
            where = f"{file}, {_key(section, name)}"
            origins[name], values[name] = "file", check_native(setting, in_file[name], where)
        elif setting.default is dataclasses.MISSING:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"{name} must be given: {setting.flag}, {variable} or {_key(section, name)} "
                "in the configuration file",
            )
        else:
            origins[name], values[name] = "default", setting.default
    return Loaded(
        value=_construct(cls, values, origins, prefix),
        origins=MappingProxyType(origins),
        section=section,
    )


def _construct(
    cls: type[T], values: Mapping[str, object], origins: Mapping[str, Origin], prefix: str
) -> T:
    """Builds the dataclass; a refusal says where the settings that it names came from."""

    def source(name: str) -> str:
        flag = "--" + name.replace("_", "-")
        return {"flag": flag, "env": prefix + name.upper(), "file": "the file"}[origins[name]]

    try:
        return cls(**values)
    except UsageError as error:
        named = [
            f"{name} from {source(name)}"
            for name, origin in origins.items()
            if origin != "default" and re.search(rf"\b{re.escape(name)}\b", error.message)
        ]
        if not named:
            raise
        raise UsageError(
            error.reason, f"{error.message} ({', '.join(named)})", **error.details
        ) from error


def read_section(
    file: Path,
    section: str | None,
    cls: type[Any],
    others: Mapping[str, type[Any]] = MappingProxyType({}),
) -> dict[str, object]:
    """Reads one section of a TOML file and refuses what it does not know.

    Raises:
        UsageError: CONFIG_INVALID for a file that cannot be read or parsed, CONFIG_UNKNOWN_KEY for
            a section or key that nobody knows.
    """
    try:
        size = file.stat().st_size
        if not file.is_file() or size > _MAX_FILE_BYTES:
            raise ValueError(f"it is no regular file of at most {_MAX_FILE_BYTES} bytes")
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            Reason.CONFIG_INVALID, f"configuration file {file} cannot be read: {what}", path=file
        ) from error
    classes = dict(others) if section is None else {section: cls, **others}
    tables = {key: value for key, value in document.items() if key in classes}
    if section is None:
        top = {key: value for key, value in document.items() if key not in classes}
        refuse_unknown(top, [s.name for s in settings_of(cls)] + [*classes], str(file), "key")
    else:
        top = {}
        refuse_unknown(document, classes, str(file), "section")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(Reason.CONFIG_INVALID, f"{file}: {name} must be a section: [{name}]")
        known = [setting.name for setting in settings_of(classes[name])]
        refuse_unknown(table, known, f"{file}, section [{name}]", "key")
    return top if section is None else tables.get(section, {})


def check_environ(
    environ: Mapping[str, str], classes: Iterable[type[Any]], *, prefix: str = ENV_PREFIX
) -> None:
    """Refuses variables with our prefix that are no setting of any of the classes.

    Raises:
        UsageError: CONFIG_UNKNOWN_KEY with the nearest name.
    """
    known = [prefix + setting.name.upper() for cls in classes for setting in settings_of(cls)]
    ours = [name for name in environ if name.startswith(prefix) and name != FAULTS]
    refuse_unknown(ours, known, "the environment", "variable")


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str, noun: str) -> None:
    """Refuses names that nobody knows.

    Args:
        given: names that were given.
        known: names that there are.
        where: place, for people.
        noun: what the names are.

    Raises:
        UsageError: CONFIG_UNKNOWN_KEY with the nearest name.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise UsageError(
                Reason.CONFIG_UNKNOWN_KEY, f"{where}: unknown {noun} {name}; {hint}", key=name
            )


def _key(section: str | None, name: str) -> str:
    return f"[{section}] {name}" if section else name


def click_options(
    cls: type[Any], *, include: Collection[str] | None = None, exclude: Collection[str] = ()
) -> Callable[[CommandT], CommandT]:
    """Decorates a click command with one option per setting.

    The options default to None so that ``load_settings`` sees which of them were given; the true
    default stands in the help text. A list is given by repeating its option.

    Args:
        cls: the settings dataclass.
        include: names of the settings to offer; all where None.
        exclude: names of the settings to leave out.
    """
    chosen = [
        setting
        for setting in settings_of(cls)
        if setting.name not in exclude and (include is None or setting.name in include)
    ]

    def decorate(command: CommandT) -> CommandT:
        for setting in reversed(chosen):
            command = _option(setting)(command)
        return command

    return decorate


def _option(setting: Setting) -> Callable[[CommandT], CommandT]:
    click_types = {int: click.INT, float: click.FLOAT, Path: click.Path(path_type=Path)}
    help_text = setting.help
    if setting.default is not dataclasses.MISSING and setting.default not in (None, "", ()):
        help_text += f" [default: {toml_value(setting.default).strip(chr(34))}]"
    negative = setting.flag.replace("--", "--no-", 1)
    if setting.kind is bool:
        return click.option(
            f"{setting.flag}/{negative}", setting.name, default=None, help=help_text
        )
    return click.option(
        setting.flag,
        setting.name,
        type=click_types.get(setting.kind, click.STRING),
        multiple=setting.kind is tuple,
        default=None,
        help=help_text,
    )


def cli_errors(main: Callable[P, object]) -> Callable[P, NoReturn]:
    """Decorates the entry point of a CLI: every failure becomes one line and an exit code.

    The entry point calls its click command with ``standalone_mode=False``. An int that it returns
    is the exit code, anything else means 0. A fault of ours prints ``error: REASON: message`` on
    stderr and exits with its code; a mistake in the arguments exits with 64; what
    nobody expected is logged with its traceback and exits with 70.
    """

    @functools.wraps(main)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> NoReturn:
        try:
            result = main(*args, **kwargs)
        except DilocoError as error:
            _fail(error.reason, error.message, exit_code=error.exit_code)
        except click.exceptions.Exit as stop:
            sys.exit(stop.exit_code)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(EXIT_USAGE)
        except click.ClickException as error:
            unknown = isinstance(error, click.NoSuchOption)
            reason = Reason.CONFIG_UNKNOWN_KEY if unknown else Reason.CONFIG_INVALID
            _fail(reason, error.format_message(), exit_code=EXIT_USAGE)
        except (KeyboardInterrupt, click.Abort):
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                _fail(Reason.DISK_FULL, f"{error}; free some space and start again")
            logger.exception("unexpected error")
            _fail(Reason.INTERNAL, f"{type(error).__name__}: {error}")
        sys.exit(result if isinstance(result, int) else 0)

    return wrapper


def _fail(reason: Reason, message: str, *, exit_code: int | None = None) -> NoReturn:
    click.echo(f"error: {reason}: {' '.join(message.split())}", err=True)
    sys.exit(CATALOGUE[reason].exit_code if exit_code is None else exit_code)
