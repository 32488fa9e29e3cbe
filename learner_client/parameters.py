"""A model's parameters by fragment: the seam between the library and PyTorch (design section 2)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Protocol

import torch
from torch import nn

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.layout import Fragment, Piece, Role, TensorSpec

_LOG = logging.getLogger(__name__)


class Parameters(Protocol):
    """Access to the trainable parameters of a model, as flat fp32 vectors per fragment."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The trainable tensors, tied ones once."""

    def read_fragment(self, fragment: Fragment, out: torch.Tensor) -> None:
        """Copies a fragment into ``out`` (fp32, CPU, ``fragment.num_elements``)."""

    def write_fragment(self, fragment: Fragment, vector: torch.Tensor) -> None:
        """Overwrites a fragment with ``vector`` (fp32, CPU), cast into the model's dtypes."""

    def local_view_of(self, fragment: Fragment, vector: torch.Tensor) -> torch.Tensor:
        """The published copy ``vector`` as the model holds it after writing, in fp32.

        This is what an outer gradient is computed against; ``vector`` itself for fp32 models.
        """


class ModuleParameters:
    """The parameters of a plain ``nn.Module``, on CPU or CUDA, in any mix of floating dtypes.

    Buffers and frozen parameters are left out. Tied parameters count once, under the name that
    comes first in the model. Embeddings are the weights of ``nn.Embedding`` and ``nn.EmbeddingBag``
    with whatever is tied to them, unless ``embedding_names`` says otherwise.

    Args:
        model: the model; its parameters must stay the same objects while it is used here.
        embedding_names: names of the parameters whose role is embedding; replaces the default.

    Raises:
        UsageError: ``LAYOUT_IMPOSSIBLE`` where a parameter cannot be merged, ``CONFIG_INVALID``
            where an embedding name is not a trainable parameter.
    """

    def __init__(self, model: nn.Module, *, embedding_names: Collection[str] | None = None) -> None:
        names: dict[int, list[str]] = {}
        by_id: dict[int, nn.Parameter] = {}
        num_frozen = num_all = 0
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in names:
                num_all += parameter.numel()
                num_frozen += 0 if parameter.requires_grad else parameter.numel()
                by_id[id(parameter)] = parameter
            names.setdefault(id(parameter), []).append(name)
        trainable = {key: names[key] for key, p in by_id.items() if p.requires_grad}
        if 2 * num_frozen > num_all:
            _LOG.warning(
                "%d of %d parameters are frozen (requires_grad is False): they are neither "
                "merged nor sent; every learner must start with the same values of them",
                num_frozen,
                num_all,
            )
        embeddings = _embeddings(model, trainable, embedding_names)
        self._parameters: dict[str, nn.Parameter] = {}
        specs = []
        for key, (name, *aliases) in trainable.items():
            specs.append(_spec(name, aliases, by_id[key], is_embedding=key in embeddings))
            self._parameters[name] = by_id[key]
        self._tensors = tuple(specs)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """See ``Parameters``."""
        return self._tensors

    @torch.no_grad()
    def read_fragment(self, fragment: Fragment, out: torch.Tensor) -> None:
        """See ``Parameters``."""
        assert out.shape == (fragment.num_elements,), (out.shape, fragment.num_elements)
        for piece, part in _parts(fragment, out):
            part.copy_(self._part_of(piece))

    @torch.no_grad()
    def write_fragment(self, fragment: Fragment, vector: torch.Tensor) -> None:
        """See ``Parameters``."""
        assert vector.shape == (fragment.num_elements,), (vector.shape, fragment.num_elements)
        for piece, part in _parts(fragment, vector):
            self._part_of(piece).copy_(part)

    def local_view_of(self, fragment: Fragment, vector: torch.Tensor) -> torch.Tensor:
        """See ``Parameters``."""
        dtypes = [self._parameters[piece.tensor].dtype for piece in fragment.pieces]
        if all(dtype in (torch.float32, torch.float64) for dtype in dtypes):
            return vector
        view = torch.empty_like(vector)
        parts = zip(_parts(fragment, vector), _parts(fragment, view), dtypes, strict=True)
        for (_, source), (_, target), dtype in parts:
            target.copy_(source.to(dtype))
        return view

    def _part_of(self, piece: Piece) -> torch.Tensor:
        tensor = self._parameters[piece.tensor].detach()
        if not piece.shape:
            return tensor
        return tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)


def _parts(fragment: Fragment, vector: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece with its part of the vector, in the piece's shape."""
    for piece, offset in zip(fragment.pieces, fragment.offsets, strict=True):
        yield piece, vector.narrow(0, offset, piece.num_elements).view(piece.shape)


def _spec(
    name: str, aliases: list[str], parameter: nn.Parameter, *, is_embedding: bool
) -> TensorSpec:
    if parameter.is_meta:
        raise UsageError(
            Reason.LAYOUT_IMPOSSIBLE,
            f"parameter {name!r} is on the meta device and has no values; materialise the model "
            "before it is trained",
            tensor=name,
        )
    return TensorSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        role=Role.EMBEDDING if is_embedding else Role.BODY,
        aliases=tuple(aliases),
    )


def _embeddings(
    model: nn.Module, trainable: dict[int, list[str]], embedding_names: Collection[str] | None
) -> set[int]:
    """Ids of the trainable parameters whose role is embedding."""
    if embedding_names is None:
        found = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        return found & trainable.keys()
    by_name = {name: key for key, names in trainable.items() for name in names}
    for name in embedding_names:
        if name not in by_name:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"embedding_names has {name!r}, which is no trainable parameter of the model; "
                "the names are those of model.named_parameters()",
            )
    return {by_name[name] for name in embedding_names}
