"""cuTile kernels that prepare each chunk of 64 tokens for the scans, where every key channel has a gate of its own.

The decay between two tokens differs by channel, so it cannot be a factor of a finished product: both operands are
scaled by powers relative to a token between the two. Chunks are those of `_gdn_chunks_cutile`.
"""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._gdn_chunks_cutile import (
    GATE_FLOOR,
    LOG2_E,
    inverse_of_unit,
    load_span,
    power,
    refined_inverse,
)
from cudnn_jax.engines.linear_attention._tiles_cutile import C, product, strength, wide

Static = ct.Constant

UP_TO, BEHIND, FROM_32, FROM_16, FROM_8, TO_48 = range(6)
"""Tables (C, C) that sum gates: those up to a token, those behind it, those between it and the middle of the 64, 32
or 16 tokens that it lies in, and those behind one of the first 32 up to the middle of the others."""
TABLES = 6
_MOST_EXPONENT = 116.0
"""Of 2, on either side of a middle: a float32 or bfloat16 times that is finite unless it is beyond 2000."""
LEAST_NEAR = -14.4
"""A log2 gate within 16 tokens, where some is so strong that 32 tokens do not fit: 2^-14.4 is nothing beside 1."""


def kda_tables(tables, prefixes, PREFIXES: Static[bool]):
    """Block t writes table t of `tables` (TABLES, C, C) float16: 0 and 1. `prefixes` (C, C) is UP_TO in bfloat16, if
    given."""
    which = ct.bid(0)
    row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
    column = ct.reshape(ct.arange(C, dtype=ct.int32), (1, C))
    half = ct.where(which == FROM_32, 32, ct.where(which == FROM_16, 16, 8))
    middle = row // (2 * half) * (2 * half) + half
    first = ct.where(row >= middle, middle, row + 1)
    last = ct.where(row >= middle, row, middle - 1)
    first = ct.where(which == UP_TO, 0, ct.where(which == BEHIND, row + 1, first))
    last = ct.where(which == UP_TO, row, ct.where(which == BEHIND, C, last))
    first = ct.where(which == TO_48, row + 1, first)
    last = ct.where(which == TO_48, 47, last)
    made = ct.where((column >= first) & (column <= last), 1.0, 0.0)
    if PREFIXES:
        if which == UP_TO:
            ct.store(prefixes, (0, 0), ct.astype(made, ct.bfloat16), allow_tma=False)
    ct.store(tables, (which, 0, 0), ct.reshape(ct.astype(made, ct.float16), (1, C, C)), allow_tma=False)


def table(tables, which):
    return ct.reshape(ct.load(tables, (which, 0, 0), (1, C, C)), (C, C))


