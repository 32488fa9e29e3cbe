"""Reused host buffers for copies of fragments."""

from __future__ import annotations

import torch


class BufferPool:
    """Buffers of fp32, the smallest that fits first. Keeps at most ``most`` that are not in use.

    Fragments differ in size, the embedding's above all, so a buffer for the largest would waste
    memory on all others. Not safe in several threads at a time.

    Args:
        most: buffers kept for reuse; the smallest go first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._free)

    def take(self, num_elements: int) -> torch.Tensor:
        """Returns a buffer of at least ``num_elements``; its contents are whatever they were."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= num_elements:
                return self._free.pop(index)
        return torch.empty(num_elements, dtype=torch.float32)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back."""
        self._free.append(buffer)
        self._free.sort(key=torch.Tensor.numel)
        if len(self._free) > self._most:
            self._free.pop(0)
