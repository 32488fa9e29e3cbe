"""Models for the tests of the layout: drawn by hypothesis, or small and as learners have them."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from decoupled_diloco.layout import DTYPE_BYTES, Layout, Role, Strategy, TensorSpec, build_layout


def spec(name: str, *shape: int, role: Role = Role.BODY, **rest: object) -> TensorSpec:
    return TensorSpec(
        name=name, shape=shape, dtype=str(rest.pop("dtype", "float32")), role=role, **rest
    )  # type: ignore[arg-type]


def transformer(num_blocks: int = 6, width: int = 4, vocabulary: int = 50) -> list[TensorSpec]:
    """A model as learners have it: tied embedding, blocks, a final norm."""
    tensors = [spec("wte.weight", vocabulary, width, role=Role.EMBEDDING, aliases=("head.weight",))]
    for block in range(num_blocks):
        tensors.append(spec(f"h.{block}.attn.weight", 3 * width, width))
        tensors.append(spec(f"h.{block}.mlp.weight", width, 4 * width))
        tensors.append(spec(f"h.{block}.norm.weight", width))
    return [*tensors, spec("norm.weight", width)]


names = st.lists(
    st.sampled_from(["h", "wte", "norm", "weight", "w", "0", "1", "2", "10", "01", "é"]),
    min_size=1,
    max_size=3,
).map(".".join)
shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn, max_size: int = 12) -> list[TensorSpec]:
    chosen = draw(st.lists(names, min_size=1, max_size=max_size, unique=True))
    return [
        TensorSpec(
            name=name,
            shape=draw(shapes),
            dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
            role=draw(st.sampled_from([Role.BODY, Role.BODY, Role.EMBEDDING])),
            aliases=draw(st.sampled_from([(), (f"{name}.tied",)])),
        )
        for name in chosen
    ]


any_strategy = st.sampled_from(list(Strategy))


def build(tensors: list[TensorSpec], strategy: Strategy, num_fragments: int) -> Layout:
    """The layout with overlap 0, where the settings allow one at all."""
    assume(num_fragments >= len({t.role for t in tensors}))
    return build_layout(tensors, strategy=strategy, num_fragments=num_fragments, overlap=0)
