"""cuTile kernels that cut packed sequences into chunks of 64 tokens and prepare each chunk for the scans.

A slot is a place for a chunk. Chunks never straddle sequences; those of a sequence have consecutive slots, in order,
and the slots that are left over come last. Rows of a chunk past its tokens behave as if all that is read were 0.
"""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._tiles_cutile import C, product, rows_of, strength, wide

Static = ct.Constant

GATE_FLOOR = -40.0
"""Of a token's log gate: e^-40 is nothing beside 1, and sums over a chunk stay small enough to be subtracted."""
BLOCK = 8
"""The diagonal blocks that are inverted first. Powers of what is outside of them stay in the range of float16."""
LOG2_E = 1.4426950408889634

_TABLE_TILE = 256


def _slots(start, stop):
    return (ct.astype(stop - start, ct.int32) + (C - 1)) // C


def gdn_chunk_table(
    cu_seqlens,
    chunks,
    first_slot,
    order,
    cleared,
    SEQUENCES: Static[int],
    SLOTS: Static[int],
    COLS: Static[int],
    ORDER: Static[bool],
):
    """Writes chunks (SLOTS, 4): first token, tokens (0 in a slot that is left over), sequence, index in it; and
    first_slot (SEQUENCES + 1). With ORDER also order (SEQUENCES), the sequences with the most chunks first. Clears the
    rows of `cleared` (total, columns) that belong to no sequence, if given.

    Block b writes sequence b's rows, or the slots that are left over, and clears what it must of 64 rows.
    """
    block = ct.bid(0)
    if block <= SEQUENCES:
        places = ct.arange(_TABLE_TILE, dtype=ct.int32)
        last = block == SEQUENCES
        start = ct.astype(ct.gather(cu_seqlens, (block,)), ct.int32)
        stop = ct.astype(ct.gather(cu_seqlens, (ct.minimum(block + 1, SEQUENCES),)), ct.int32)
        own = _slots(start, stop)
        before, longer = ct.zeros((_TABLE_TILE,), ct.int32), ct.zeros((_TABLE_TILE,), ct.int32)
        for tile in range(ct.cdiv(SEQUENCES if ORDER else block, _TABLE_TILE)):
            at = tile * _TABLE_TILE + places
            there, earlier = at < SEQUENCES, at < block
            slots = _slots(ct.gather(cu_seqlens, (at,), mask=there), ct.gather(cu_seqlens, (at + 1,), mask=there))
            before = before + ct.where(earlier, slots, 0)
            longer = longer + ct.where(there & ((slots > own) | ((slots == own) & earlier)), 1, 0)
        first = ct.sum(before, axis=0)
        ct.scatter(first_slot, (block,), first)
        if ORDER:
            ct.scatter(order, (ct.sum(longer, axis=0),), block, mask=block < SEQUENCES)
        count = ct.where(last, SLOTS - first, own)
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
            rows = rows_of(cleared, start, stop)
            for tile in range(ct.cdiv(cleared.shape[1], COLS)):
                ct.store(rows, (0, tile), ct.zeros((C, COLS), cleared.dtype), allow_tma=False)


def gdn_gates(
    g,
    beta,
    a_log,
    dt_bias,
    chunks,
    gates,
    rates,
    HEADS: Static[int],
    SIGMOID: Static[bool],
    DOUBLE: Static[bool],
    SAFE: Static[bool],
    A_LOG: Static[bool],
    DT_BIAS: Static[bool],
    LINEAR: Static[bool],
):
    """Block (slot, tile of HEADS heads) writes gates and rates (slots, HO, C), float32: the log gates summed up to each
    token of the chunk, and beta, after what the options make of g and beta (total, HO)."""
    slot, part = ct.bid(0), ct.bid(1)
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    if tokens > 0:
        gate = _load_heads(g, first, tokens, part, HEADS)
        rate = _load_heads(beta, first, tokens, part, HEADS)
        if SAFE:
            if DT_BIAS:
                gate = gate + _load_head_row(dt_bias, part, HEADS)
            # softplus; the absolute error of log(1 + x) for a small x is of no consequence in a gate
            gate = -(ct.maximum(gate, 0.0) + ct.log(1.0 + ct.exp(-ct.abs(gate))))
            if A_LOG:
                gate = gate * ct.exp(_load_head_row(a_log, part, HEADS))
        if LINEAR:
            gate = ct.log(ct.maximum(gate, 1e-10))
        if SIGMOID:
            rate = strength(rate, DOUBLE)
        inside = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1)) < tokens
        total = ct.cumsum(ct.where(inside, ct.maximum(gate, GATE_FLOOR), 0.0), axis=0)
        _store_heads(gates, slot, part, total, HEADS)
        _store_heads(rates, slot, part, ct.where(inside, rate, 0.0), HEADS)


