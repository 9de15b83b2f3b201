"""The forward pass over tiles: softmax computed online."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cudnn_jax.engines.sdpa._blockwise import (
    ROW_AXIS,
    Problem,
    cut,
    over_tiles,
    put,
    restored,
    stored,
    varying_like,
)

Array = jax.Array
Part = tuple[Array, Array, Array]
"""Of some keys: the largest logit, the sum of exp(logit - largest), and the values weighted with the same."""


def forward(problem: Problem) -> tuple[Array, Array]:
    """The output (B, K, G, T, DV) in the input's type and the logsumexp (B, K, G, T, 1) in the accumulator's."""
    band, rows, acc = problem.band, problem.band.rows, problem.accumulator
    width, dtype = problem.v.shape[-1], problem.q.dtype

    def fresh(length: int, width: int, value: float, dtype: Any) -> Array:
        shape = (*problem.q.shape[:3], length, width)
        blank: Array = varying_like(jnp.full(shape, value, dtype), problem.operands)
        return blank

    def row_block(i: Any, results: tuple[Array, Array], over_keys: Any) -> tuple[Array, Array]:
        q = cut(problem.q, ROW_AXIS, rows, i)

        def tile(j: Any) -> Part:
            s, _ = problem.logits(q, problem.key_tile(problem.k, j), i, j)
            most = jnp.max(s, axis=-1, keepdims=True)
            p = jnp.exp(s - _finite(most))
            v = problem.key_tile(problem.v, j)
            return most, jnp.sum(p, axis=-1, keepdims=True), problem.rows_times(p.astype(v.dtype), v, 2)

        if band.keys.count == 1:
            most, total, o = tile(0)
        else:
            size = rows.size
            start = fresh(size, 1, -jnp.inf, acc), fresh(size, 1, 0, acc), fresh(size, width, 0, acc)
            most, total, o = over_keys(lambda j, part: _joined(part, tile(j)), start)
        some = total != 0
        o = jnp.where(some, o / jnp.where(some, total, 1), 0).astype(dtype)
        lse = jnp.where(some, most + jnp.log(total), -jnp.inf)
        return put(results[0], o, ROW_AXIS, rows, i), put(results[1], lse, ROW_AXIS, rows, i)

    start = stored(fresh(rows.length, width, 0, dtype)), fresh(rows.length, 1, -jnp.inf, acc)
    o, lse = over_tiles(band, row_block, start)
    o = restored(o, dtype)
    valid = band.valid_rows()
    return (o, lse) if valid is None else (jnp.where(valid, o, 0), jnp.where(valid, lse, -jnp.inf))


def _joined(a: Part, b: Part) -> Part:
    most = jnp.maximum(a[0], b[0])
    fade_a, fade_b = (jnp.exp(x[0] - _finite(most)) for x in (a, b))
    return most, a[1] * fade_a + b[1] * fade_b, a[2] * fade_a + b[2] * fade_b


def _finite(most: Array) -> Array:
    """A reference for exponents also where there is no logit."""
    return jnp.where(most == -jnp.inf, 0, most)
