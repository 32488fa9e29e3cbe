"""Addresses of synchronizers: those of the settings, and those that somebody names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from decoupled_diloco.channel import is_loopback, parse_address
from decoupled_diloco.errors import Reason, UsageError

MAX_ADDRESSES: Final = 16
_MAX_READ: Final = 64
_MAX_CHARACTERS: Final = 262
"""A DNS name of 253 characters, brackets, a colon and a port."""


def read_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Reads ``host:port``, one or several, as a sequence or separated by commas.

    Returns:
        The addresses in their order, each once.

    Raises:
        UsageError: CONFIG_INVALID, naming the one that is wrong.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    if not parts or len(parts) > MAX_ADDRESSES:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"address names {len(parts)} synchronizers; between 1 and {MAX_ADDRESSES}",
        )
    return tuple(dict.fromkeys(str(parse_address(part.strip())) for part in parts))


def usable_addresses(named: Iterable[str], *, insecure: bool) -> tuple[str, ...]:
    """Those of the addresses named by somebody else that can be dialled; the rest is left out.

    Args:
        named: anything; only the beginning of a long list is read.
        insecure: True where plaintext to another machine was asked for.
    """
    found = []
    for text in islice(named, _MAX_READ):
        if len(text) > _MAX_CHARACTERS:
            continue
        try:
            address = parse_address(text.strip())
        except UsageError:
            continue
        if address.port and (insecure or is_loopback(address)):
            found.append(str(address))
    return tuple(dict.fromkeys(found))