def log_gates(tile, a_log, dt_bias, head, part, WIDTH, SAFE, A_LOG, DT_BIAS, LINEAR, LOWER):
    """Log gates of what g holds, of any rows of a head and WIDTH of its columns."""
    if SAFE:
        if DT_BIAS:
            bias = ct.load(dt_bias, (head, part), (1, WIDTH), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
            tile = tile + wide(bias)
        if A_LOG:
            tile = tile * ct.exp(wide(ct.gather(a_log, (head,))))
        tile = LOWER / (1.0 + ct.exp(-tile))
    if LINEAR:
        tile = ct.log(ct.maximum(tile, 1e-10))
    return tile


def load_gates(g, a_log, dt_bias, first, tokens, head, part, WIDTH, options):
    """log2 of the decay of each token and channel, float16, 0 behind the chunk's end."""
    SAFE, A_LOG, DT_BIAS, LINEAR, LOWER = options
    tile = wide(load_span(g, first, head, part, WIDTH))
    tile = log_gates(tile, a_log, dt_bias, head, part, WIDTH, SAFE, A_LOG, DT_BIAS, LINEAR, LOWER)
    row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
    return ct.astype(ct.where(row < tokens, ct.maximum(tile, GATE_FLOOR) * LOG2_E, 0.0), ct.float16)


def rates(beta, first, tokens, head, index, SIGMOID, DOUBLE):
    """beta (total, HO) of a chunk's tokens, in the shape of `index`; 0 behind the chunk's end."""
    inside = index < tokens
    rate = wide(ct.gather(beta, (first + index, head), mask=inside))
    if SIGMOID:
        rate = ct.where(inside, strength(rate, DOUBLE), 0.0)
    return rate


def erase_rates(beta, first, head, part, PART, SIGMOID, DOUBLE):
    """beta (total, HO, K) of a chunk's tokens, behind the chunk's end whatever is there."""
    rate = wide(load_span(beta, first, head, part, PART))
    if SIGMOID:
        rate = strength(rate, DOUBLE)
    return rate


def wide_range(dtype):
    """The type of what is scaled both ways: the range of bfloat16, and no fewer bits than the io type."""
    return ct.tfloat32 if dtype == ct.float16 else ct.bfloat16


def scaled(rows, factor, dtype):
    return ct.astype(wide(rows) * factor, dtype)


def _operands(q, k, beta, first, head, part, Q_RATIO, K_RATIO, PART, ERASE, SIGMOID, DOUBLE):
    """What erases, what reads and the key. Loaded wherever they are used: kept, they would spill."""
    key, query = load_span(k, first, head // K_RATIO, part, PART), load_span(q, first, head // Q_RATIO, part, PART)
    if ERASE:
        return wide(key) * erase_rates(beta, first, head, part, PART, SIGMOID, DOUBLE), query, key
    return key, query, key


def _mild_pairs(operands, between, gates, tables, row, by_keep, sums):
    """<erase_i, key_j> and <query_i, key_j>, each channel times its decay between the two, added to sums. Powers are
    relative to the middle of the 32 rows that the later of the two lies in: other keys for rows of either half."""
    ranged = wide_range(operands[1].dtype)
    behind = row >= 32
    forth, back = signed_powers(between, row, 16)
    far = power(product(table(tables, TO_48), gates))
    erase, query, key = _operands(*operands)
    key = wide(key) * by_keep
    first = ct.transpose(ct.astype(ct.where(behind, 0.0, key * back), ranged))
    second = ct.transpose(ct.astype(key * ct.where(behind, back, far), ranged))
    erase, query = scaled(erase, forth, ranged), scaled(query, forth, ranged)
    nothing = ct.zeros(erase.shape, ranged)
    made = ct.mma(ct.where(behind, nothing, erase), first, sums[0])
    made = ct.mma(ct.where(behind, erase, nothing), second, made)
    scores = ct.mma(ct.where(behind, nothing, query), first, sums[1])
    return made, ct.mma(ct.where(behind, query, nothing), second, scores)


def _squares(array, first, head, PART, PARTS):
    """All products of a chunk's rows: fewer instructions than the squares of each."""
    made = ct.zeros((C, C), ct.float32)
    for part in ct.static_iter(range(PARTS)):
        rows = load_span(array, first, head, part, PART)
        made = ct.mma(rows, ct.transpose(rows), made)
    return made


def signed_powers(tile, row, half):
    """Both ways from the middle: what lies in front of it decays towards it, so that the power is a growth."""
    signed = ct.where(row % (2 * half) >= half, tile, -tile)
    return power(signed), power(-signed)


def mild_powers(gates, tables, row):
    """How pairs are scaled, relative to the middle of the 32 rows that the later of the two lies in: the later one; the
    earlier one of a pair in the first 32 rows, and of one whose later row is behind them."""
    behind = row >= 32
    forth, back = signed_powers(product(table(tables, FROM_16), gates), row, 16)
    far = power(product(table(tables, TO_48), gates))
    return forth, ct.where(behind, 0.0, back), ct.where(behind, back, far)


def low(tile, factor):
    """What is scaled both ways has the range of bfloat16 whatever the io type."""
    return ct.astype(tile * factor, ct.bfloat16)


def write_part(array, slot, head, part, tile):
    """(rows, columns) into an array (slots, heads, rows, columns)."""
    tile = ct.reshape(ct.astype(tile, array.dtype), (1, 1, tile.shape[0], tile.shape[1]))
    ct.store(array, (slot, head, 0, part), tile)


def write_inverse(array, slot, head, full, row, column):
    """(I + full)^-1, of what is 0 but below the diagonal, into an array (slots, heads, C, C)."""
    if array.dtype == ct.float16:
        solve = refined_inverse(full, row, column)
    else:
        solve = inverse_of_unit(ct.astype(full, ct.float16), row, column)
    write_part(array, slot, head, 0, solve)


def _inverse_root(squares):
    return ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) + 1e-6, flush_to_zero=True)


