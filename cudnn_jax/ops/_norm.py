"""Norms of an array's rows: `rms_norm` and `layer_norm`, each over a graph of a matrix."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import data_type
from cudnn_jax.ops import _arguments as check
from cudnn_jax.ops._functions import RANKS, axis_of, floating, graph_of, wide
from cudnn_jax.ops.call import run


def normalise(
    operation: str, x: Any, scale: Any, bias: Any, *, axis: Any, epsilon: Any, implementation: str | None
) -> jax.Array:
    """The norm, named by the graph's operation, of x along some axes."""
    x = floating("x", x, rank=RANKS, layout="(..., D), at least one axis")
    axes = _axes(axis, x.ndim)
    dim = tuple(x.shape[at] for at in axes)
    if 0 in dim:
        raise ValueError(f"x has shape {x.shape}; the rule: axes that are normalised, {axes}, are at least 1 long")
    weights = {}
    for name, given in (("scale", scale), ("bias", bias)):
        if given is not None:
            rule = f"x's dims along the normalised axes, {dim}"
            weights[name] = floating(name, given, rank=(len(dim),), layout=rule)
            check.shape(name, weights[name], dim, rule)
    epsilon = check.static_number("epsilon", epsilon, wide(x.dtype))
    if epsilon < 0:
        raise ValueError(f"epsilon is {epsilon}; the rule: at least 0")
    order = (*(at for at in range(x.ndim) if at not in axes), *axes)
    moved = x.transpose(order)
    rows, cols = prod(x.shape[at] for at in order[: x.ndim - len(axes)]), prod(dim)
    types = tuple((name, data_type.of(weight.dtype)) for name, weight in weights.items())
    graph = _graph(operation, rows, cols, jnp.dtype(x.dtype), types, epsilon)
    arrays = (moved.reshape(rows, cols), *(weight.reshape(1, cols) for weight in weights.values()))
    (y,) = run(graph, *arrays, implementation=implementation, by_rows=True)
    return y.reshape(moved.shape).transpose(tuple(np.argsort(order)))


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    axes = {axis_of(each, rank) for each in given}
    if not axes or len(axes) != len(given):
        raise ValueError(f"axis is {axis!r}; the rule: one axis of x, or several, each once")
    return tuple(sorted(axes))


@lru_cache(maxsize=1024)
def _graph(
    operation: str, rows: int, cols: int, dtype: np.dtype, types: tuple[tuple[str, data_type], ...], epsilon: float
) -> pygraph:
    graph = graph_of(dtype)
    x = graph.tensor((rows, cols), name="x")
    weights = {name: graph.tensor((1, cols), data_type=kind, name=name) for name, kind in types}
    y, *_ = getattr(graph, operation)(x, **weights, epsilon=epsilon, norm_forward_phase="INFERENCE")
    y.set_output(True)
    graph.freeze()
    return graph
