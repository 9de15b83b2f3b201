"""The backward pass over tiles: probabilities are recomputed from the logsumexp.

One pass, query blocks outermost. dK and dV grow in place with keys as their minor axis, so that every product reads
its left operand along rows: a transposed 16-bit left operand is five times slower on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cudnn_jax.engines.sdpa._blockwise import (
    KEY_AXIS,
    ROW_AXIS,
    Problem,
    cut,
    merge,
    over_tiles,
    put,
    restored,
    stored,
    varying_like,
)
from cudnn_jax.engines.sdpa._tiling import Band

Array = jax.Array


class Gradients(NamedTuple):
    """In the types and layouts of q, k, v, the bias and the sink; of the bias if asked for, of the sink if there is
    one.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    sink: Array | None


def backward(
    problem: Problem, o: Array, d_o: Array, lse: Array, d_lse: Array | None, want_bias: bool = False
) -> Gradients:
    """The gradients from the cotangents of the output and of the logsumexp."""
    valid = problem.band.valid_rows()
    if valid is not None:
        # What lies past a length may be NaN.
        o, d_o, q = (jnp.where(valid, x, 0) for x in (o, d_o, problem.q))
        lse = jnp.where(valid, lse, -jnp.inf)
        problem = dataclasses.replace(problem, q=q)
    q, bias, band, acc = problem.q, problem.bias, problem.band, problem.accumulator
    rows, keys = band.rows, band.keys

    lse = lse.astype(acc)
    empty = lse == -jnp.inf
    # d logits = p * (dp - pull), and a row with nothing to attend to has p = exp(s - inf) = 0.
    pull = jnp.sum(o.astype(acc) * d_o.astype(acc), axis=-1, keepdims=True)
    d_o = d_o.astype(q.dtype)
    dropout = problem.dropout
    if dropout is not None and dropout.scale_inv is not None:
        pull = pull * (dropout.scale * dropout.scale_inv)
    pull = jnp.where(empty, 0, pull if d_lse is None else pull - d_lse.astype(acc))
    lse = jnp.where(empty, jnp.inf, lse)
    d_sink = None
    if problem.sink is not None:
        # The sink has no value: of its d probability nothing is left but the pull.
        d_sink = -jnp.sum(jnp.exp(problem.sink.astype(acc) - lse) * pull, axis=(0, 3), keepdims=True)
        d_sink = d_sink.astype(problem.sink.dtype)
    q_turned, d_o_turned = (jnp.moveaxis(x, -1, 2) for x in (q, d_o))
    # float16 has no room for small d logits: their products run on float32 operands.
    narrow = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    scale = jnp.asarray(problem.scale, acc)
    sum_type = acc if bias is None else _sum_type(bias, band, acc)

    def row_block(i: Any, carry: Any, over_keys: Any) -> Any:
        d_q, *sums = carry
        q_tile, d_o_tile, lse_tile, pull_tile = (cut(x, ROW_AXIS, rows, i) for x in (q, d_o, lse, pull))
        q_t, d_o_t = (merge(cut(x, KEY_AXIS, rows, i), 3) for x in (q_turned, d_o_turned))
        repeated = rows.positions(i, ROW_AXIS, 5) < i * rows.size if rows.ragged else None
        if repeated is not None:
            lse_tile = jnp.where(repeated, jnp.inf, lse_tile)

        def tile(j: Any, inner: Any) -> Any:
            d_q, d_k, d_v, d_bias = inner
            k, v = problem.key_tile(problem.k, j), problem.key_tile(problem.v, j)
            s, given = problem.logits(q_tile, k, i, j)
            p = jnp.exp(s - lse_tile)
            d_p = problem.rows_times(d_o_tile, v, 3)
            if dropout is not None:
                kept = problem.kept(p, i, j) * dropout.scale
                d_s = p * (d_p * kept - pull_tile)
                p = p * kept
            else:
                d_s = p * (d_p - pull_tile)
            if given is not None:
                d_s = jnp.where(given, d_s, 0)
            if d_bias is not None:
                d_bias = _add_bias(d_bias, d_s, sum_type, band, i, j)
            p, d_s = p.astype(d_o.dtype), d_s.astype(narrow)
            d_q = d_q + problem.rows_times(d_s, k.astype(narrow), 2)
            d_k_part = problem.product(q_t.astype(narrow), merge(d_s, 2), 2)
            d_v_part = problem.product(d_o_t, merge(p, 2), 2)
            d_k = put(d_k, cut(d_k, 3, keys, j) + d_k_part, 3, keys, j)
            d_v = put(d_v, cut(d_v, 3, keys, j) + d_v_part, 3, keys, j)
            return d_q, d_k, d_v, d_bias

        start = varying_like(jnp.zeros(q_tile.shape, acc), (*problem.operands, d_o, lse))
        d_q_tile, *sums = over_keys(tile, (start, *sums))
        d_q_tile = (d_q_tile * scale).astype(q.dtype)
        if repeated is not None:
            d_q_tile = jnp.where(repeated, restored(cut(d_q, ROW_AXIS, rows, i), q.dtype), d_q_tile)
        return put(d_q, d_q_tile, ROW_AXIS, rows, i), *sums

    turned = [jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), acc) for x in (problem.k, problem.v)]
    bias_sum = stored(jnp.zeros(bias.shape, sum_type)) if bias is not None and want_bias else None
    start = varying_like((stored(jnp.zeros(q.shape, q.dtype)), *turned, bias_sum), (*problem.operands, d_o, lse))
    d_q, d_k, d_v, d_bias = over_tiles(band, row_block, start)

    # Without the barrier XLA's CPU backend turns transpose(product) into a 16-bit product that it cannot run.
    d_k, d_v = lax.optimization_barrier((d_k, d_v))  # type: ignore[no-untyped-call]
    d_k = jnp.swapaxes(d_k * scale, 2, 3).astype(problem.k.dtype)
    d_v = jnp.swapaxes(d_v, 2, 3).astype(problem.v.dtype)
    if d_bias is not None and bias is not None:
        d_bias = restored(d_bias, sum_type).astype(bias.dtype)
    return Gradients(jnp.where(empty, 0, restored(d_q, q.dtype)), d_k, d_v, d_bias, d_sink)


def _sum_type(bias: Array, band: Band, acc: Any) -> Any:
    """What dBias is summed in: an entry that one tile alone reaches needs nothing wider than the bias's type."""
    once = bias.shape[ROW_AXIS] == band.rows.length and bias.shape[KEY_AXIS] == band.keys.length
    return bias.dtype if once else acc


def _add_bias(total: Array, d_s: Array, dtype: Any, band: Band, i: Any, j: Any) -> Array:
    """Adds a tile's d logits, summed over the axes that the bias broadcasts, to a total of that type."""
    shared = tuple(axis for axis in range(5) if total.shape[axis] == 1 and d_s.shape[axis] != 1)
    part = jnp.sum(d_s, axis=shared, keepdims=True)
    starts = [0] * 5
    for axis, blocks, index in ((ROW_AXIS, band.rows, i), (KEY_AXIS, band.keys, j)):
        if axis not in shared:
            starts[axis] = blocks.start(index)
    at = [jnp.asarray(start, jnp.int32) for start in starts]
    old = restored(lax.dynamic_slice(total, at, part.shape, allow_negative_indices=False), dtype)
    new = stored((old + part).astype(dtype))
    return lax.dynamic_update_slice(total, new, at, allow_negative_indices=False)
