"""Codecs: how a fragment's vector becomes bytes on the wire, and back (design section 5)."""

from __future__ import annotations

from decoupled_diloco.codecs import bf16, fp32  # noqa: F401  (each registers its codecs)
from decoupled_diloco.codecs.base import (
    Codec,
    Payload,
    check_codecs,
    codec_names,
    get_codec,
    register,
)
from decoupled_diloco.codecs.chunks import CHUNK_BYTES, Stager, iter_chunks, payload_digest

__all__ = [
    "CHUNK_BYTES",
    "Codec",
    "Payload",
    "Stager",
    "check_codecs",
    "codec_names",
    "get_codec",
    "iter_chunks",
    "payload_digest",
    "register",
]
