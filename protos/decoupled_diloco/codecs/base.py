"""What a codec is, and the registry in which each codec's module enters its own."""

from __future__ import annotations

import difflib
import sys
from typing import Final, Protocol

import torch

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.settings import RunSettings

Payload = bytes | memoryview
"""An encoded vector: contiguous unsigned bytes (a memoryview of format ``B``)."""


class Codec(Protocol):
    """Turns a fragment's fp32 vector into a payload and back. Stateless, safe in any thread."""

    @property
    def name(self) -> str:
        """Name in settings and messages."""

    def encode(self, vector: torch.Tensor) -> Payload:
        """Encodes ``vector`` (fp32, one dimension, contiguous, CPU).

        The payload shares no memory with ``vector``.
        """

    def decode(self, payload: Payload, num_elements: int) -> torch.Tensor:
        """Decodes a payload from anywhere into a fresh, writable fp32 vector of ``num_elements``.

        Nothing is added or scaled here: whoever applies the result does so with one separate add.

        Raises:
            DilocoError: ``CODEC_MISMATCH`` where the size does not fit the codec, ``CORRUPT`` where
                the contents do not. Nothing else, whatever the bytes.
        """

    def payload_bounds(self, num_elements: int) -> tuple[int, int]:
        """Least and greatest payload size in bytes for a vector of ``num_elements``."""


_CODECS: Final[dict[str, Codec]] = {}


def register(codec: Codec) -> None:
    """Enters a codec under its name, which must be new."""
    assert codec.name not in _CODECS, f"codec {codec.name} is registered twice"
    _CODECS[codec.name] = codec


def codec_names() -> tuple[str, ...]:
    """Names of all codecs, sorted."""
    return tuple(sorted(_CODECS))


def get_codec(name: str) -> Codec:
    """Returns the codec of this name.

    Raises:
        UsageError: ``CONFIG_INVALID``, with the nearest name.
    """
    codec = _CODECS.get(name)
    if codec is not None:
        return codec
    near = difflib.get_close_matches(name, codec_names(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        Reason.CONFIG_INVALID,
        f"unknown codec {name!r}: {hint}the codecs are {', '.join(codec_names())}",
        codec=name,
    )


def check_codecs(settings: RunSettings) -> None:
    """Checks the codecs that settings of a run name.

    Raises:
        UsageError: ``CONFIG_INVALID``, with the nearest name.
    """
    get_codec(settings.codec_up)
    get_codec(settings.codec_down)


def check_vector(vector: torch.Tensor) -> None:
    """Asserts what every ``encode`` asks of its argument."""
    assert vector.dtype == torch.float32, vector.dtype
    assert vector.dim() == 1, vector.shape
    assert vector.is_contiguous(), "a vector to encode is contiguous"
    assert vector.device.type == "cpu", vector.device


def check_size(codec: Codec, payload: Payload, num_elements: int) -> None:
    """Refuses a payload whose size the codec cannot have made.

    Raises:
        DilocoError: ``CODEC_MISMATCH``.
    """
    low, high = codec.payload_bounds(num_elements)
    if not low <= len(payload) <= high:
        expected = f"{low}" if low == high else f"{low} to {high}"
        raise DilocoError(
            Reason.CODEC_MISMATCH,
            f"payload of {len(payload)} bytes does not fit codec {codec.name}: "
            f"{num_elements} elements take {expected} bytes; check that both ends use one codec",
            codec=codec.name,
            num_bytes=len(payload),
            num_elements=num_elements,
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous vector as bytes, without a copy."""
    # Vectors of no or one element may carry any stride, which view() would refuse.
    return tensor.detach().as_strided(tensor.shape, (1,)).view(torch.uint8).numpy().data


def tensor_from(payload: Payload, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Copies a payload of exactly the right size into a fresh tensor of ``dtype``."""
    tensor = torch.empty(num_elements, dtype=dtype)
    bytes_of(tensor)[:] = payload
    return tensor


if sys.byteorder != "little":
    raise DilocoError(
        Reason.UNIMPLEMENTED,
        "payloads and digests are little-endian and this machine is not; use another machine",
    )
