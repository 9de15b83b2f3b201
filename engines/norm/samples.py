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


def samples() -> list[tuple[str, pygraph]]:
    """(name, graph) pairs, fresh on every call. The longest rows are those that the cuTile engine still serves."""
    half, bfloat, single = data_type.HALF, data_type.BFLOAT16, data_type.FLOAT
    return [
        ("rmsnorm bfloat16 16384x4096", forward(16384, 4096, bfloat)),
        ("rmsnorm bfloat16 16384x16384 with bias", forward(16384, 16384, bfloat, bias=True)),
        ("rmsnorm float16 65536x128 inference", forward(65536, 128, half, training=False)),
        ("rmsnorm float32 8191x1001 with bias", forward(8191, 1001, single, bias=True)),
        ("rmsnorm float32 4096x16384 with bias", forward(4096, 16384, single, bias=True)),
        ("rmsnorm_backward bfloat16 16384x4096", backward(16384, 4096, bfloat)),
        ("rmsnorm_backward bfloat16 16384x16384", backward(16384, 16384, bfloat)),
        ("rmsnorm_backward bfloat16 4096x12288 with bias", backward(4096, 12288, bfloat, bias=True)),
        ("rmsnorm_backward float16 65536x128", backward(65536, 128, half)),
        ("rmsnorm_backward float32 8191x1001 with bias", backward(8191, 1001, single, bias=True)),
        ("rmsnorm_backward float32 4096x12288 with bias", backward(4096, 12288, single, bias=True)),
    ]