def _load_heads(array, first, tokens, part, HEADS):
    rows = rows_of(array, first, first + tokens)
    return wide(ct.load(rows, (0, part), (C, HEADS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False))


def _load_head_row(array, part, HEADS):
    row = ct.load(array, (part,), (HEADS,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return wide(ct.reshape(row, (1, HEADS)))


def _store_heads(array, slot, part, tile, HEADS):
    ct.store(array, (slot, part, 0), ct.reshape(ct.transpose(tile), (1, HEADS, C)), allow_tma=False)


def load_span(array, first, head, column, WIDTH):
    """(C, WIDTH) of one head of an array (total, heads, dim) from a token on, behind a chunk's end whatever is there;
    columns from column * WIDTH on.

    A part of an array would need a TMA descriptor of its own, which takes a block longer to make than the load.
    """
    view = array.tiled_view((C, 1, WIDTH), traversal_steps=(1, 1, WIDTH), padding_mode=ct.PaddingMode.ZERO)
    return ct.reshape(view.load((first, head, column)), (C, WIDTH))


def _half(tile):
    return ct.astype(tile, ct.float16)


def _inverse_norms(squares, diagonal, tokens):
    """(C,) of 1 / sqrt(sum x^2 + 1e-6) of a product of rows with themselves, 0 behind the chunk's end."""
    norms = ct.rsqrt(ct.sum(ct.where(diagonal, squares, 0.0), axis=1) + 1e-6, flush_to_zero=True)
    return ct.where(ct.arange(C, dtype=ct.int32) < tokens, norms, 0.0)


def inverse_of_unit(full, row, column):
    """(I + what is below the diagonal of a (C, C) float16 that is 0 above it)^-1, in float32.

    Diagonal blocks first, whose powers end with the 7th; what is left then has powers that end with the 7th as well.
    """
    near, zero = row // BLOCK == column // BLOCK, _half(ct.zeros((C, C), ct.float32))
    diagonal = row == column
    blocks = _from_powers(ct.where(near & (row > column), full, zero), diagonal)
    rest = _half(product(blocks, ct.where(near, zero, full)))
    return product(_from_powers(rest, diagonal), blocks)


def refined_inverse(full, row, column):
    """`inverse_of_unit` of a float32, and from there a step of Newton's method, whose residual knows what float16 left
    out."""
    near = _half(full)
    rest = _half(ct.where(row > column, full - wide(near), 0.0))
    below = ct.where(row > column, near, _half(ct.zeros((C, C), ct.float32)))
    solve = _half(inverse_of_unit(near, row, column))
    residual = ct.where(row == column, 1.0, 0.0) - wide(solve) - product(below, solve) - product(rest, solve)
    return wide(solve) + product(solve, _half(residual))


def _from_powers(x, diagonal):
    """(I + x)^-1 of a strictly lower triangular x whose 8th power is 0: (I - x)(I + x^2)(I + x^4), in float16."""
    square = _half(product(x, x))
    made = ct.where(diagonal, 1.0, wide(-x))
    made = made + product(_half(made), square)
    return _half(made + product(_half(made), _half(product(square, square))))


def power(tile):
    """2 to the tile, where that is a normal number."""
    return ct.exp2(tile, flush_to_zero=True)


def load_row(array, slot, head):
    """(1, C) of an array (slots, heads, C)."""
    return ct.reshape(ct.load(array, (slot, head, 0), (1, 1, C), check_bounds=False, allow_tma=False), (1, C))


def load_column(array, slot, head):
    """(C, 1) of an array (slots, heads, C). Not a reshaped row, which is loaded once and moved between threads."""
    tile = ct.load(array, (0, head, slot), (C, 1, 1), order=(2, 1, 0), check_bounds=False, allow_tma=False)
    return ct.reshape(tile, (C, 1))


def load_last(array, slot, head):
    """(1, 1), the last of a chunk's in an array (slots, heads, C)."""
    tile = ct.load(array, (slot, head, C - 1), (1, 1, 1), check_bounds=False, allow_tma=False)
    return ct.reshape(tile, (1, 1))


def _write(array, slot, head, tile):
    """(C,) into an array (slots, heads, C)."""
    ct.store(array, (slot, head, 0), ct.reshape(tile, (1, 1, C)), check_bounds=False, allow_tma=False)


def _write_square(array, slot, head, tile):
    """(C, C) into an array (slots, heads, C, C)."""
    ct.store(array, (slot, head, 0, 0), ct.reshape(ct.astype(tile, array.dtype), (1, 1, C, C)), check_bounds=False)


def _products(q, k, first, q_head, k_head, WIDTH, PARTS, L2NORM):
    """A chunk's q q^T, 0 unless L2NORM, k k^T and q k^T, summed over PARTS parts of WIDTH columns."""
    squares = full = scores = ct.zeros((C, C), ct.float32)
    # From 0: the compiler unrolls a loop whose length it knows.
    for at in range(first >> 31, PARTS):
        keys, queries = load_span(k, first, k_head, at, WIDTH), load_span(q, first, q_head, at, WIDTH)
        turned = ct.transpose(keys)
        if L2NORM:
            squares = ct.mma(queries, ct.transpose(queries), squares)
        full, scores = ct.mma(keys, turned, full), ct.mma(queries, turned, scores)
    return squares, full, scores


def gdn_prepare(
    q,
    k,
    chunks,
    gates,
    rates,
    inverse,
    attention,
    q_norms,
    k_norms,
    K: Static[int],
    PARTS: Static[int],
    HEADS: Static[int],
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    SCALE: Static[float],
    L2NORM: Static[bool],
    REFINED: Static[bool],
):
    """Block slot * HEADS + head writes, for row i and column j of its chunk, with G the gates:

    inverse (slots, HO, C, C), io dtype: (I + tril(beta_j e^(G_i - G_j) <k_i, k_j>, -1))^-1
    attention, the same shape and dtype: tril(SCALE beta_j e^(G_i - G_j) <q_i, k_j>)
    q_norms, k_norms (slots, HO, C) float32, if L2NORM: what normalises rows of q and k

    so that what is written is beta times the inverse of what is wanted, and beta = 0 divides nothing.

    K key columns, a power of two, are loaded at a time, PARTS times; Q_RATIO and K_RATIO heads share a head of q or k.
    If REFINED the inverse is right to the rounding of float16: keys that are nearly parallel amplify that of what is
    inverted.
    """
    slot, head = ct.bid(0) // HEADS, ct.bid(0) % HEADS
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    if tokens > 0:
        if PARTS == 1:
            keys = load_span(k, first, head // K_RATIO, 0, K)
            queries = load_span(q, first, head // Q_RATIO, 0, K)
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        column = ct.reshape(ct.arange(C, dtype=ct.int32), (1, C))
        # Not by a product with 0: what is behind the chunk's end, or above the diagonal, may be anything.
        inside = (row < tokens) & (row >= column)
        if PARTS > 1:
            squares, full, scores = _products(q, k, first, head // Q_RATIO, head // K_RATIO, K, PARTS, L2NORM)
        elif L2NORM:
            squares = product(queries, ct.transpose(queries))
        if L2NORM:
            q_norm = _inverse_norms(squares, row == column, tokens)
            _write(q_norms, slot, head, q_norm)
        if PARTS == 1:
            turned = ct.transpose(keys)
            full = product(keys, turned)
        between = load_column(gates, slot, head) * LOG2_E - load_row(gates, slot, head) * LOG2_E
        columns = load_row(rates, slot, head)
        if L2NORM:
            k_norm = _inverse_norms(full, row == column, tokens)
            _write(k_norms, slot, head, k_norm)
            columns = columns * ct.reshape(k_norm, (1, C))
        decay = power(ct.minimum(between, 0.0)) * columns
        full = full * decay
        if L2NORM:
            full = full * ct.reshape(k_norm, (C, 1))
        full = ct.where(inside, full, 0.0)
        if REFINED:
            solve = refined_inverse(full, row, column)
        else:
            # At once in the type that the inverse takes: with three blocks on an SM every register counts.
            full = _half(full)
        if PARTS == 1:
            scores = product(queries, turned)
        scores = scores * decay
        if L2NORM:
            scores = scores * ct.reshape(q_norm * SCALE, (C, 1))
        else:
            scores = scores * SCALE
        _write_square(attention, slot, head, ct.where(inside, scores, 0.0))
        if REFINED:
            _write_square(inverse, slot, head, solve)
        else:
            _write_square(inverse, slot, head, inverse_of_unit(full, row, column))
