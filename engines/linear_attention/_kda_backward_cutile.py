"""cuTile kernels of Kimi Delta Attention's backward. The formulas are in the notes beside.

Arithmetic is float32, operands of products have the io dtype. Optional arrays that are absent come as the constant
False. K and V are the key and value dim rounded up to powers of two; what lies past an array's end is read as zero.
"""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._gdn_chunks_cutile import load_span, power
from cudnn_jax.engines.linear_attention._kda_chunks_cutile import (
    BEHIND,
    FROM_8,
    FROM_16,
    FROM_32,
    LEAST_NEAR,
    UP_TO,
    erase_rates,
    load_gates,
    rates,
    signed_powers,
    table,
)
from cudnn_jax.engines.linear_attention._tiles_cutile import (
    C,
    load_numbers,
    load_part,
    load_rows,
    product,
    rows_of,
    store_numbers,
    store_part,
    store_rows,
    through_strength,
    token,
    wide,
)

Static = ct.Constant

_LATENCY = 3
"""Of the scans' loads."""


def _chunk(array, place, column, WIDTH):
    """(C, WIDTH) of an array (places, C, dim)."""
    tile = ct.load(array, (place, 0, column), (1, C, WIDTH), padding_mode=ct.PaddingMode.ZERO, latency=3)
    return ct.reshape(tile, (C, WIDTH))


def _decay(array, place, column, WIDTH):
    """(1, WIDTH) of an array (places, dim)."""
    return ct.load(array, (place, column), (1, WIDTH), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)


