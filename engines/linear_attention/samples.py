"""Graphs that stand for what the linear attention engines serve. `make check` builds every image of each."""

from __future__ import annotations

from typing import Any

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import data_type


def forward(
    lengths: tuple[int, ...],
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: data_type = data_type.BFLOAT16,
    *,
    initial: bool = False,
    **options: Any,
) -> pygraph:
    """Gated DeltaNet of packed sequences, all with the same number of heads; O and the final state."""
    graph = pygraph(io_data_type=dtype)
    total, n = sum(lengths), len(lengths)
    q, k = (graph.tensor((total, heads, key_dim), name=name) for name in ("q", "k"))
    v = graph.tensor((total, heads, value_dim), name="v")
    g, beta = (graph.tensor((total, heads), data_type=data_type.FLOAT, name=name) for name in ("g", "beta"))
    cu_seqlens = graph.tensor((n + 1,), data_type=data_type.INT32, name="cu_seqlens")
    state = None
    if initial:
        state = graph.tensor((n, heads, value_dim, key_dim), data_type=data_type.FLOAT, name="initial_state")
    made = graph.gdn(q, k, v, g, beta, cu_seqlens, state, output_final_state=True, **options)
    for tensor in made:
        if tensor is not None:
            tensor.set_output(True)
    return graph


def samples() -> list[tuple[str, pygraph]]:
    """(name, graph) pairs, fresh on every call."""
    half = data_type.HALF
    normalised: dict[str, Any] = {"use_qk_l2norm": True}
    return [
        ("gdn bfloat16 2x8192 16 heads 128x128", forward((8192, 8192), 16, 128, 128, **normalised)),
        ("gdn float16 32x512 8 heads 64x64 with states", forward((512,) * 32, 8, 64, 64, half, initial=True)),
        ("gdn bfloat16 4x4096 8 heads 256x256", forward((4096,) * 4, 8, 256, 256, **normalised)),
    ]
