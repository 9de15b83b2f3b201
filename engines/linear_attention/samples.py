"""Graphs that stand for what the linear attention engines serve. `make check` builds those of each
that are offered."""

from __future__ import annotations

from typing import Any

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import data_type

_GATES = {"gdn": {"g": "", "beta": ""}, "kda": {"g": "K", "beta": ""}, "gdn2": {"g": "K", "beta": "K", "w": "V"}}
"""Operation -> gate -> what it has a value for in each token and head: nothing more, or each key or value channel."""


def forward(
    lengths: tuple[int, ...],
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: data_type = data_type.BFLOAT16,
    *,
    operation: str = "gdn",
    initial: bool = False,
    **options: Any,
) -> pygraph:
    """An operation over packed sequences, all with the same number of heads; O and the final state."""
    graph, operands = _operands(operation, lengths, heads, key_dim, value_dim, dtype, initial)
    return _asked(graph, getattr(graph, operation)(**operands, output_final_state=True, **options))


def backward(
    lengths: tuple[int, ...],
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: data_type = data_type.BFLOAT16,
    *,
    operation: str = "gdn",
    initial: bool = False,
    **options: Any,
) -> pygraph:
    """The same sequences' gradients, with an initial state of it and of the final state."""
    graph, operands = _operands(operation, lengths, heads, key_dim, value_dim, dtype, initial)
    d_out = graph.tensor((sum(lengths), heads, value_dim), name="dO")
    d_final = None
    if initial:
        d_final = graph.tensor(operands["initial_state"].dim, data_type=data_type.FLOAT, name="d_final_state")
    return _asked(graph, getattr(graph, f"{operation}_bwd")(**operands, dO=d_out, d_final_state=d_final, **options))


def _operands(
    operation: str,
    lengths: tuple[int, ...],
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: data_type,
    initial: bool,
) -> tuple[pygraph, dict[str, Any]]:
    graph = pygraph(io_data_type=dtype)
    total, n, single = sum(lengths), len(lengths), data_type.FLOAT
    made = {name: graph.tensor((total, heads, key_dim), name=name) for name in ("q", "k")}
    made["v"] = graph.tensor((total, heads, value_dim), name="v")
    channels: dict[str, tuple[int, ...]] = {"": (), "K": (key_dim,), "V": (value_dim,)}
    for name, axis in _GATES[operation].items():
        made[name] = graph.tensor((total, heads, *channels[axis]), data_type=single, name=name)
    made["cu_seqlens"] = graph.tensor((n + 1,), data_type=data_type.INT32, name="cu_seqlens")
    if initial:
        shape = (n, heads, value_dim, key_dim)
        made["initial_state"] = graph.tensor(shape, data_type=single, name="initial_state")
    return graph, made


def _asked(graph: pygraph, made: Any) -> pygraph:
    for tensor in made:
        if tensor is not None:
            tensor.set_output(True)
    return graph


def samples() -> list[tuple[str, pygraph]]:
    """(name, graph) pairs, fresh on every call."""
    half = data_type.HALF
    normalised: dict[str, Any] = {"use_qk_l2norm": True}
    long, short = ((8192, 8192), 16, 128, 128), ((512,) * 32, 8, 64, 64, half)
    bounded: dict[str, Any] = {"safe_gate": True, "initial": True}
    return [
        ("gdn bfloat16 2x8192 16 heads 128x128", forward(*long, **normalised)),
        ("gdn float16 32x512 8 heads 64x64 with states", forward(*short, initial=True)),
        ("gdn bfloat16 4x4096 8 heads 256x256", forward((4096,) * 4, 8, 256, 256, **normalised)),
        *(
            (
                f"{operation} bfloat16 256x1 32 heads 128x128 with states",
                forward((1,) * 256, 32, 128, 128, operation=operation, initial=True, **normalised),
            )
            for operation in _GATES
        ),
        ("gdn_bwd bfloat16 2x8192 16 heads 128x128", backward(*long, **normalised)),
        ("gdn_bwd float16 32x512 8 heads 64x64 with states", backward(*short, initial=True)),
        ("kda bfloat16 2x8192 16 heads 128x128", forward(*long, operation="kda", **normalised)),
        ("kda float16 32x512 8 heads 64x64 safe_gate with states", forward(*short, operation="kda", **bounded)),
        ("kda_bwd bfloat16 2x8192 16 heads 128x128", backward(*long, operation="kda", **normalised)),
        ("gdn2 bfloat16 2x8192 16 heads 128x128", forward(*long, operation="gdn2", **normalised)),
        ("gdn2_bwd bfloat16 2x8192 16 heads 128x128", backward(*long, operation="gdn2", **normalised)),
    ]
