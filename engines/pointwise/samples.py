"""Graphs that the pointwise engines build programs for: what is checked of their images, and what is timed."""

from __future__ import annotations

from typing import Any

from cudnn_jax.engines.planning import pygraph


def bias_gelu(
    rows: int,
    cols: int,
    dtype: Any = "bfloat16",
    *,
    approximation: str = "erf",
    bias: bool = True,
    residual: bool = True,
    pre: bool = False,
) -> pygraph:
    """out = residual + gelu(x + bias) over (rows, cols), inputs in the order x, bias, residual; outputs pre, out."""
    graph = pygraph(io_data_type=dtype)
    hidden = graph.tensor((rows, cols), name="x")
    if bias:
        hidden = graph.bias(hidden, graph.tensor((1, cols), name="bias")).set_output(pre)
    out = graph.gelu(hidden) if approximation == "erf" else graph.gelu_approx_tanh(hidden)
    if residual:
        out = graph.add(out, graph.tensor((rows, cols), name="residual"))
    out.set_output(True)
    return graph


def samples() -> list[tuple[str, pygraph]]:
    """(name, graph) pairs, fresh graphs on every call."""
    return [
        ("bias_gelu bfloat16 4096x4096", bias_gelu(4096, 4096)),
        ("bias_gelu float16 8192x5120 tanh", bias_gelu(8192, 5120, "float16", approximation="tanh")),
        ("bias_gelu float32 2048x1000 with pre", bias_gelu(2048, 1000, "float32", pre=True)),
        ("bias_gelu bfloat16 1023x1001", bias_gelu(1023, 1001)),
    ]
