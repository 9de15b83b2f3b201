"""Rows of attention with all keys at once, block after block: a row's softmax is whole when it is rounded.

Grouped heads, bounds, lengths and bias are those of `cudnn_jax.engines.sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import e, log, log2, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cudnn_jax.engines.generic._step import Made, Step
from cudnn_jax.engines.sdpa._blockwise import ROW_AXIS, Problem, cut, merge, over_blocks, put, varying_like
from cudnn_jax.engines.sdpa._operands import grouped, lengths, slopes, unpaged
from cudnn_jax.engines.sdpa._tiling import Band, Blocks
from cudnn_jax.engines.sdpa.facts import bounds, length_of_keys
from cudnn_jax.graph import data_type

Array = jax.Array

_ENTRIES = 1 << 24
"""The most logits that are held at once, over all batches and heads."""


def accumulating(step: Step) -> Step:
    """The step in float32, or in float64 where it computes in that."""
    return step if step.compute is data_type.DOUBLE else replace(step, compute=data_type.FLOAT)


def numbers(step: Step, *ports: str) -> Any:
    """The product of the numbers at ports of one element."""
    return prod(step.wide(port).reshape(()) for port in ports)


def attn_scale(step: Step) -> Any:
    """A port's or the node's; 1 if absent, or what is left where q holds attn_scale * log2(e)."""
    if "attn_scale" in step.given:
        return numbers(step, "attn_scale")
    if step.node.params["attn_scale_prefolded"]:
        return log(2)
    given = step.node.params["attn_scale"]
    return 1.0 if given is None else float(given)


def largest_of(x: Array) -> Array:
    """The largest magnitude; 0 of nothing."""
    return jnp.max(jnp.abs(x), initial=0)


def _blocks(length: int, most: int, grain: int) -> Blocks:
    """Blocks of at most `most` rows; of whole grains where there are grains, or all rows in one."""
    if grain == 1:
        return Blocks.cut(length, max(1, most))
    size = next((size for size in range(most - most % grain, 0, -grain) if length % size == 0), length)
    return Blocks(length, size, length // size if size else 1)


def problem_of(step: Step, q: Array, k: Array, v: Array, scale: Any, grain: int = 1) -> Problem:
    """Of (B, N, T, D), (B, K, S, D) and (B, K, S, DV), or pages of the latter two, whose products `scale` multiplies.

    Blocks of rows are multiples of `grain`.
    """
    (batch, heads, length, _), kv_heads, kv_length = q.shape, k.shape[1], length_of_keys(step.node)
    rows = _blocks(length, _ENTRIES // max(1, batch * heads * kv_length), grain)
    return Problem(
        q=grouped(q, kv_heads),
        k=unpaged("k", {**step.given, "k": k}, kv_length),
        v=unpaged("v", {**step.given, "v": v}, kv_length),
        bias=grouped(step.wide("bias"), kv_heads) if "bias" in step.given else None,
        masks=(),
        band=Band.of(
            bounds(step.node.params),
            rows,
            Blocks(kv_length, kv_length, 1),
            lengths(step.given, "q"),
            lengths(step.given, "kv"),
        ),
        scale=scale,
        slopes=slopes(heads, kv_heads) if step.node.params.get("use_alibi_mask") else None,
        sink=grouped(step.wide("sink_token"), kv_heads) if "sink_token" in step.given else None,
    )


def _sink(problem: Problem) -> Array:
    """The extra logit of each head, (1, K, G, 1, 1); one of no weight where there is none."""
    return jnp.full((1,) * 5, -jnp.inf, problem.q.dtype) if problem.sink is None else problem.sink


class Rows(NamedTuple):
    """Of each row: the weighted values, the largest logit, the sum of exp(logit - largest).

    `amax` is the largest of the softmax, before it is rounded.
    """

    o: Array
    most: Array
    total: Array
    amax: Array


def attend(step: Step, problem: Problem, weights: Callable[[Array, Array], Array]) -> Rows:
    """`weights` makes of exp(logit - largest) and its sums what multiplies the values; no sum is 0."""
    band, rows, dtype = problem.band, problem.band.rows, problem.q.dtype
    sink, whole = _sink(problem), problem.q.shape[:4]

    def row_block(i: Any, made: Rows) -> Rows:
        logits, extra = _logits(problem, i), sink
        valid = band.valid_rows(i)
        if valid is not None:
            logits, extra = (jnp.where(valid, x, -jnp.inf) for x in (logits, sink))
        most = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf), extra)
        finite = jnp.where(most == -jnp.inf, 0, most)
        powers = jnp.exp(logits - finite)
        total = jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(extra - finite)
        divisor = jnp.where(total == 0, 1, total)
        o = problem.rows_times(weights(powers, divisor), problem.key_tile(problem.v, 0), 2)
        return Rows(
            put(made.o, o, ROW_AXIS, rows, i),
            put(made.most, most, ROW_AXIS, rows, i),
            put(made.total, total, ROW_AXIS, rows, i),
            jnp.maximum(made.amax, largest_of(powers / divisor)),
        )

    start = Rows(
        jnp.zeros((*whole, problem.v.shape[-1]), dtype),
        jnp.full((*whole, 1), -jnp.inf, dtype),
        jnp.zeros((*whole, 1), dtype),
        jnp.zeros((), dtype),
    )
    made: Rows = over_blocks(0, rows.count, row_block, varying_like(start, problem.operands))
    o, most, total = (x.reshape(*whole[:1], whole[1] * whole[2], *x.shape[3:]) for x in made[:3])
    return Rows(o, most, total, made.amax)


def _logits(problem: Problem, row_block: Any) -> Array:
    """The masked logits of a block of rows with all keys."""
    q = cut(problem.q, ROW_AXIS, problem.band.rows, row_block)
    return problem.logits(q, problem.key_tile(problem.k, 0), row_block, 0)[0]


def statistics(step: Step, rows: Rows) -> Made:
    """The outputs that say what the softmax was divided by."""
    stats = jnp.where(rows.total == 0, -jnp.inf, rows.most + jnp.log(jnp.where(rows.total == 0, 1, rows.total)))
    base2 = step.node.params.get("stats_use_log2")
    return {"Stats": stats * log2(e) if base2 else stats, "score_max": rows.most, "score_sum_exp": rows.total}


class Cotangent(NamedTuple):
    """What the backward reads beside the logits' operands, as (B, N, ...) arrays.

    Attributes:
      d_o: what v's transpose is multiplied with; what is left of a scale of v is in it.
      pull: the sum of each row of dO * O.
      q, k, again: q, k and dO as the products with rounded tensors read them.
    """

    d_o: Array
    pull: Array
    q: Array
    k: Array
    again: Array


class Sums(NamedTuple):
    """Products with the rounded softmax (v) and its rounded gradient (q, k), the gradient's amax, and the sink's."""

    q: Array
    k: Array
    v: Array
    amax: Array
    sink: Array


def attend_backward(
    step: Step,
    problem: Problem,
    given: Cotangent,
    rounded: Callable[[Array], Array],
    rounded_gradient: Callable[[Array], tuple[Array, Array]],
) -> Sums:
    """`rounded` makes of the softmax what multiplies dO, `rounded_gradient` of its gradient what multiplies k and q."""
    band, rows, kv_heads, dtype = problem.band, problem.band.rows, problem.k.shape[1], problem.q.dtype
    valid, sink, slope = band.valid_rows(), _sink(problem), jnp.asarray(attn_scale(step), dtype)
    d_o, pull, q_again, d_o_again, stats = (
        grouped(x, kv_heads) for x in (given.d_o, given.pull, given.q, given.again, step.wide("stats"))
    )
    if valid is not None:
        # What lies past a length may be NaN.
        q, d_o, pull, q_again, d_o_again = (jnp.where(valid, x, 0) for x in (problem.q, d_o, pull, q_again, d_o_again))
        stats = jnp.where(valid, stats, -jnp.inf)
        problem = replace(problem, q=q)
    # A row with nothing to attend to has p = exp(logit - inf) = 0.
    stats = jnp.where(stats == -jnp.inf, jnp.inf, stats)

    def row_block(i: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_q, d_k, d_v, amax = carry
        d_o_tile, pull_tile, stats_tile, q_tile, again = (
            cut(x, ROW_AXIS, rows, i) for x in (d_o, pull, stats, q_again, d_o_again)
        )
        p = jnp.exp(_logits(problem, i) - stats_tile)
        d_s = p * (problem.rows_times(d_o_tile, problem.key_tile(problem.v, 0), 3) - pull_tile) * slope
        p, (for_k, for_q) = rounded(p), rounded_gradient(d_s)
        d_q_tile = problem.rows_times(for_k, problem.key_tile(given.k, 0), 2)
        if rows.ragged:
            # The last block begins early, and what it repeats counts once.
            once = rows.positions(i, ROW_AXIS, 5) >= i * rows.size
            p, for_q = (jnp.where(once, x, 0) for x in (p, for_q))
        return (
            put(d_q, d_q_tile, ROW_AXIS, rows, i),
            d_k + _transposed_times(for_q, q_tile),
            d_v + _transposed_times(p, again),
            jnp.maximum(amax, largest_of(d_s)),
        )

    zeros = (jnp.zeros(shape, dtype) for shape in (problem.q.shape, problem.k.shape, problem.v.shape, ()))
    start = varying_like(tuple(zeros), (*problem.operands, *given, stats))
    d_q, d_k, d_v, amax = over_blocks(0, rows.count, row_block, start)
    d_sink = -jnp.sum(jnp.exp(sink - stats) * pull, axis=(0, 3))
    return Sums(d_q.reshape(given.q.shape), d_k, d_v, amax, d_sink.reshape(1, given.q.shape[1], 1, 1))


def _transposed_times(left: Array, right: Array) -> Array:
    """(B, K, G, t, x) and (B, K, G, t, y) over the rows of a key head's queries: (B, K, x, y)."""
    product: Array = jnp.einsum("bkmx,bkmy->bkxy", merge(left, 2), merge(right, 2), precision=lax.Precision.HIGHEST)
    return product
