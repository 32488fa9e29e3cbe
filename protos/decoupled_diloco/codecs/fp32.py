"""fp32: the vector as it is, little-endian; lossless, so every bit pattern survives."""

from __future__ import annotations

import torch

from decoupled_diloco.codecs.base import (
    Payload,
    bytes_of,
    check_size,
    check_vector,
    register,
    tensor_from,
)
from decoupled_diloco.codecs.zstd import PlanesZstd


class Fp32:
    """Four bytes per element."""

    name = "fp32"

    def encode(self, vector: torch.Tensor) -> Payload:
        """See ``Codec``."""
        check_vector(vector)
        return bytes(bytes_of(vector))

    def decode(self, payload: Payload, num_elements: int) -> torch.Tensor:
        """See ``Codec``."""
        check_size(self, payload, num_elements)
        return tensor_from(payload, num_elements, torch.float32)

    def payload_bounds(self, num_elements: int) -> tuple[int, int]:
        """See ``Codec``."""
        return 4 * num_elements, 4 * num_elements


register(Fp32())
register(PlanesZstd(Fp32(), width=4))
