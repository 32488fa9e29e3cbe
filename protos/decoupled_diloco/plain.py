"""A protobuf message as plain JSON values: numbers as numbers, bytes as hexadecimal."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import Message


def to_plain(message: Message) -> dict[str, Any]:
    """Returns a message as a dictionary with every field of it.

    None stands for what is not set, and for what no JSON can hold: NaN and infinities.
    """
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry:
            values[field.name] = {str(key): _value(value[key]) for key in sorted(value)}
        elif field.is_repeated:
            values[field.name] = [_value(entry) for entry in value]
        elif field.has_presence and not message.HasField(field.name):
            values[field.name] = None
        else:
            values[field.name] = _value(value)
    return values


def _value(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, Message):
        return to_plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.hex() if isinstance(value, bytes) else value
