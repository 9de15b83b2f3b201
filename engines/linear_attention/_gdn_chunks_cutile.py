"""cuTile kernels that cut packed sequences into chunks of 64 tokens and prepare each chunk for the scans.

A slot is a place for a chunk. Chunks never straddle sequences; those of a sequence have consecutive slots, in order,
and the slots that are left over come last. Rows of a chunk past its tokens behave as if all that is read were 0.
"""

from __future__ import annotations

import cuda.tile as ct

Static = ct.Constant

C = 64
"""Tokens of a chunk."""
GATE_FLOOR = -40.0
"""Of a token's log gate: e^-40 is nothing beside 1, and sums over a chunk stay small enough to be subtracted."""
BLOCK = 8
"""The diagonal blocks that are inverted first. Powers of what is outside of them stay in the range of float16."""
LOG2_E = 1.4426950408889634

_TABLE_TILE = 256


def _wide(tile):
    return ct.astype(tile, ct.float32)


def _slots(start, stop):
    return (ct.astype(stop - start, ct.int32) + (C - 1)) // C


def gdn_chunk_table(
    cu_seqlens, chunks, first_slot, cleared, SEQUENCES: Static[int], SLOTS: Static[int], COLS: Static[int]
):
    """Writes chunks (SLOTS, 4): first token, tokens (0 in a slot that is left over), sequence, index in it; and
    first_slot (SEQUENCES + 1). Clears the rows of `cleared` (total, columns) that belong to no sequence, if it is given.

    Block b writes sequence b's rows, or the slots that are left over, and clears what it must of 64 rows.
    """
    block = ct.bid(0)
    if block <= SEQUENCES:
        places = ct.arange(_TABLE_TILE, dtype=ct.int32)
        before = ct.zeros((_TABLE_TILE,), ct.int32)
        for tile in range(ct.cdiv(block, _TABLE_TILE)):
            at = tile * _TABLE_TILE + places
            earlier = at < block
            start = ct.gather(cu_seqlens, (at,), mask=earlier)
            stop = ct.gather(cu_seqlens, (at + 1,), mask=earlier)
            before = before + ct.where(earlier, _slots(start, stop), 0)
        first = ct.sum(before, axis=0)
        ct.scatter(first_slot, (block,), first)
        last = block == SEQUENCES
        start = ct.astype(ct.gather(cu_seqlens, (block,)), ct.int32)
        stop = ct.astype(ct.gather(cu_seqlens, (ct.minimum(block + 1, SEQUENCES),)), ct.int32)
        count = ct.where(last, SLOTS - first, _slots(start, stop))
        column = ct.reshape(ct.arange(4, dtype=ct.int32), (1, 4))
        for tile in range(ct.cdiv(count, _TABLE_TILE)):
            index = ct.reshape(tile * _TABLE_TILE + places, (_TABLE_TILE, 1))
            tokens = ct.minimum(ct.maximum(stop - start - C * index, 0), C)
            row = ct.where(column == 2, block, index)
            row = ct.where(column == 1, tokens, row)
            row = ct.where(column == 0, start + C * index, row)
            row = ct.where(last, 0, row)
            ct.scatter(chunks, (first + index, column), row, mask=index < count)
    if COLS:
        end = ct.astype(ct.gather(cu_seqlens, (SEQUENCES,)), ct.int32)
        stop = ct.minimum(C * block + C, cleared.shape[0])
        start = ct.maximum(C * block, end)
        if start < stop:
            rows = cleared.slice(axis=0, start=start, stop=stop)
            for tile in range(ct.cdiv(cleared.shape[1], COLS)):
                ct.store(rows, (0, tile), ct.zeros((C, COLS), cleared.dtype), allow_tma=False)


def _gates(g, beta, a_log, dt_bias, first, tokens, head, SAFE, LINEAR, SIGMOID, DOUBLE, A_LOG, DT_BIAS):
    """(cumulated log gates, beta), float32 (C,) each, of a chunk of one head."""
    row = ct.arange(C, dtype=ct.int32)
    inside = row < tokens
    gate = _wide(ct.gather(g, (first + row, head), mask=inside))
    if SAFE:
        if DT_BIAS:
            gate = gate + _wide(ct.gather(dt_bias, (head,)))
        # softplus; the absolute error of log(1 + x) for a small x is of no consequence in a gate
        gate = -(ct.maximum(gate, 0.0) + ct.log(1.0 + ct.exp(-ct.abs(gate))))
        if A_LOG:
            gate = gate * ct.exp(_wide(ct.gather(a_log, (head,))))
    if LINEAR:
        gate = ct.log(ct.maximum(gate, 1e-10))
    rate = _wide(ct.gather(beta, (first + row, head), mask=inside))
    if SIGMOID:
        rate = (2.0 if DOUBLE else 1.0) / (1.0 + ct.exp(-rate))
    gate = ct.where(inside, ct.maximum(gate, GATE_FLOOR), 0.0)
    return ct.cumsum(gate, axis=0), ct.where(inside, rate, 0.0)


