"""Model sizes by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.errors import Reason, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A size of the transformer, without vocabulary and sequence length.

    Attributes:
        num_layers: transformer blocks.
        hidden_size: width of the residual stream.
        num_heads: attention heads; ``hidden_size / num_heads`` is even.
        intermediate_size: width inside the SwiGLU.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int


PRESETS: Final[dict[str, Preset]] = {
    "tiny": Preset(num_layers=4, hidden_size=96, num_heads=3, intermediate_size=256),
    "mini": Preset(num_layers=6, hidden_size=160, num_heads=5, intermediate_size=448),
    "small": Preset(num_layers=8, hidden_size=320, num_heads=5, intermediate_size=864),
    "medium": Preset(num_layers=10, hidden_size=512, num_heads=8, intermediate_size=1344),
    "large": Preset(num_layers=14, hidden_size=768, num_heads=12, intermediate_size=2048),
}
"""About 0.5M, 2M, 10M, 30M and 100M parameters, with bytes as tokens."""


def preset_named(name: str) -> Preset:
    """Returns the preset of that name.

    Raises:
        UsageError: CONFIG_INVALID, with the nearest name.
    """
    preset = PRESETS.get(name)
    if preset is None:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"there is no model preset '{name}': choose one of {', '.join(PRESETS)}{hint}",
            preset=name,
        )
    return preset
