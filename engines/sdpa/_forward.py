"""The forward pass over tiles: softmax computed online."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Results(NamedTuple):
    """The output (B, K, G, T, DV), and of each row, (B, K, G, T, 1) in the accumulator's type, the logsumexp, the
    largest logit and the sum of the exponentials below it; the latter two if asked for.
    """

    o: Array
    lse: Array
    most: Array | None = None
    total: Array | None = None


def forward(problem: Problem, dtype: Any = None, scores: bool = False) -> Results:
    """Attention with an output of type `dtype`, the input's if absent; `scores` asks for all of the results."""
    band, rows, acc = problem.band, problem.band.rows, problem.accumulator
    width, dtype = problem.v.shape[-1], problem.q.dtype if dtype is None else dtype

    def fresh(length: int, width: int, value: float, dtype: Any) -> Array:
        shape = (*problem.q.shape[:3], length, width)
        blank: Array = varying_like(jnp.full(shape, value, dtype), problem.operands)
        return blank

    def row_block(i: Any, results: tuple[Array, ...], over_keys: Any) -> tuple[Array, ...]:
        q = cut(problem.q, ROW_AXIS, rows, i)

        def tile(j: Any) -> Part:
            s, _ = problem.logits(q, problem.key_tile(problem.k, j), i, j)
            most = jnp.max(s, axis=-1, keepdims=True)
            p = jnp.exp(s - _finite(most))
            weights = p if problem.dropout is None else p * problem.kept(p, i, j)
            v = problem.key_tile(problem.v, j)
            return most, jnp.sum(p, axis=-1, keepdims=True), problem.rows_times(weights.astype(v.dtype), v, 2)

        size = rows.size
        if band.keys.count == 1:
            part = tile(0)
        else:
            start = fresh(size, 1, -jnp.inf, acc), fresh(size, 1, 0, acc), fresh(size, width, 0, acc)
            part = over_keys(lambda j, part: _joined(part, tile(j)), start)
        if problem.sink is not None:
            part = _joined(part, _sink_alone(problem.sink, part))
        most, total, o = part
        some = total != 0
        if problem.dropout is not None:
            o = o * problem.dropout.scale
        o = jnp.where(some, o / jnp.where(some, total, 1), 0).astype(dtype)
        lse = jnp.where(some, most + jnp.log(total), -jnp.inf)
        made = (o, lse, most, total) if scores else (o, lse)
        return tuple(put(old, new, ROW_AXIS, rows, i) for old, new in zip(results, made, strict=True))

    length = rows.length
    start = [fresh(length, width, 0, dtype), fresh(length, 1, -jnp.inf, acc)]
    start += [fresh(length, 1, -jnp.inf, acc), fresh(length, 1, 0, acc)] if scores else []
    o, *stats = over_tiles(band, row_block, tuple(map(stored, start)))
    o = restored(o, dtype)
    valid = band.valid_rows()
    if valid is not None:
        o = jnp.where(valid, o, 0)
        stats = [jnp.where(valid, x, blank) for x, blank in zip(stats, (-jnp.inf, -jnp.inf, 0), strict=False)]
    return Results(o, *stats)


def _sink_alone(sink: Array, like: Part) -> Part:
    """The part of a logit that has no value."""
    most, total, o = like
    return jnp.broadcast_to(sink.astype(most.dtype), most.shape), jnp.ones_like(total), jnp.zeros_like(o)


def _joined(a: Part, b: Part) -> Part:
    most = jnp.maximum(a[0], b[0])
    fade_a, fade_b = (jnp.exp(x[0] - _finite(most)) for x in (a, b))
    return most, a[1] * fade_a + b[1] * fade_b, a[2] * fade_a + b[2] * fade_b


def _finite(most: Array) -> Array:
    """A reference for exponents also where there is no logit."""
    return jnp.where(most == -jnp.inf, 0, most)