def _load_rows(array, first, tokens, head, WIDTH):
    """(C, WIDTH) of a chunk of one head of an array (total, heads, width)."""
    rows = array.slice(axis=0, start=first, stop=first + tokens)
    tile = ct.load(rows, (0, head, 0), (C, 1, WIDTH), padding_mode=ct.PaddingMode.ZERO)
    return ct.reshape(tile, (C, WIDTH))


def _inverse_norms(rows):
    """(C,) of 1 / sqrt(sum x^2 + 1e-6)."""
    wide = _wide(rows)
    return ct.rsqrt(ct.sum(wide * wide, axis=1) + 1e-6)


def _narrow(tile):
    return ct.astype(tile, ct.float16)


def _product(x, y):
    return ct.mma(_narrow(x), _narrow(y), ct.zeros((C, C), ct.float32))


def _inverse(lower, row, column):
    """(I + lower)^-1 of a strictly lower triangular (C, C), float32.

    Diagonal blocks first, whose powers end with the 7th; what is left then has powers that end with the 7th as well.
    """
    unit = ct.where(row == column, 1.0, 0.0)
    near = row // BLOCK == column // BLOCK
    inner, outer = ct.where(near, lower, 0.0), ct.where(near, 0.0, lower)
    blocks = _from_powers(inner, unit)
    rest = _product(blocks, outer)
    return _product(_from_powers(rest, unit), blocks)


def _from_powers(x, unit):
    """(I + x)^-1 where x^8 is 0: (I - x)(I + x^2)(I + x^4)."""
    square = _product(x, x)
    made = unit - x
    made = made + _product(made, square)
    return made + _product(made, _product(square, square))


def gdn_prepare(
    q,
    k,
    g,
    beta,
    a_log,
    dt_bias,
    chunks,
    inverse,
    attention,
    gates,
    rates,
    q_norms,
    k_norms,
    K: Static[int],
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    SCALE: Static[float],
    ATTENTION: Static[bool],
    L2NORM: Static[bool],
    SIGMOID: Static[bool],
    DOUBLE: Static[bool],
    SAFE: Static[bool],
    A_LOG: Static[bool],
    DT_BIAS: Static[bool],
    LINEAR: Static[bool],
):
    """Block (head, slot) writes, for row i and column j of its chunk, with G the cumulated log gates:

    inverse (slots, HO, C, C), io dtype: (I + tril(beta_i e^(G_i - G_j) <k_i, k_j>, -1))^-1
    attention, the same shape, if ATTENTION: tril(SCALE e^(G_i - G_j) <q_i, k_j>)
    gates, rates (slots, HO, C) float32: G and beta
    q_norms (if ATTENTION), k_norms, the same shape, if L2NORM: what rows of q and k are multiplied by to be normalised

    K is the key dim rounded up to a power of two; Q_RATIO and K_RATIO heads share a head of q or k.
    """
    head, slot = ct.bid(0), ct.bid(1)
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    if tokens > 0:
        keys = _load_rows(k, first, tokens, head // K_RATIO, K)
        total, rate = _gates(
            g, beta, a_log, dt_bias, first, tokens, head, SAFE, LINEAR, SIGMOID, DOUBLE, A_LOG, DT_BIAS
        )
        ct.store(gates, (slot, head, 0), ct.reshape(total, (1, 1, C)), allow_tma=False)
        ct.store(rates, (slot, head, 0), ct.reshape(rate, (1, 1, C)), allow_tma=False)
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        column = ct.reshape(row, (1, C))
        total = total * LOG2_E
        decay = ct.exp2(ct.minimum(ct.reshape(total, (C, 1)) - ct.reshape(total, (1, C)), 0.0))
        if L2NORM:
            norms = _inverse_norms(keys)
            ct.store(k_norms, (slot, head, 0), ct.reshape(norms, (1, 1, C)), allow_tma=False)
            decay = decay * ct.reshape(norms, (1, C))
            rate = rate * norms
        turned = ct.transpose(keys)
        lower = ct.mma(keys, turned, ct.zeros((C, C), ct.float32)) * decay * ct.reshape(rate, (C, 1))
        made = _inverse(ct.where(row > column, lower, 0.0), row, column)
        ct.store(inverse, (slot, head, 0, 0), ct.reshape(ct.astype(made, inverse.dtype), (1, 1, C, C)))
        if ATTENTION:
            queries = _load_rows(q, first, tokens, head // Q_RATIO, K)
            scores = ct.mma(queries, turned, ct.zeros((C, C), ct.float32)) * (decay * SCALE)
            if L2NORM:
                norms = _inverse_norms(queries)
                ct.store(q_norms, (slot, head, 0), ct.reshape(norms, (1, 1, C)), allow_tma=False)
                scores = scores * ct.reshape(norms, (C, 1))
            scores = ct.astype(ct.where(row >= column, scores, 0.0), attention.dtype)
            ct.store(attention, (slot, head, 0, 0), ct.reshape(scores, (1, 1, C, C)))
