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
Carry = tuple[Array, Array, Array]


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

        def tile(j: Any, carry: Carry) -> Carry:
            most, total, o = carry
            s, _ = problem.logits(q, problem.key_tile(problem.k, j), i, j)
            new_most = jnp.maximum(most, jnp.max(s, axis=-1, keepdims=True))
            base = jnp.where(new_most == -jnp.inf, 0, new_most)
            p = jnp.exp(s - base)
            fade = jnp.exp(most - base)
            v = problem.key_tile(problem.v, j)
            o = o * fade + problem.rows_times(p.astype(v.dtype), v, 2)
            return new_most, total * fade + jnp.sum(p, axis=-1, keepdims=True), o

        size = rows.size
        start = fresh(size, 1, -jnp.inf, acc), fresh(size, 1, 0, acc), fresh(size, width, 0, acc)
        most, total, o = over_keys(tile, start)
        some = total != 0
        o = jnp.where(some, o / jnp.where(some, total, 1), 0).astype(dtype)
        lse = jnp.where(some, most + jnp.log(total), -jnp.inf)
        return put(results[0], o, ROW_AXIS, rows, i), put(results[1], lse, ROW_AXIS, rows, i)

    start = stored(fresh(rows.length, width, 0, dtype)), fresh(rows.length, 1, -jnp.inf, acc)
    o, lse = over_tiles(band, row_block, start)
    o = restored(o, dtype)
    valid = band.valid_rows()
    return (o, lse) if valid is None else (jnp.where(valid, o, 0), jnp.where(valid, lse, -jnp.inf))