def _forward(
    v, w, inverse, erase, keep, decay, initial, states, writes, first, count, origin, head, part, RATIO, K, PART, flags
):
    WRITE, INITIAL, _ = flags
    heads = ct.num_blocks(1)
    state = ct.zeros((PART, K), ct.float32)
    if INITIAL:
        state = wide(load_part(initial, origin, part, 0, PART, K))
    for at in range(count):
        place = (first + at) * heads + head
        erasing, keeping = _chunk(erase, place, 0, K), _chunk(keep, place, 0, K)
        values = wide(ct.transpose(load_rows(v, at, head // RATIO, part, PART, _LATENCY)))
        if WRITE:
            values = values * wide(ct.transpose(load_rows(w, at, head, part, PART, _LATENCY)))
        held = ct.astype(state, erase.dtype)
        store_part(states, place, part, 0, held)
        missed = ct.astype(values - product(held, ct.transpose(erasing)), erase.dtype)
        made = ct.astype(product(missed, ct.transpose(_chunk(inverse, place, 0, C))), erase.dtype)
        store_part(writes, place, 0, part, ct.transpose(made))
        state = ct.mma(made, keeping, state * _decay(decay, place, 0, K))


def _reverse(
    d_out,
    inverse,
    attention,
    erase,
    read,
    keep,
    decay,
    d_final,
    d_states,
    d_values,
    d_initial,
    first,
    count,
    origin,
    head,
    part,
    K,
    PART,
    flags,
):
    _, INITIAL, FINAL = flags
    heads = ct.num_blocks(1)
    state = ct.zeros((PART, K), ct.float32)
    if FINAL:
        state = wide(load_part(d_final, origin, part, 0, PART, K))
    for step in range(count):
        at = count - 1 - step
        place = (first + at) * heads + head
        grads = ct.transpose(load_rows(d_out, at, head, part, PART, _LATENCY))
        erasing, reading, keeping = _chunk(erase, place, 0, K), _chunk(read, place, 0, K), _chunk(keep, place, 0, K)
        held = ct.astype(state, erase.dtype)
        store_part(d_states, place, part, 0, held)
        d_writes = product(grads, _chunk(attention, place, 0, C)) + product(held, ct.transpose(keeping))
        made = product(ct.astype(d_writes, erase.dtype), _chunk(inverse, place, 0, C))
        store_rows(d_values, at, head, part, ct.transpose(ct.astype(made, erase.dtype)))
        state = ct.mma(grads, reading, state * _decay(decay, place, 0, K))
        state = ct.mma(ct.astype(-made, erase.dtype), erasing, state)
    if INITIAL:
        store_part(d_initial, origin, part, 0, ct.astype(state, d_initial.dtype))


def kda_backward_scans(
    v,
    w,
    d_out,
    inverse,
    attention,
    erase,
    read,
    keep,
    decay,
    cu_seqlens,
    first_slot,
    initial,
    d_final,
    states,
    writes,
    d_states,
    d_values,
    d_initial,
    V_RATIO: Static[int],
    K: Static[int],
    PART: Static[int],
    PARTS: Static[int],
    WRITE: Static[bool],
    INITIAL: Static[bool],
    FINAL: Static[bool],
):
    """Block (sequence, head, part) walks over a sequence's chunks, with PART value columns of the state.

    The first PARTS parts go forward and write, for each chunk, the state before it and U; the others go backward and
    write the gradient of the state after it, and that of the values that are written. States are turned, (PART, K), so
    that they are the first operand of a product, which may lie in registers.
    """
    sequence, head, part = ct.bid(0), ct.bid(1), ct.bid(2)
    start, stop = token(cu_seqlens, sequence), token(cu_seqlens, sequence + 1)
    first, count = ct.gather(first_slot, (sequence,)), ct.cdiv(stop - start, C)
    origin, flags = sequence * ct.num_blocks(1) + head, (WRITE, INITIAL, FINAL)
    # An empty sequence may start where the arrays end, which a slice may not.
    start = ct.minimum(start, d_out.shape[0] - 1)
    stop = ct.maximum(start, stop)
    walk = (first, count, origin, head)
    if part < PARTS:
        values = rows_of(v, start, stop)
        scale = rows_of(w, start, stop) if WRITE else w
        made = (states, writes)
        _forward(values, scale, inverse, erase, keep, decay, initial, *made, *walk, part, V_RATIO, K, PART, flags)
    else:
        grads, d_made = rows_of(d_out, start, stop), rows_of(d_values, start, stop)
        chunks, ends = (inverse, attention, erase, read, keep, decay), (d_final, d_states, d_made, d_initial)
        _reverse(grads, *chunks, *ends, *walk, part - PARTS, K, PART, flags)


def _store_tokens(array, first, tokens, head, column, tile):
    """The rows of a chunk of one head into an array (total, heads, dim)."""
    tile = ct.reshape(ct.astype(tile, array.dtype), (C, 1, tile.shape[1]))
    ct.store(rows_of(array, first, first + tokens), (0, head, column), tile, allow_tma=False)


def _pairs(read, erased, operands, forth, back, mask, dtype):
    """What the pairs of rows in `mask` give to the gradients of what reads, erases and is written."""
    read, erased = ct.astype(ct.where(mask, read, 0.0), dtype), ct.astype(ct.where(mask, erased, 0.0), dtype)
    query, erase, write = operands
    query, erase = ct.astype(query * forth, dtype), ct.astype(erase * forth, dtype)
    write = ct.astype(write * back, dtype)
    d_query, d_erase = product(read, write), product(erased, write)
    d_write = ct.mma(ct.transpose(erased), erase, product(ct.transpose(read), query))
    d_gate = wide(query) * d_query + wide(erase) * d_erase - wide(write) * d_write
    return forth * d_query, forth * d_erase, back * d_write, d_gate


def _added(x, y):
    return x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]


def kda_backward_gradients(
    q,
    k,
    v,
    g,
    beta,
    w,
    a_log,
    dt_bias,
    d_out,
    tables,
    q_norms,
    k_norms,
    strong,
    decay,
    states,
    writes,
    d_states,
    d_writes,
    chunks,
    dq,
    dk,
    d_gates,
    totals,
    sums,
    d_beta,
    SCALE: Static[float],
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    V_RATIO: Static[int],
    HEADS: Static[int],
    V: Static[int],
    PART: Static[int],
    PARTS: Static[int],
    L2NORM: Static[bool],
    ERASE: Static[bool],
    SIGMOID: Static[bool],
    DOUBLE: Static[bool],
    SAFE: Static[bool],
    A_LOG: Static[bool],
    DT_BIAS: Static[bool],
    LINEAR: Static[bool],
    LOWER: Static[float],
    STRONG: Static[bool],
):
    """Block (slot, head, part) works on PART key columns of a chunk, those that `strong` names with STRONG alone. It
    writes dk, and with ERASE d_beta, and for `kda_backward_finish`

    dq (total, HO, K), io dtype: that of q, if L2NORM without what its norm depends on it
    d_gates (slots * HO, C, K), float32: the parts of the gradient of g that are summed up behind a token
    totals (slots * HO, K), float32: what is added to each of these sums
    sums (PARTS * slots * HO, 2, C), float32: rows' sums of q dq, and of k and what is written's gradient
    """
    block = ct.bid(0)
    part, place = block % PARTS, block // PARTS
    slot, head = place // HEADS, place % HEADS
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    if tokens > 0 and (ct.gather(strong, (slot, head)) != 0) == STRONG:
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        column = ct.reshape(ct.arange(C, dtype=ct.int32), (1, C))
        inside = row < tokens
        q_norm, k_norm = ct.full((C, 1), SCALE, ct.float32), ct.full((C, 1), 1.0, ct.float32)
        column_norm = 1.0
        if L2NORM:
            q_norm, k_norm = load_numbers(q_norms, place) * SCALE, load_numbers(k_norms, place)
            column_norm = ct.load(k_norms, (place, 0), (1, C), check_bounds=False, allow_tma=False)
        written = _chunk(writes, place, 0, V)
        d_written = load_span(d_writes, first, head, 0, V)
        turned = ct.transpose(written)
        grads = load_span(d_out, first, head, 0, V)
        # A token with itself, where nothing decays: apart, so that its rounding is none of the gates' gradients'.
        own = ct.where(inside, ct.sum(wide(grads) * wide(written), 1, keepdims=True) * (q_norm * k_norm), 0.0)
        read = product(grads, turned) * (q_norm * column_norm)
        read = ct.where(inside & (row > column), read, 0.0)
        erased = product(d_written, turned) * (-k_norm * column_norm)
        erased = ct.where(inside & (row > column), erased, 0.0)
        if L2NORM:
            value = wide(load_span(v, first, head // V_RATIO, 0, V))
            if ERASE:
                value = value * wide(load_span(w, first, head, 0, V))
            # <k, dk>, as what is written depends on k.
            by_key = ct.sum(wide(d_written) * (2.0 * wide(written) - value), 1, keepdims=True) * k_norm * k_norm
        query = ct.where(inside, wide(load_span(q, first, head // Q_RATIO, part, PART)), 0.0)
        key = ct.where(inside, wide(load_span(k, first, head // K_RATIO, part, PART)), 0.0)
        erase, write, rate = key, key, 1.0
        if ERASE:
            by_channel = erase_rates(beta, first, head, part, PART, SIGMOID, DOUBLE)
            erase = key * by_channel
        else:
            rate = rates(beta, first, tokens, head, row, SIGMOID, DOUBLE)
            write = key * rate
        options = (SAFE, A_LOG, DT_BIAS, LINEAR, LOWER)
        gates = load_gates(g, a_log, dt_bias, first, tokens, head, part, PART, options)
        across = power(product(table(tables, FROM_32), gates))
        operands, apart = (query, erase, write), row // 32 != column // 32
        made = _pairs(read, erased, operands, across, across, apart, q.dtype)
        between = product(table(tables, FROM_16), gates)
        if STRONG:
            across = power(between)
            apart = (row // 32 == column // 32) & (row // 16 != column // 16)
            made = _added(made, _pairs(read, erased, operands, across, across, apart, q.dtype))
            near = ct.maximum(gates, ct.full((C, PART), LEAST_NEAR, ct.float16))
            forth, back = signed_powers(product(table(tables, FROM_8), near), row, 8)
            same = row // 16 == column // 16
        else:
            forth, back = signed_powers(between, row, 16)
            same = row // 32 == column // 32
        made = _added(made, _pairs(read, erased, operands, forth, back, same, ct.bfloat16))
        d_query, d_erase, d_write, d_gate = made
        before = power(product(table(tables, UP_TO), gates))
        state = load_part(states, place, 0, part, V, PART)
        reading = before * q_norm * product(load_span(d_out, first, head, 0, V), state)
        erasing = before * -k_norm * product(load_span(d_writes, first, head, 0, V), state)
        d_state = load_part(d_states, place, 0, part, V, PART)
        pairs = ct.sum(wide(state) * wide(d_state), 0, keepdims=True) * _decay(decay, place, part, PART)
        later = power(product(table(tables, BEHIND), gates)) * k_norm * product(_chunk(writes, place, 0, V), d_state)
        ct.store(totals, (place, part), pairs + ct.sum(write * later, 0, keepdims=True), allow_tma=False)
        d_gate = d_gate + query * reading + erase * erasing - write * later
        store_part(d_gates, place, 0, part, ct.where(inside, d_gate, 0.0))
        d_query, d_erase, d_write = d_query + reading, d_erase + erasing, d_write + later
        d_query, d_write = d_query + own * write, d_write + own * query
        if ERASE:
            d_key = d_erase * by_channel + d_write
            d_rate = key * d_erase
            if SIGMOID:
                d_rate = through_strength(d_rate, by_channel, DOUBLE)
            _store_tokens(d_beta, first, tokens, head, part, d_rate)
        else:
            d_key = d_erase + rate * d_write
            _store_sum(sums, block, 1, ct.sum(key * d_write, 1, keepdims=True))
        if L2NORM:
            d_key = d_key - key * by_key
            _store_sum(sums, block, 0, ct.sum(query * d_query, 1, keepdims=True))
        _store_tokens(dk, first, tokens, head, part, d_key)
        _store_tokens(dq, first, tokens, head, part, d_query)


def _store_sum(sums, block, which, column):
    ct.store(sums, (block, which, 0), ct.reshape(column, (1, 1, C)), allow_tma=False)


def _load_sum(sums, place, which, PARTS):
    """(C, 1): a row's sum over all parts."""
    total = ct.zeros((C, 1), ct.float32)
    for part in ct.static_iter(range(PARTS)):
        tile = ct.load(sums, (0, which, place * PARTS + part), (C, 1, 1), order=(2, 1, 0), allow_tma=False)
        total = total + ct.reshape(tile, (C, 1))
    return total


def kda_backward_finish(
    q,
    v,
    g,
    beta,
    w,
    a_log,
    dt_bias,
    q_norms,
    d_writes,
    d_query,
    d_gates,
    totals,
    sums,
    chunks,
    cu_seqlens,
    dq,
    dk,
    dv,
    dg,
    d_beta,
    dw,
    d_a_log,
    d_bias,
    Q_RATIO: Static[int],
    V_RATIO: Static[int],
    HEADS: Static[int],
    SEQUENCES: Static[int],
    K: Static[int],
    V: Static[int],
    PARTS: Static[int],
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
    """Block (slot, head) writes what needs all key columns or all rows of a chunk: dg; with L2NORM dq; dv and dw with
    ERASE, d_beta without; and the chunk's parts of the gradients of a_log and dt_bias.

    It also clears 64 of the rows, if there are so many, that belong to no sequence.
    """
    place = ct.bid(0)
    slot, head = place // HEADS, place % HEADS
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    if tokens > 0:
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        d_gate = ct.cumsum(_tile(d_gates, place, C, K), 0, reverse=True) + _decay(totals, place, 0, K)
        d_gate = ct.where(row < tokens, d_gate, 0.0)
        if LINEAR:
            factor = wide(_tokens(g, first, tokens, head, K))
            d_gate = ct.where(factor > 1e-10, d_gate / ct.maximum(factor, 1e-10), 0.0)
        if SAFE:
            logit, rate = wide(_tokens(g, first, tokens, head, K)), 1.0
            if DT_BIAS:
                bias = ct.load(dt_bias, (head, 0), (1, K), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
                logit = logit + wide(bias)
            if A_LOG:
                rate = ct.exp(wide(ct.gather(a_log, (head,))))
            half = 1.0 / (1.0 + ct.exp(-logit * rate))
            d_gate = d_gate * (half * (1.0 - half) * (rate * LOWER))
            if DT_BIAS:
                ct.store(d_bias, (place, 0), ct.sum(d_gate, 0, keepdims=True), allow_tma=False)
            if A_LOG:
                ct.scatter(d_a_log, (place,), ct.sum(d_gate * logit))
        _store_tokens(dg, first, tokens, head, 0, d_gate)
        if L2NORM:
            norm = load_numbers(q_norms, place)
            query = wide(_tokens(q, first, tokens, head // Q_RATIO, K))
            made = wide(_tokens(d_query, first, tokens, head, K))
            _store_tokens(dq, first, tokens, head, 0, made - query * (_load_sum(sums, place, 0, PARTS) * norm * norm))
        if ERASE:
            made = wide(_tokens(d_writes, first, tokens, head, V))
            _store_tokens(dv, first, tokens, head, 0, made * wide(_tokens(w, first, tokens, head, V)))
            _store_tokens(dw, first, tokens, head, 0, made * wide(_tokens(v, first, tokens, head // V_RATIO, V)))
        else:
            made = _load_sum(sums, place, 1, PARTS)
            if SIGMOID:
                rate = rates(beta, first, tokens, head, row, SIGMOID, DOUBLE)
                made = through_strength(made, rate, DOUBLE)
            store_numbers(d_beta, first, tokens, head, made)
    else:
        if A_LOG:
            ct.scatter(d_a_log, (place,), ct.zeros((), ct.float32))
        if DT_BIAS:
            ct.store(d_bias, (place, 0), ct.zeros((1, K), ct.float32), allow_tma=False)
    behind = token(cu_seqlens, SEQUENCES) + slot * C
    if behind < dq.shape[0]:
        rows = ct.minimum(dq.shape[0] - behind, C)
        _store_tokens(dq, behind, rows, head, 0, ct.zeros((C, K), dq.dtype))
        _store_tokens(dk, behind, rows, head, 0, ct.zeros((C, K), dk.dtype))
        _store_tokens(dg, behind, rows, head, 0, ct.zeros((C, K), dg.dtype))
        _store_tokens(dv, behind, rows, head, 0, ct.zeros((C, V), dv.dtype))
        if ERASE:
            _store_tokens(d_beta, behind, rows, head, 0, ct.zeros((C, K), d_beta.dtype))
            _store_tokens(dw, behind, rows, head, 0, ct.zeros((C, V), dw.dtype))
        else:
            store_numbers(d_beta, behind, rows, head, ct.zeros((C, 1), ct.float32))


def _tile(array, place, ROWS, WIDTH):
    tile = ct.load(array, (place, 0, 0), (1, ROWS, WIDTH), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return ct.reshape(tile, (ROWS, WIDTH))


def _tokens(array, first, tokens, head, WIDTH):
    """The rows of a chunk of one head of an array (total, heads, dim), zero behind the chunk's end."""
    rows = rows_of(array, first, first + tokens)
    tile = ct.load(rows, (0, head, 0), (C, 1, WIDTH), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return ct.reshape(tile, (C, WIDTH))
