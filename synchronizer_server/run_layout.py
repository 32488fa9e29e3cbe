"""The layout of a run as the description of the run keeps it."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.layout import Layout, Role, Strategy, TensorSpec, build_layout
from decoupled_diloco.settings import RunSettings
from synchronizer_server.store.base import RunDescription


def layout_from(description: RunDescription | None, settings: RunSettings) -> Layout:
    """The layout that a store keeps, checked against the settings.

    Raises:
        DilocoError: STORE_CORRUPT; UsageError CONFIG_CONFLICT where the settings changed.
    """
    kept: Any = (description or {}).get("layout")
    try:
        tensors = [
            TensorSpec(
                name=t["name"],
                shape=tuple(t["shape"]),
                dtype=t["dtype"],
                role=Role(t["role"]),
                aliases=tuple(t["aliases"]),
            )
            for t in kept["tensors"]
        ]
        fingerprint = str(kept["fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise DilocoError(
            Reason.STORE_CORRUPT, f"the store's layout cannot be read ({error}); restore a backup"
        ) from error
    try:
        layout = build_layout(
            tensors,
            strategy=Strategy(settings.strategy),
            num_fragments=settings.num_fragments,
            overlap=settings.overlap,
        )
    except UsageError:
        layout = None  # what no layout can be made with is another one, too
    if layout is None or layout.fingerprint != fingerprint:
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            f"the store holds strategy {kept.get('strategy')!r} with {kept.get('num_fragments')} "
            "fragments, the settings another layout: the layout of a run is fixed once; start with "
            "the settings of the run, or choose a new run_id and store",
        )
    return layout
