"""How tensors are spread over fragments: whole, by stride or size, or cut (paper section 4)."""

from __future__ import annotations

from collections.abc import Iterable

from decoupled_diloco.partition import cut_evenly, fill_smallest, share_bins
from decoupled_diloco.parts import Piece, Role, Strategy, TensorSpec

Bins = list[tuple[Role, list[Piece]]]
"""Pieces of each fragment to be, with their role."""


def _number(component: str) -> int | None:
    """The value of a component of a dotted name that is an integer."""
    # Longer runs of digits are no index, and int() may refuse them.
    is_index = component.isascii() and component.isdecimal() and len(component) <= 18
    return int(component) if is_index else None


def natural_key(spec: TensorSpec) -> tuple[list[tuple[int, str]], str]:
    """Orders ``h.2`` before ``h.10``; a total order, since the name itself breaks ties."""
    parts = spec.name.split(".")
    numbers = [(_number(part), part) for part in parts]
    return [(-1 if n is None else n, part) for n, part in numbers], spec.name


def _block_of(spec: TensorSpec) -> tuple[str, int] | None:
    """The transformer block: the first integer component of the name, with what precedes it."""
    parts = spec.name.split(".")
    for index, part in enumerate(parts):
        number = _number(part)
        if number is not None:
            return ".".join(parts[:index]), number
    return None


def _whole(spec: TensorSpec) -> Piece:
    stop = spec.shape[0] if spec.shape else 1
    return Piece(tensor=spec.name, dim=0, start=0, stop=stop, shape=spec.shape)


def whole_tensors(
    by_role: dict[Role, list[TensorSpec]], strategy: Strategy, num_fragments: int
) -> Bins:
    """Embedding in fragment 0, the body over the others, no tensor cut."""
    embedding, body = by_role.get(Role.EMBEDDING, []), by_role.get(Role.BODY, [])
    num_bins = num_fragments - bool(embedding)
    body_bins: list[list[int]] = []
    if body and strategy is Strategy.BALANCED:
        body_bins = [[] for _ in range(min(num_bins, len(body)))]
        _fill(body_bins, body, range(len(body)))
    elif body:
        body_bins = _strided(
            body, num_bins, by_block=strategy is Strategy.LAYER, head=not embedding
        )
    bins: Bins = [(Role.EMBEDDING, [_whole(spec) for spec in embedding])] if embedding else []
    bins.extend((Role.BODY, [_whole(body[i]) for i in sorted(held)]) for held in body_bins)
    return bins


def _fill(bins: list[list[int]], body: list[TensorSpec], items: Iterable[int]) -> None:
    """By bytes descending, then name, each into the smallest bin so far."""
    ordered = sorted(items, key=lambda i: (-body[i].num_bytes, body[i].name))
    fill_smallest(bins, ordered, [spec.num_bytes for spec in body])


def _strided(
    body: list[TensorSpec], num_bins: int, *, by_block: bool, head: bool
) -> list[list[int]]:
    """Blocks, or the tensors of blocks, by stride; what has no block into a bin of its own in front
    (``head``, where no embedding takes that place) or else into the smallest bins.
    """
    loose: list[int] = []
    units: dict[object, list[int]] = {}
    for index, spec in enumerate(body):
        block = _block_of(spec)
        if block is None:
            loose.append(index)
        else:
            units.setdefault(block if by_block else index, []).append(index)
    own_head = head and bool(loose) and bool(units) and num_bins > 1
    num_strides = max(1, min(num_bins - own_head, len(units)))
    bins: list[list[int]] = [[] for _ in range(num_strides)]
    for index, unit in enumerate(units.values()):
        bins[index % num_strides].extend(unit)
    if own_head:
        return [loose, *bins]
    _fill(bins, body, loose)
    return bins


def _cut_dim(spec: TensorSpec) -> int:
    """The output dimension: columns of an embedding table, rows of everything else."""
    return 1 if spec.role is Role.EMBEDDING and len(spec.shape) == 2 else 0


def _num_granules(spec: TensorSpec) -> int:
    return spec.shape[_cut_dim(spec)] if spec.shape else 1


def cut_roles(by_role: dict[Role, list[TensorSpec]], num_fragments: int) -> Bins:
    """Shares the fragments out between the roles by size, then cuts each role evenly.

    Sizes are in elements, not bytes: what a fragment costs on the wire depends on the codec, not
    on the dtype in which the model keeps it.
    """
    sizes = [[spec.num_elements for spec in specs] for specs in by_role.values()]
    granules = [[_num_granules(spec) for spec in specs] for specs in by_role.values()]
    limits = [sum(numbers) for numbers in granules]
    counts = share_bins([sum(s) for s in sizes], limits, min(num_fragments, sum(limits)))
    bins: Bins = []
    for index, (role, specs) in enumerate(by_role.items()):
        for run in cut_evenly(sizes[index], granules[index], counts[index]):
            bins.append((role, [_piece(specs[s.item], s.start, s.stop) for s in run]))
    return bins


def _piece(spec: TensorSpec, start: int, stop: int) -> Piece:
    if stop - start == _num_granules(spec):
        return _whole(spec)
    dim = _cut_dim(spec)
    shape = (*spec.shape[:dim], stop - start, *spec.shape[dim + 1 :])
    return Piece(tensor=spec.name, dim=dim, start=start, stop=stop, shape=shape)
