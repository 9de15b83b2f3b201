"""Graphs that stand for what the norm engines serve. Tests plan them, and `make check` builds every image of each."""

from __future__ import annotations

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import data_type


def forward(
    rows: int, cols: int, dtype: data_type = data_type.BFLOAT16, *, bias: bool = False, training: bool = True
) -> pygraph:
    """Y, and in training inv_var, of a (rows, cols) matrix."""
    graph = pygraph(io_data_type=dtype)
    x, scale = graph.tensor((rows, cols), name="x"), graph.tensor((1, cols), name="scale")
    added = graph.tensor((1, cols), name="bias") if bias else None
    phase = "TRAINING" if training else "INFERENCE"
    made = graph.rmsnorm(x, scale, added, 1e-5, phase)
    for tensor in made:
        if tensor is not None:
            tensor.set_output(True)
    return graph


def backward(rows: int, cols: int, dtype: data_type = data_type.BFLOAT16, *, bias: bool = False) -> pygraph:
    """DX, DScale and with a bias DBias of a (rows, cols) matrix."""
    graph = pygraph(io_data_type=dtype)
    grad, x = graph.tensor((rows, cols), name="grad"), graph.tensor((rows, cols), name="x")
    scale = graph.tensor((1, cols), name="scale")
    inv_variance = graph.tensor((rows, 1), data_type=data_type.FLOAT, name="inv_variance")
    for tensor in graph.rmsnorm_backward(grad, x, scale, inv_variance, has_dbias=bias):
        if tensor is not None:
            tensor.set_output(True)
    return graph
