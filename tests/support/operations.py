"""A small graph of each operation that cuDNN has, in types and layouts that it favours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudnn_jax import pygraph
from cudnn_jax.graph import Tensor, data_type
from support.attention import samples

IMAGE, FILTER = (4, 32, 16, 16), (64, 32, 3, 3)
WINDOW = {"padding": (1, 1), "stride": (2, 2)}
FLOAT = {"data_type": "float32"}
INT32 = {"data_type": "int32"}
NORM = {"epsilon": 1e-3, "norm_forward_phase": "TRAINING"}


def last(dim: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with the channels fastest."""
    _, c, *spatial = dim
    stride = [c * int(np.prod(spatial[at + 1 :])) for at in range(len(spatial))]
    return (c * int(np.prod(spatial)), 1, *stride)


def _image(graph: pygraph, dim: tuple[int, ...] = IMAGE, **more: Any) -> Tensor:
    return graph.tensor(dim, last(dim), **more)


def _channels(graph: pygraph, count: int, dim: tuple[int, ...] = (1, 32, 1, 1)) -> list[Tensor]:
    return [graph.tensor(dim, **FLOAT) for _ in range(count)]


ROWS = (64, 128, 1, 1)
FOLDED = ("DScale", "DBias", "SUM", "SQ_SUM")
"""Outputs that are sums over many elements: float32, as the weights are."""


def _norm(name: str) -> Callable[[pygraph], Any]:
    """A norm of rows of 128."""

    def build(graph: pygraph) -> Any:
        return getattr(graph, name)(_image(graph, ROWS), *_channels(graph, 2, (1, 128, 1, 1)), **NORM)

    return build


def _norm_backward(name: str, statistics: int) -> Callable[[pygraph], Any]:
    def build(graph: pygraph) -> Any:
        kept = _channels(graph, statistics, (64, 1, 1, 1))
        return getattr(graph, name)(
            _image(graph, ROWS), _image(graph, ROWS), *_channels(graph, 1, (1, 128, 1, 1)), *kept
        )

    return build


def _adaptive(graph: pygraph) -> Any:
    x = graph.tensor((4, 16, 128, 1))
    return graph.adalayernorm(x, *_channels(graph, 2, (4, 1, 128, 1)), **NORM)


def _adaptive_backward(graph: pygraph) -> Any:
    grad, x = graph.tensor((4, 16, 128, 1)), graph.tensor((4, 16, 128, 1))
    return graph.adalayernorm_backward(
        grad, x, *_channels(graph, 1, (4, 1, 128, 1)), *_channels(graph, 2, (4, 16, 1, 1))
    )


def _of_channels(name: str, statistics: tuple[int, ...]) -> Callable[[pygraph], Any]:
    def build(graph: pygraph) -> Any:
        kept = _channels(graph, 2, statistics)
        return getattr(graph, name)(_image(graph), _image(graph), *_channels(graph, 1), *kept)

    return build


def _batch(graph: pygraph) -> Any:
    running = dict(zip(("in_running_mean", "in_running_var"), _channels(graph, 2), strict=True))
    return graph.batchnorm(_image(graph), *_channels(graph, 2), **running, epsilon=1e-3, momentum=0.25)


def _reduction(graph: pygraph) -> Any:
    x = _image(graph, **FLOAT)
    return graph.reduction(x, mode="ADD").set_dim((1, 32, 1, 1)).set_data_type("float32")


def _product(graph: pygraph) -> Tensor:
    return graph.matmul(graph.tensor((2, 64, 128)), graph.tensor((2, 128, 64)))


def _product_gradients(graph: pygraph) -> Any:
    """By both sides of tanh of a product."""
    slope = graph.tanh_backward(graph.tensor((2, 64, 64)), graph.tensor((2, 64, 64), **FLOAT))
    by_rows = graph.matmul(slope, graph.tensor((2, 64, 128)))
    return by_rows, graph.matmul(graph.tensor((2, 128, 64)), slope)


def _product_chain(graph: pygraph) -> Any:
    inner = _product(graph)
    return inner.set_data_type("float32"), graph.matmul(graph.gelu(inner), graph.tensor((2, 64, 32)))


def _product_chain_gradients(graph: pygraph) -> Any:
    """By all three factors of the chain."""
    grad, kept = graph.tensor((2, 64, 32)), graph.tensor((2, 64, 64), **FLOAT)
    slope = graph.matmul(grad, graph.tensor((2, 32, 64)))
    last = graph.matmul(graph.transpose(graph.gelu(kept), (0, 2, 1)), grad)
    inner = graph.gelu_backward(slope, kept)
    return (
        last,
        graph.matmul(inner, graph.tensor((2, 64, 128))),
        graph.matmul(graph.tensor((2, 128, 64)), inner),
    )


