"""Strict JSON: every key present, no other key, every type exact.

Whatever is read back is checked as if a stranger had written it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Final, TypeVar

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Incarnation

_MAX_INTEGER: Final = 2**63 - 1

_T = TypeVar("_T")


def canonical_json(value: object) -> str:
    """Returns ``value`` as JSON with sorted keys and no white space.

    Raises:
        ValueError: for a NaN or an infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def strict_json(text: str | bytes, where: str) -> object:
    """Parses JSON without the leniency of ``json``: no repeated keys, no NaN, no infinity.

    Raises:
        DilocoError: ``STORE_CORRUPT``, naming ``where``.
    """

    def refuse_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice")
        return result

    def refuse_constant(name: str) -> object:
        raise ValueError(f"{name} is not a number")

    try:
        parsed: object = json.loads(
            text, object_pairs_hook=refuse_repeats, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"not valid JSON ({error})") from error
    return parsed


def corrupt(where: str, what: str) -> DilocoError:
    """The error for what cannot be; ``where`` names the place."""
    return DilocoError(Reason.STORE_CORRUPT, f"{where}: {what}", field=where)


class Reader:
    """Takes the keys of one JSON object, each exactly once.

    Args:
        value: the object.
        where: its place, for errors.

    Raises:
        DilocoError: ``STORE_CORRUPT`` from every method, naming the place.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise corrupt(where, f"expected an object, found {type(value).__name__}")
        self._left: dict[str, object] = dict(value)
        self._where = where

    def _take(self, key: str) -> tuple[object, str]:
        if key not in self._left:
            raise corrupt(self._where, f"key {key!r} is missing")
        return self._left.pop(key), f"{self._where}.{key}"

    def integer(self, key: str) -> int:
        """An integer from 0 to 2^63 - 1."""
        return read_integer(*self._take(key))

    def optional_integer(self, key: str) -> int | None:
        """The same, or null."""
        value, where = self._take(key)
        return None if value is None else read_integer(value, where)

    def number(self, key: str) -> float:
        """A number, finite and at least 0."""
        value, where = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise corrupt(where, f"expected a number, found {type(value).__name__}")
        if not math.isfinite(value) or value < 0:
            raise corrupt(where, f"{value} is not finite and at least 0")
        return float(value)

    def text(self, key: str) -> str:
        """A text."""
        value, where = self._take(key)
        if not isinstance(value, str):
            raise corrupt(where, f"expected text, found {type(value).__name__}")
        return value

    def truth(self, key: str) -> bool:
        """True or false."""
        value, where = self._take(key)
        if not isinstance(value, bool):
            raise corrupt(where, f"expected true or false, found {type(value).__name__}")
        return value

    def nested(self, key: str, read: Callable[[object, str], _T]) -> _T:
        """Whatever ``read`` makes of it."""
        return read(*self._take(key))

    def sequence(self, key: str, read: Callable[[object, str], _T]) -> tuple[_T, ...]:
        """A list, each item read by ``read``."""
        value, where = self._take(key)
        if not isinstance(value, list):
            raise corrupt(where, f"expected a list, found {type(value).__name__}")
        return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(value))

    def mapping(self, key: str, read: Callable[[object, str], _T]) -> dict[str, _T]:
        """An object with any keys, each value read by ``read``."""
        value, where = self._take(key)
        if not isinstance(value, dict):
            raise corrupt(where, f"expected an object, found {type(value).__name__}")
        return {name: read(item, f"{where}.{name}") for name, item in value.items()}

    def done(self) -> None:
        """Refuses keys that nobody took."""
        if self._left:
            raise corrupt(self._where, f"unknown key {min(self._left)!r}")


def read_integer(value: object, where: str) -> int:
    """An integer from 0 to 2^63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise corrupt(where, f"expected an integer, found {type(value).__name__}")
    if not 0 <= value <= _MAX_INTEGER:
        raise corrupt(where, "integer out of range")
    return value


def incarnation_to(incarnation: Incarnation) -> dict[str, object]:
    """An incarnation as JSON values."""
    return {"term": incarnation.term, "number": incarnation.number}


def incarnation_from(value: object, where: str) -> Incarnation:
    """Reads what ``incarnation_to`` wrote."""
    reader = Reader(value, where)
    incarnation = Incarnation(reader.integer("term"), reader.integer("number"))
    reader.done()
    return incarnation
