"""Values in few bits with a scale for each block: `cudnn_jax.block_scale_quantize`, `block_scale_dequantize`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import data_type
from cudnn_jax.ops import _arguments as check
from cudnn_jax.ops._functions import RANKS, axis_of, floating, graph_of, kind_of
from cudnn_jax.ops.call import run

_VALUES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
_SCALES = ("float8_e8m0fnu", "float8_e4m3fn", "float32")
_WIDE = ("float32", "bfloat16", "float16", "float64")


def block_scale_quantize(
    x: Any,
    *,
    block_size: int = 32,
    axis: int = -1,
    dtype: Any = "float8_e4m3fn",
    scale_dtype: Any = "float8_e8m0fnu",
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Values in few bits, and a scale for each block of neighbours along an axis:

        scale = the largest |x| of the block / the largest number of dtype, rounded up to scale_dtype
        values = x / scale, rounded to nearest; 0 where the scale is.

    The defaults are MXFP8 of the OCP Microscaling Formats specification (2023), but for its scales, whose powers of two
    are rounded down there and let values saturate.

    Args:
      x: any shape; bfloat16, float16, float32, or float64 in JAX's 64-bit mode.
      block_size: elements that share a scale, at least 1; the last block may be shorter.
      axis: along which blocks run.
      dtype: of the values, "float8_e4m3fn", "float8_e5m2" or "float4_e2m1fn".
      scale_dtype: "float8_e8m0fnu", "float8_e4m3fn" or "float32".
      implementation: None for the ranked plan list; "cudnn", "xla", or the name of an engine or plan.

    Returns:
      (values, scales): x's shape, and x's shape with ceil(size / block_size) along `axis`. The gradient of x is
      straight through: the values' cotangent over the scale, as if rounding had the slope 1 and scales were constants.
      JAX keeps that cotangent in the values' own dtype; in a graph of both directions (`cudnn_jax.call`) it is float32.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the message names it.
      NotImplementedError: forward mode, unless `implementation` is "xla"; or a `vmap` that no single call is, where
        `implementation` names anything else.
      GraphNotSupportedError: `implementation` names no engine, or one that declines; the message holds the names, or
        the reason.
    """
    x = floating("x", x, rank=RANKS, layout="at least one axis")
    rows = _rows(x)
    graph = _quantised(
        rows.shape,
        jnp.dtype(x.dtype),
        check.whole_number("block_size", block_size, 1),
        axis_of(axis, x.ndim) + rows.ndim - x.ndim,
        kind_of("dtype", dtype, _VALUES),
        kind_of("scale_dtype", scale_dtype, _SCALES),
    )
    values, scales = run(graph, rows, implementation=implementation, by_rows=True)
    return values.reshape(x.shape), scales.reshape(scales.shape[rows.ndim - x.ndim :])


def block_scale_dequantize(
    values: Any,
    scales: Any,
    *,
    block_size: int = 32,
    axis: int = -1,
    dtype: Any = "float32",
    implementation: str | None = None,
) -> jax.Array:
    """Values times the scale of their block, values[..., i, ...] scales[..., i // block_size, ...].

    Args:
      values: any shape and floating type, such as float8_e4m3fn.
      scales: values' shape with ceil(size / block_size) along `axis`; any floating type, such as float8_e8m0fnu.
      block_size: elements that share a scale, at least 1; the last block may be shorter.
      axis: along which blocks run.
      dtype: of the result, "float32", "bfloat16", "float16", or "float64" in JAX's 64-bit mode.
      implementation: None for the ranked plan list; "cudnn", "xla", or the name of an engine or plan.

    Returns:
      values' shape in `dtype`. Gradients of values and scales, each in its own dtype: few bits where it has few, and 0
      of scales in float8_e8m0fnu, which has neither a 0 nor a sign.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the message names it.
      NotImplementedError: forward mode, unless `implementation` is "xla"; or a `vmap` that no single call is, where
        `implementation` names anything else.
      GraphNotSupportedError: `implementation` names no engine, or one that declines; the message holds the names, or
        the reason.
    """
    values = check.array("values", values, rank=RANKS, layout="at least one axis")
    at, size = axis_of(axis, values.ndim), check.whole_number("block_size", block_size, 1)
    dim = (*values.shape[:at], -(-values.shape[at] // size), *values.shape[at + 1 :])
    rule = f"values' shape with one for each block of {size} along axis {at}, {dim}"
    scales = check.array("scales", scales, rank=(values.ndim,), layout=rule)
    check.shape("scales", scales, dim, rule)
    for name, array in (("values", values), ("scales", scales)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {array.dtype}; the rule: a floating type")
    types = (data_type.of(values.dtype), data_type.of(scales.dtype))
    arrays = (_rows(values), _rows(scales))
    graph = _dequantised(arrays[0].shape, arrays[1].shape, types, size, kind_of("dtype", dtype, _WIDE))
    (made,) = run(graph, *arrays, implementation=implementation, by_rows=True)
    return made.reshape(values.shape)


def _rows(x: jax.Array) -> jax.Array:
    """A single row gets an axis in front, which `vmap` makes longer."""
    return x[None] if x.ndim == 1 else x


@lru_cache(maxsize=1024)
def _quantised(
    dim: tuple[int, ...], dtype: np.dtype, block_size: int, axis: int, values: data_type, scales: data_type
) -> pygraph:
    graph = graph_of(dtype)
    made = graph.block_scale_quantize(graph.tensor(dim, name="x"), block_size=block_size, axis=axis)
    for tensor, kind in zip(made, (values, scales), strict=True):
        tensor.set_output(True).set_data_type(kind)
    graph.freeze()
    return graph


@lru_cache(maxsize=1024)
def _dequantised(
    dim: tuple[int, ...], scales: tuple[int, ...], types: tuple[data_type, data_type], block_size: int, made: data_type
) -> pygraph:
    graph = graph_of(made.value)
    x = graph.tensor(dim, data_type=types[0], name="values")
    descale = graph.tensor(scales, data_type=types[1], name="scales")
    graph.block_scale_dequantize(x, descale, block_size=block_size).set_output(True)
    graph.freeze()
    return graph