def _grouped(mode: str, *ports: str, **options: Any) -> Callable[[pygraph], Any]:
    def build(graph: pygraph) -> Any:
        token = graph.tensor((1, 32 if mode == "GATHER" else 64, 128))
        weight = graph.tensor((4, 128, 64), (128 * 64, 1, 128))
        offset = graph.tensor((4, 1, 1), name="offset", **INT32)
        routed = {port: graph.tensor((1, 64, 1), name=port, **INT32) for port in ports}
        return graph.moe_grouped_matmul(token, weight, offset, **routed, mode=mode, **options)

    return build


def _grouped_backward(graph: pygraph) -> Any:
    loss, token = graph.tensor((1, 64, 64)), graph.tensor((1, 64, 128))
    return graph.moe_grouped_matmul_bwd(loss, token, graph.tensor((4, 1, 1), name="offset", **INT32))


def _quantize(graph: pygraph) -> Any:
    y, scale = graph.block_scale_quantize(graph.tensor((1, 128, 128)), block_size=32)
    return y.set_data_type("float8_e4m3fn"), scale.set_data_type("float8_e8m0fnu")


def _dequantize(graph: pygraph) -> Any:
    """The backend wants what it dequantises to stay inside."""
    sides = (((1, 128, 128), (1, 128, 4)), ((1, 128, 64), (1, 4, 64)))
    parts = [
        graph.block_scale_dequantize(
            graph.tensor(dim, data_type="float8_e4m3fn"),
            graph.tensor(scales, data_type="float8_e8m0fnu"),
            block_size=32,
        )
        for dim, scales in sides
    ]
    return graph.matmul(*parts)


def _convolution_and_sums(graph: pygraph) -> Any:
    y = graph.conv_fprop(_image(graph), _image(graph, FILTER), **WINDOW).set_data_type("bfloat16")
    return y, *graph.genstats(y)


def _heads(graph: pygraph, dtype: str = "float8_e4m3fn", rows: int = 128, of: int = 128) -> Tensor:
    """(B, T, N, D) in memory, seen as (B, N, T, D)."""
    return graph.tensor((2, 4, rows, of), (rows * 4 * of, of, 4 * of, 1), data_type=dtype)


def _scales(graph: pygraph, count: int) -> list[Tensor]:
    return [graph.tensor((1, 1, 1, 1), **FLOAT) for _ in range(count)]


def _blocks(graph: pygraph, *dims: tuple[int, int]) -> list[Tensor]:
    """A scale for each block of 32."""
    return [graph.tensor((2, 4, *dim), data_type="float8_e8m0fnu") for dim in dims]


def _row_stats(graph: pygraph) -> Tensor:
    return graph.tensor((2, 4, 128, 1), **FLOAT)


def _attention_fp8(graph: pygraph) -> Any:
    out, *rest = graph.sdpa_fp8(
        *(_heads(graph) for _ in range(3)), *_scales(graph, 6), attn_scale=0.125, generate_stats=True
    )
    return out.set_data_type("float8_e4m3fn"), *rest


def _attention_fp8_backward(graph: pygraph) -> Any:
    made = graph.sdpa_fp8_backward(
        *(_heads(graph) for _ in range(5)), _row_stats(graph), *_scales(graph, 12), attn_scale=0.125
    )
    return *(gradient.set_data_type("float8_e4m3fn") for gradient in made[:3]), *made[3:]


ROW_BLOCKS, COLUMN_BLOCKS = (128, 4), (4, 128)


def _attention_mxfp8(graph: pygraph) -> Any:
    scales = _blocks(graph, ROW_BLOCKS, ROW_BLOCKS, COLUMN_BLOCKS)
    out, *rest = graph.sdpa_mxfp8(*(_heads(graph) for _ in range(3)), *scales, attn_scale=0.125, generate_stats=True)
    return out.set_data_type("bfloat16"), *rest


def _attention_mxfp8_backward(graph: pygraph) -> Any:
    eight = [_heads(graph) for _ in range(7)]
    q, q_t, k, k_t, v, d_out, d_out_t = eight
    wide = [_heads(graph, "bfloat16") for _ in range(2)]
    scales = _blocks(graph, *2 * (ROW_BLOCKS, COLUMN_BLOCKS), ROW_BLOCKS, ROW_BLOCKS, COLUMN_BLOCKS)
    made = graph.sdpa_mxfp8_backward(
        q, q_t, k, k_t, v, *wide, d_out, d_out_t, _row_stats(graph), *scales, attn_scale=0.125
    )
    return *(gradient.set_data_type("bfloat16") for gradient in made[:3]), *made[3:]


FLOAT8: dict[str, Callable[[pygraph], Any]] = {
    "sdpa_fp8": _attention_fp8,
    "sdpa_fp8_backward": _attention_fp8_backward,
    "sdpa_mxfp8": _attention_mxfp8,
    "sdpa_mxfp8_backward": _attention_mxfp8_backward,
}
"""Attention of float8 tensors."""

ATTENTION = samples.SAMPLES
"""Attention with options that `cudnn_jax.sdpa` does not have."""

