"""The three fp32 tensors of a fragment, and the update that moves them (design section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import digest_of
from synchronizer_server.merge.norms import vector_norm
from synchronizer_server.merge.outer import OuterSettings, outer_step

if TYPE_CHECKING:
    from decoupled_diloco.codecs import Codec, Payload


def vector_digest(vector: Tensor) -> bytes:
    """SHA-256 of a published copy: contiguous little-endian fp32 [n]."""
    return digest_of(vector.detach().contiguous().numpy().data.cast("B"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FragmentState:
    """What the synchronizer holds of one fragment. A state's tensors are never changed in place.

    Attributes:
        published: published copy, fp32 [n]: what every learner that follows holds, bit for bit.
        residual: exact parameters minus published copy, fp32 [n]: what the codec still owes.
        momentum: buffer of the outer optimizer, fp32 [n].
    """

    published: Tensor
    residual: Tensor
    momentum: Tensor

    def named(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {"published": self.published, "residual": self.residual, "momentum": self.momentum}

    def problem(self) -> str | None:
        """Says what is wrong with dtypes and shapes, or None."""
        for name, tensor in self.named().items():
            if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                return f"{name} is {tensor.dtype} on {tensor.device}, not float32 on cpu"
            if tensor.dim() != 1 or tensor.shape != self.published.shape:
                return f"{name} has shape {tuple(tensor.shape)}, expected one common length"
        return None

    def digest(self) -> bytes:
        """SHA-256 of the published copy: the digest of its version."""
        return vector_digest(self.published)

    def clone(self) -> FragmentState:
        """An independent copy."""
        return FragmentState(**{name: tensor.clone() for name, tensor in self.named().items()})

    @classmethod
    def seeded(cls, parameters: Tensor) -> FragmentState:
        """State of a fragment at its seed: ``parameters`` (fp32 [n], copied), all else zero."""
        return cls(
            published=parameters.clone(),
            residual=torch.zeros_like(parameters),
            momentum=torch.zeros_like(parameters),
        )


def apply_update(published: Tensor, payload: Payload, codec: Codec) -> Tensor:
    """The published copy after an update: ``published + decode(payload)``, as a new fp32 [n].

    The decoded update is materialised in fp32 and then added by one separate add: never fused with
    the decoding, no ``alpha``, no ``addcmul``. IEEE addition of two fp32 numbers has one result on
    every machine, so a learner that does exactly ``published + codec.decode(payload, n)`` holds
    the synchronizer's copy bit for bit. Denormals must be kept (torch's default) on both sides.

    Raises:
        DilocoError: what ``codec.decode`` raises for bytes that do not fit.
    """
    return published + codec.decode(payload, published.numel())


def advance(
    state: FragmentState, merged: Tensor, settings: OuterSettings, codec: Codec
) -> tuple[FragmentState, Payload]:
    """Moves a fragment by one merged outer gradient.

    ``exact = outer(published + residual)``; ``payload = encode(exact - published)``;
    ``published' = published + decode(payload)``; ``residual' = exact - published'``.

    Args:
        state: the state before; left as it is, so that a commit that fails loses nothing.
        merged: merged outer gradient, fp32 [n].
        settings: outer optimizer.
        codec: codec of updates; what it loses stays in the residual and goes with later updates.

    Returns:
        The new state, and the update's payload for the watchers.

    Raises:
        DilocoError: ``NON_FINITE`` where the new copy would hold NaN or infinity.
    """
    exact, momentum = outer_step(state.published + state.residual, state.momentum, merged, settings)
    payload = codec.encode(exact - state.published)
    published = apply_update(state.published, payload, codec)
    residual = exact - published
    # One cheap pass finds both: a non-finite copy makes a non-finite residual.
    if not math.isfinite(vector_norm(residual)):
        raise DilocoError(
            Reason.NON_FINITE,
            "the outer step would publish NaN or infinity and is not taken; the run has diverged: "
            "lower the outer learning rate and resume from the last good round",
        )
    return FragmentState(published=published, residual=residual, momentum=momentum), payload


def rebase(vector: Tensor, *, published_now: Tensor, published_base: Tensor) -> Tensor:
    """Carries an outer gradient over to a newer base: ``v + (published_now - published_base)``.

    A learner sends ``v = base - local``; against the newer copy it is ``published_now - local``.

    Args:
        vector: v against the older base, fp32 [n].
        published_now: the synchronizer's published copy.
        published_base: the copy that the learner's base names, from the retained updates.

    Returns:
        New fp32 [n]; no argument is changed.
    """
    return vector + (published_now - published_base)