def _write_norms(array, slot, head, column):
    ct.store(array, (slot, head, 0), ct.reshape(column, (1, 1, C)), check_bounds=False, allow_tma=False)


def kda_prepare(
    q,
    k,
    g,
    beta,
    a_log,
    dt_bias,
    chunks,
    tables,
    inverse,
    attention,
    erase,
    read,
    keep,
    decay,
    q_norms,
    k_norms,
    strong,
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
    """Block slot * HEADS + head writes, for row i and column j of its chunk and D_ij = diag(e^(G_i - G_j)), G the log
    gates summed up to a token of the chunk:

    inverse (slots, HO, C, C), io dtype: (I + tril(<e_i, D_ij w_j>, -1))^-1
    attention, the same: tril(SCALE <q_i, D_ij w_j>)
    erase, read, keep (slots, HO, C, K), io dtype: e^G e, SCALE e^G q, e^(G_last - G) w
    decay (slots, HO, 1, K), float32: e^G_last
    q_norms, k_norms (slots, HO, C), float32, if L2NORM: what normalises rows of q and k
    strong (slots, HO), int32: 1 where gates are too strong for the two squares, which are of no use then

    where e = k and w = beta k; with ERASE, beta has a value for each channel, and e = beta k, w = k.
    """
    slot, head = ct.bid(0) // HEADS, ct.bid(0) % HEADS
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    if tokens > 0:
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        column = ct.reshape(ct.arange(C, dtype=ct.int32), (1, C))
        inside = row < tokens
        by_query = by_key = by_keep = 1.0
        if L2NORM:
            diagonal = row == column
            squares = ct.where(diagonal, _squares(k, first, head // K_RATIO, PART, PARTS), 0.0)
            by_key = by_keep = _inverse_root(squares)
            squares = ct.where(diagonal, _squares(q, first, head // Q_RATIO, PART, PARTS), 0.0)
            by_query = _inverse_root(squares)
        if not ERASE:
            by_keep = by_keep * rates(beta, first, tokens, head, row, SIGMOID, DOUBLE)
        near = (ct.zeros((C, C), ct.float32), ct.zeros((C, C), ct.float32))
        least = 0.0
        for part in ct.static_iter(range(PARTS)):
            operands = (q, k, beta, first, head, part, Q_RATIO, K_RATIO, PART, ERASE, SIGMOID, DOUBLE)
            options = (SAFE, A_LOG, DT_BIAS, LINEAR, LOWER)
            gates = load_gates(g, a_log, dt_bias, first, tokens, head, part, PART, options)
            before = power(product(table(tables, UP_TO), gates))
            channel = ct.reshape(ct.arange(PART, dtype=ct.int32), (1, PART)) + (part * PART + 0 * row)
            ct.scatter(decay, (slot, head, 0, channel), before, mask=row == C - 1)
            erased, query, _ = _operands(*operands)
            write_part(erase, slot, head, part, ct.where(inside, wide(erased) * (before * by_key), 0.0))
            write_part(read, slot, head, part, ct.where(inside, wide(query) * (before * by_query * SCALE), 0.0))
            after = power(product(table(tables, BEHIND), gates))
            key = load_span(k, first, head // K_RATIO, part, PART)
            write_part(keep, slot, head, part, ct.where(inside, wide(key) * (after * by_keep), 0.0))
            between = product(table(tables, FROM_16), gates)
            least = ct.minimum(least, ct.min(between))
            near = _mild_pairs(operands, between, gates, tables, row, by_keep, near)
        if L2NORM:
            _write_norms(q_norms, slot, head, ct.where(inside, by_query, 0.0))
            _write_norms(k_norms, slot, head, ct.where(inside, by_key, 0.0))
        ct.scatter(strong, (slot, head), ct.astype(least < -_MOST_EXPONENT, ct.int32))
        scores = near[1] * (by_query * SCALE)
        write_part(attention, slot, head, 0, ct.where(inside & (row >= column), scores, 0.0))
        full = near[0] * by_key
        write_inverse(inverse, slot, head, ct.where(inside & (row > column), full, 0.0), row, column)
