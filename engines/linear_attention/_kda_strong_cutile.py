"""cuTile kernels for the chunks that `kda_prepare` marks, as their gates are too strong for it.

There are few or none: they are listed, and a grid that fits on the device walks over the list.
"""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._gdn_chunks_cutile import load_column, load_span, power
from cudnn_jax.engines.linear_attention._kda_chunks_cutile import (
    FROM_8,
    FROM_16,
    FROM_32,
    LEAST_NEAR,
    erase_rates,
    load_gates,
    rates,
    scaled,
    signed_powers,
    table,
    wide_range,
    write_inverse,
    write_part,
)
from cudnn_jax.engines.linear_attention._tiles_cutile import C, product

Static = ct.Constant

TILE = 1024
"""Marks that a block of `kda_strong_places` works on."""


def kda_strong_places(first_slot, strong, places, HEADS: Static[int]):
    """Writes places (1 + slots * HO), int32: how many of the marks `strong` (slots * HO) are set, and where, in order.
    Block b works on TILE of them, and counts those before."""
    block = ct.bid(0)
    # Behind them are slots that are left over, whose marks may be anything.
    used = ct.gather(first_slot, (first_slot.shape[0] - 1,)) * HEADS
    within = ct.arange(TILE, dtype=ct.int32)
    before = ct.zeros((TILE,), ct.int32)
    for tile in range(block):
        before = before + _marks(strong, tile * TILE + within, used)
    place = block * TILE + within
    marks = _marks(strong, place, used)
    count = ct.sum(before, axis=0) + ct.cumsum(marks, axis=0)
    ct.scatter(places, (count,), place, mask=marks != 0)
    ct.scatter(places, (0 * within,), count, mask=place == strong.shape[0] - 1)


def _marks(strong, place, used):
    return ct.gather(strong, (place,), mask=place < used)


def _pairs(kind, operands, gated, tables, row, by_keep):
    """<erase_i, key_j> and <query_i, key_j>, in each channel times the powers of the gates summed up to the middle that
    the table `kind` has."""
    q, k, beta, first, head, Q_RATIO, K_RATIO, PART, PARTS, ERASE, SIGMOID, DOUBLE = operands
    g, a_log, dt_bias, tokens, options = gated
    dtype = wide_range(k.dtype) if kind == FROM_8 else k.dtype
    erased, scores = ct.zeros((C, C), ct.float32), ct.zeros((C, C), ct.float32)
    for part in ct.static_iter(range(PARTS)):
        gates = load_gates(g, a_log, dt_bias, first, tokens, head, part, PART, options)
        if kind == FROM_8:
            gates = ct.maximum(gates, ct.full((C, PART), LEAST_NEAR, ct.float16))
            forth, back = signed_powers(product(table(tables, kind), gates), row, 8)
        else:
            forth = back = power(product(table(tables, kind), gates))
        erase = key = load_span(k, first, head // K_RATIO, part, PART)
        if ERASE:
            erase = scaled(key, erase_rates(beta, first, head, part, PART, SIGMOID, DOUBLE), k.dtype)
        keys = ct.transpose(scaled(key, back * by_keep, dtype))
        erased = ct.mma(scaled(erase, forth, dtype), keys, erased)
        query = load_span(q, first, head // Q_RATIO, part, PART)
        scores = ct.mma(scaled(query, forth, dtype), keys, scores)
    return erased, scores


def _chosen(mask, x, y):
    return ct.where(mask, x[0], y[0]), ct.where(mask, x[1], y[1])


def kda_strong_prepare(
    q,
    k,
    g,
    beta,
    a_log,
    dt_bias,
    chunks,
    tables,
    places,
    inverse,
    attention,
    q_norms,
    k_norms,
    PART: Static[int],
    PARTS: Static[int],
    HEADS: Static[int],
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    SCALE: Static[float],
    L2NORM: Static[bool],
    ERASE: Static[bool],
    SIGMOID: Static[bool],
    DOUBLE: Static[bool],
    SAFE: Static[bool],
    A_LOG: Static[bool],
    DT_BIAS: Static[bool],
    LINEAR: Static[bool],
    LOWER: Static[float],
):
    """Writes `inverse` and `attention` of `kda_prepare`, whose norms it reads, for the chunks and heads in `places`, at
    which the blocks take turns."""
    options = SAFE, A_LOG, DT_BIAS, LINEAR, LOWER
    for at in range(ct.bid(0), ct.gather(places, (0,)), ct.num_blocks(0)):
        place = ct.gather(places, (1 + at,))
        slot, head = place // HEADS, place % HEADS
        first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        column = ct.reshape(ct.arange(C, dtype=ct.int32), (1, C))
        by_query, by_key, by_keep = SCALE, 1.0, 1.0
        if L2NORM:
            by_query = load_column(q_norms, slot, head) * SCALE
            by_key = by_keep = load_column(k_norms, slot, head)
        if not ERASE:
            by_keep = by_keep * rates(beta, first, tokens, head, row, SIGMOID, DOUBLE)
        gated = g, a_log, dt_bias, tokens, options
        operands = q, k, beta, first, head, Q_RATIO, K_RATIO, PART, PARTS, ERASE, SIGMOID, DOUBLE
        # One kind of pairs after the other: with the sums of all three at once registers spill.
        near = _pairs(FROM_8, operands, gated, tables, row, by_keep)
        near = _chosen(row // 16 == column // 16, near, _pairs(FROM_16, operands, gated, tables, row, by_keep))
        made = _chosen(row // 32 == column // 32, near, _pairs(FROM_32, operands, gated, tables, row, by_keep))
        inside = row < tokens
        write_part(attention, slot, head, 0, ct.where(inside & (row >= column), made[1] * by_query, 0.0))
        write_inverse(inverse, slot, head, ct.where(inside & (row > column), made[0] * by_key, 0.0), row, column)
