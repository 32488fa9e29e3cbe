"""bf16: rounded to nearest, ties to even; relative error about 1.7e-3 on outer gradients."""

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


class Bf16:
    """Two bytes per element. Decoding is exact: every bf16 value is an fp32 value."""

    name = "bf16"

    def encode(self, vector: torch.Tensor) -> Payload:
        """See ``Codec``."""
        check_vector(vector)
        return bytes_of(vector.to(torch.bfloat16)).toreadonly()

    def decode(self, payload: Payload, num_elements: int) -> torch.Tensor:
        """See ``Codec``."""
        check_size(self, payload, num_elements)
        return tensor_from(payload, num_elements, torch.bfloat16).to(torch.float32)

    def payload_bounds(self, num_elements: int) -> tuple[int, int]:
        """See ``Codec``."""
        return 2 * num_elements, 2 * num_elements


register(Bf16())
register(PlanesZstd(Bf16(), width=2))
