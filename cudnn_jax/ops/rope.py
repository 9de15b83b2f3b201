"""Rotary position embedding: `cudnn_jax.rope`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import data_type
from cudnn_jax.ops import _arguments as check
from cudnn_jax.ops._functions import RANKS, floating, graph_of, wide
from cudnn_jax.ops.call import run


def rope(x: Any, angles: Any, *, output_scale: float = 1.0, implementation: str | None = None) -> jax.Array:
    """Rotary position embedding: the halves (lo, hi) of the last R elements of x turned by angles,

        lo' = output_scale (lo cos - hi sin),    hi' = output_scale (hi cos + lo sin),

    each with the angles of its own half, and the elements in front of them times output_scale. As in Su et al.,
    "RoFormer" (2021), with pairs (i, i + R / 2) as in GPT-NeoX. Computed in float32, in float64 where x is.

    Args:
      x: (..., D); bfloat16, float16, float32, or float64 in JAX's 64-bit mode.
      angles: radians, (..., R) with R even and at most D, which broadcasts to (*x.shape[:-1], R); it may have fewer
        axes in front. Any of x's types; float32 where positions are large. For (B, T, N, D) and one set of angles for
        each position (T, 1, R).
      output_scale: a Python number.
      implementation: None for the ranked plan list; "cudnn", "xla", or the name of an engine or plan.

    Returns:
      x's shape and dtype. Gradients of x and angles, each in its dtype; that of angles is summed over the axes along
      which they are broadcast.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the message names it.
      NotImplementedError: forward mode, unless `implementation` is "xla"; or a `vmap` that no single call is, where
        `implementation` names anything else.
      GraphNotSupportedError: `implementation` names no engine, or one that declines; the message holds the names, or
        the reason.
    """
    x = floating("x", x, rank=RANKS, layout="(..., D), at least one axis")
    rule = f"(..., R), R even and at most {x.shape[-1]}, broadcastable to ({', '.join(map(str, x.shape[:-1]))}, R)"
    angles = floating("angles", angles, rank=range(1, x.ndim + 1), layout=rule)
    width = angles.shape[-1]
    if width < 2 or width % 2 or width > x.shape[-1]:
        raise ValueError(f"angles has shape {angles.shape}; the rule: {rule}")
    aligned = (1,) * (x.ndim - angles.ndim) + angles.shape
    check.broadcastable("angles", angles.reshape(aligned), (*x.shape[:-1], width), rule)
    scale = check.static_number("output_scale", output_scale, wide(x.dtype))
    lead = (1,) if x.ndim == 1 else ()  # rows, for vmap
    graph = _graph((*lead, *x.shape), jnp.dtype(x.dtype), (*lead, *aligned), data_type.of(angles.dtype), scale)
    arrays = (x.reshape(*lead, *x.shape), angles.reshape(*lead, *aligned))
    (y,) = run(graph, *arrays, implementation=implementation, by_rows=True)
    return y.reshape(x.shape)


@lru_cache(maxsize=1024)
def _graph(dim: tuple[int, ...], dtype: np.dtype, angles: tuple[int, ...], kind: data_type, scale: float) -> pygraph:
    graph = graph_of(dtype)
    x, freqs = graph.tensor(dim, name="x"), graph.tensor(angles, data_type=kind, name="angles")
    graph.rope(x, freqs, output_scale=scale, rope_dim=angles[-1]).set_output(True)
    graph.freeze()
    return graph