GRAPHS: dict[str, Callable[[pygraph], Any]] = {
    "matmul": _product,
    "matmul gradients": _product_gradients,
    "matmul chain": _product_chain,
    "matmul chain gradients": _product_chain_gradients,
    "rmsnorm": lambda graph: graph.rmsnorm(_image(graph, ROWS), *_channels(graph, 1, (1, 128, 1, 1)), **NORM),
    "rmsnorm_backward": _norm_backward("rmsnorm_backward", 1),
    "layernorm": _norm("layernorm"),
    "layernorm_backward": _norm_backward("layernorm_backward", 2),
    "adalayernorm": _adaptive,
    "adalayernorm_backward": _adaptive_backward,
    "instancenorm": lambda graph: graph.instancenorm(_image(graph), *_channels(graph, 2), **NORM),
    "instancenorm_backward": _of_channels("instancenorm_backward", (4, 32, 1, 1)),
    "batchnorm": _batch,
    "batchnorm_inference": lambda graph: graph.batchnorm_inference(_image(graph), *_channels(graph, 4)),
    "batchnorm_backward": _of_channels("batchnorm_backward", (1, 32, 1, 1)),
    "genstats": lambda graph: graph.genstats(_image(graph)),
    "genstats of a convolution": _convolution_and_sums,
    "reduction": _reduction,
    "reduction of a product": lambda graph: (
        graph.reduction(_product(graph), mode="MAX").set_dim((2, 64, 1)).set_data_type("float32")
    ),
    "block_scale_dequantize": _dequantize,
    "block_scale_quantize": _quantize,
    "moe_grouped_matmul": _grouped("NONE"),
    "moe_grouped_matmul gather": _grouped("GATHER", "token_index"),
    "moe_grouped_matmul scatter": _grouped("SCATTER", "token_index", "token_ks", top_k=2),
    "moe_grouped_matmul_bwd": _grouped_backward,
    "conv_fprop": lambda graph: graph.conv_fprop(_image(graph), _image(graph, FILTER), **WINDOW),
    "conv_dgrad": lambda graph: graph.conv_dgrad(_image(graph, (4, 64, 8, 8)), _image(graph, FILTER), **WINDOW).set_dim(
        IMAGE
    ),
    "conv_wgrad": lambda graph: graph.conv_wgrad(_image(graph), _image(graph, (4, 64, 8, 8)), **WINDOW).set_dim(FILTER),
    "reshape": lambda graph: graph.reshape(graph.tensor((4, 64))).set_dim((8, 32)),
    "slice": lambda graph: graph.slice(graph.tensor((8, 64)), [(0, 4), (16, 48)]),
    "slice for a product": lambda graph: graph.matmul(
        graph.slice(graph.tensor((2, 64, 64)), [(0, 2), (0, 32)]), graph.tensor((2, 64, 64))
    ),
    "transpose": lambda graph: graph.transpose(graph.tensor((4, 8, 64)), (1, 0, 2)),
    "concatenate": lambda graph: graph.concatenate([graph.tensor((4, 64)), graph.tensor((8, 64))], 0),
    "rope": lambda graph: graph.rope(graph.tensor((2, 4, 64, 128)), graph.tensor((1, 1, 64, 128), **FLOAT)),
    "rope_backward": lambda graph: graph.rope_backward(
        graph.tensor((2, 4, 64, 128)), graph.tensor((1, 1, 64, 128), **FLOAT)
    ),
}

ALL: dict[str, Callable[[pygraph], Any]] = GRAPHS | FLOAT8 | ATTENTION


def graph_of(name: str) -> pygraph:
    """The frozen graph of a name of `ALL`, whose outputs are all the caller's."""
    graph = pygraph(name, io_data_type="bfloat16")
    made = ALL[name](graph)
    for tensor in made if isinstance(made, tuple) else (made,):
        if tensor is not None:
            tensor.set_output(True)
    for port, tensor in graph.nodes[-1].outputs.items():
        if port in FOLDED:
            tensor.set_data_type("float32")
    graph.freeze()
    return graph


def arrays_of(graph: pygraph, rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """An array for each of the graph's inputs; routes are legal ones."""
    import jax.numpy as jnp

    if graph.name in ATTENTION:
        return ATTENTION[graph.name].arrays(graph, rng)
    routes = {
        "offset": np.array([0, 16, 16, 48]),
        "token_index": rng.permutation(np.repeat(np.arange(32), 2)),
        "token_ks": np.zeros(64),
    }
    index = routes["token_index"]
    for token in range(32):
        routes["token_ks"][index == token] = (0, 1)

    def drawn(tensor: Tensor) -> np.ndarray[Any, Any]:
        """Weights, statistics and scales are float32 or powers, and positive."""
        if tensor.name in routes:
            return routes[tensor.name].reshape(tensor.dim)
        positive = tensor.data_type in (data_type.FLOAT, data_type.FP8_E8M0)
        return rng.uniform(0.25, 1.5, tensor.dim) if positive else rng.standard_normal(tensor.dim)

    return [drawn(tensor).astype(jnp.dtype(tensor.data_type.value)) for tensor in graph.inputs]
