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
    low,
    mild_powers,
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
"""Of loads."""


def _chunk(array, place, column, WIDTH):
    """(C, WIDTH) of an array (places, C, dim)."""
    tile = ct.load(array, (place, 0, column), (1, C, WIDTH), padding_mode=ct.PaddingMode.ZERO, latency=_LATENCY)
    return ct.reshape(tile, (C, WIDTH))


def _decay(array, place, column, WIDTH):
    """(1, WIDTH) of an array (places, dim)."""
    return ct.load(array, (place, column), (1, WIDTH), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)


def _forward(
    v,
    w,
    inverse,
    erase,
    keep,
    decay,
    initial,
    states,
    writes,
    first,
    count,
    origin,
    head,
    part,
    RATIO,
    K,
    PART,
    flags,
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
        state = state * _decay(decay, place, 0, K) + product(made, keeping)


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
        erasing = _chunk(erase, place, 0, K)
        reading, keeping = _chunk(read, place, 0, K), _chunk(keep, place, 0, K)
        held = ct.astype(state, erase.dtype)
        store_part(d_states, place, part, 0, held)
        d_writes = product(grads, _chunk(attention, place, 0, C)) + product(held, ct.transpose(keeping))
        made = product(ct.astype(d_writes, erase.dtype), _chunk(inverse, place, 0, C))
        store_rows(d_values, at, head, part, ct.transpose(ct.astype(made, erase.dtype)))
        erased = ct.astype(-made, erase.dtype)
        if INITIAL or FINAL:
            state = ct.mma(grads, reading, state * _decay(decay, place, 0, K))
            state = ct.mma(erased, erasing, state)
        else:
            # As above every product would wait for each of its instructions; as here, with states, registers spill.
            change = ct.mma(erased, erasing, product(grads, reading))
            state = state * _decay(decay, place, 0, K) + change
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
    order,
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
    ORDER: Static[bool],
):
    """Block (part, head, sequence) walks over a sequence's chunks, with PART value columns of the state. With ORDER the
    sequence is the one that `order` has in that place.

    The first PARTS parts go forward and write, for each chunk, the state before it and U; the others go backward and
    write the gradient of the state after it, and that of the values that are written. States are turned, (PART, K), so
    that they are the first operand of a product, which may lie in registers.
    """
    part, head, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    if ORDER:
        sequence = ct.gather(order, (sequence,))
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


def kda_backward_pairs(
    v,
    w,
    d_out,
    q_norms,
    k_norms,
    writes,
    d_writes,
    chunks,
    pairs,
    numbers,
    SCALE: Static[float],
    V_RATIO: Static[int],
    HEADS: Static[int],
    V: Static[int],
    L2NORM: Static[bool],
    ERASE: Static[bool],
):
    """Block (slot, head) writes what is the same for all key columns of a chunk:

    pairs (2 * slots * HO, C, C), bfloat16: tril(SCALE dO U^T, -1) and -tril(du U^T, -1), times the norms
    numbers (slots * HO, 2, C), float32: SCALE <dO, U> times both norms, and if L2NORM <k, dk> times the square of its
    """
    place = ct.bid(0)
    slot, head = place // HEADS, place % HEADS
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    if tokens > 0:
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        column = ct.reshape(ct.arange(C, dtype=ct.int32), (1, C))
        inside, diagonal = row < tokens, row == column
        q_norm, k_norm = ct.full((C, 1), SCALE, ct.float32), ct.full((C, 1), 1.0, ct.float32)
        column_norm = 1.0
        if L2NORM:
            q_norm, k_norm = load_numbers(q_norms, place) * SCALE, load_numbers(k_norms, place)
            column_norm = ct.load(k_norms, (place, 0), (1, C), check_bounds=False, allow_tma=False)
        turned = ct.transpose(_chunk(writes, place, 0, V))
        read = product(load_span(d_out, first, head, 0, V), turned)
        # A token with itself, where nothing decays: apart, so that its rounding is none of the gates' gradients'.
        own = ct.sum(ct.where(diagonal, read, 0.0), 1, keepdims=True) * (q_norm * k_norm)
        _store_sum(numbers, place, 0, ct.where(inside, own, 0.0))
        below = inside & (row > column)
        read = ct.where(below, read * (q_norm * column_norm), 0.0)
        store_part(pairs, 2 * place, 0, 0, ct.astype(read, ct.bfloat16))
        d_written = load_span(d_writes, first, head, 0, V)
        erased = product(d_written, turned)
        if L2NORM:
            value = wide(load_span(v, first, head // V_RATIO, 0, V))
            if ERASE:
                value = value * wide(load_span(w, first, head, 0, V))
            # <k, dk>, as what is written depends on k.
            twice = 2.0 * ct.sum(ct.where(diagonal, erased, 0.0), 1, keepdims=True)
            by_key = twice - ct.sum(wide(d_written) * value, 1, keepdims=True)
            _store_sum(numbers, place, 1, by_key * k_norm * k_norm)
        erased = ct.where(below, erased * (-k_norm * column_norm), 0.0)
        store_part(pairs, 2 * place + 1, 0, 0, ct.astype(erased, ct.bfloat16))


def _of_kind(read, erased, operands, forth, back, mask):
    """What the pairs of rows in `mask` give to the gradients of what reads, erases and is written, and of the gates."""
    read, erased = ct.where(mask, read, 0.0), ct.where(mask, erased, 0.0)
    read, erased = ct.astype(read, ct.bfloat16), ct.astype(erased, ct.bfloat16)
    query, erase, write = operands
    query, erase = ct.astype(query * forth, ct.bfloat16), ct.astype(erase * forth, ct.bfloat16)
    write = ct.astype(write * back, ct.bfloat16)
    d_query, d_erase = product(read, write), product(erased, write)
    d_write = ct.mma(ct.transpose(erased), erase, product(ct.transpose(read), query))
    d_gate = wide(query) * d_query + wide(erase) * d_erase - wide(write) * d_write
    return forth * d_query, forth * d_erase, back * d_write, d_gate


def _added(x, y):
    return x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]


def _strong_pairs(read, erased, query, erase, write, gates, tables, row, column, PART):
    """All pairs in three kinds: 32 rows apart, of one 32 and 16 apart, and of one 16."""
    operands, read, erased = (query, erase, write), wide(read), wide(erased)
    across = power(product(table(tables, FROM_32), gates))
    made = _of_kind(read, erased, operands, across, across, row // 32 != column // 32)
    across = power(product(table(tables, FROM_16), gates))
    apart = (row // 32 == column // 32) & (row // 16 != column // 16)
    made = _added(made, _of_kind(read, erased, operands, across, across, apart))
    near = ct.maximum(gates, ct.full((C, PART), LEAST_NEAR, ct.float16))
    forth, back = signed_powers(product(table(tables, FROM_8), near), row, 8)
    return _added(made, _of_kind(read, erased, operands, forth, back, row // 16 == column // 16))


def _earlier(read, erased, query, erase, mask):
    """What pairs give to the earlier of the two, where the later one is in `mask`."""
    nothing = ct.zeros(query.shape, ct.bfloat16)
    made = product(ct.transpose(read), ct.where(mask, query, nothing))
    return ct.mma(ct.transpose(erased), ct.where(mask, erase, nothing), made)


def _summed_up(prefixes, tile):
    """Each row of a float32 tile and those behind it, added up: products of its halves of 8 bits."""
    high = ct.astype(tile, ct.bfloat16)
    low = ct.astype(tile - wide(high), ct.bfloat16)
    summing = ct.transpose(ct.load(prefixes, (0, 0), (C, C)))
    return ct.mma(summing, low, product(summing, high))


def kda_backward_gradients(
    q,
    k,
    g,
    beta,
    a_log,
    dt_bias,
    d_out,
    tables,
    prefixes,
    q_norms,
    k_norms,
    strong,
    places,
    decay,
    states,
    writes,
    d_states,
    d_writes,
    pairs,
    numbers,
    chunks,
    dq,
    dk,
    dg,
    sums,
    d_beta,
    d_rates,
    d_bias,
    SCALE: Static[float],
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    HEADS: Static[int],
    V: Static[int],
    PART: Static[int],
    PARTS: Static[int],
    EACH: Static[int],
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
    """Block (slot, head, part) works on PART key columns of a chunk that `strong` does not mark; with STRONG the
    blocks take turns at the parts of the chunks in `places`. It writes dk, dg, with ERASE d_beta, the chunk's part
    d_bias (slots * HO, K), and for `kda_backward_finish`

    dq (total, HO, K), io dtype: that of q, if L2NORM without what its norm depends on it
    sums (slots * HO * PARTS * EACH, 2, C), float32: a part's sums of rows of q dq, and of k and what is written's
      gradient, in the first of its EACH places, 0 in the others
    d_rates (slots * HO * PARTS * EACH), float32: the same of the gradient of a_log
    """

    def work(place, part, slot, head, first, tokens):
        rows = (place * PARTS + part) * EACH, EACH
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        inside = row < tokens
        q_norm, k_norm = SCALE, 1.0
        if L2NORM:
            q_norm, k_norm = load_numbers(q_norms, place) * SCALE, load_numbers(k_norms, place)
        state, d_state = load_part(states, place, 0, part, V, PART), load_part(d_states, place, 0, part, V, PART)
        query = ct.where(inside, wide(load_span(q, first, head // Q_RATIO, part, PART)), 0.0)
        key = ct.where(inside, wide(load_span(k, first, head // K_RATIO, part, PART)), 0.0)
        erase, rate = key, 1.0
        if ERASE:
            by_channel = erase_rates(beta, first, head, part, PART, SIGMOID, DOUBLE)
            erase = key * by_channel
        else:
            rate = rates(beta, first, tokens, head, row, SIGMOID, DOUBLE)
        options = (SAFE, A_LOG, DT_BIAS, LINEAR, LOWER)
        gates = load_gates(g, a_log, dt_bias, first, tokens, head, part, PART, options)
        read, erased = _chunk(pairs, 2 * place, 0, C), _chunk(pairs, 2 * place + 1, 0, C)
        if STRONG:
            column = ct.reshape(ct.arange(C, dtype=ct.int32), (1, C))
            made = _strong_pairs(read, erased, query, erase, key * rate, gates, tables, row, column, PART)
            d_query, d_erase, d_write, d_gate = made
        else:
            behind = row >= 32
            forth, back_first, back_behind = mild_powers(gates, tables, row)
            write_first, write_behind = low(key, back_first * rate), low(key, back_behind * rate)
            query_low, erase_low = low(query, forth), low(erase, forth)
            d_write = _earlier(read, erased, query_low, erase_low, row < 32)
            d_behind = _earlier(read, erased, query_low, erase_low, behind)
            d_gate = -wide(write_first) * d_write - wide(write_behind) * d_behind
            d_write = back_first * d_write + back_behind * d_behind
            d_query = ct.where(behind, product(read, write_behind), product(read, write_first))
            d_gate = d_gate + wide(query_low) * d_query
            d_query = forth * d_query
        own = load_number(numbers, place, 0)
        # Once more: held, it would spill.
        query = ct.where(inside, wide(load_span(q, first, head // Q_RATIO, part, PART)), 0.0)
        before = power(product(table(tables, UP_TO), gates))
        reading = before * q_norm * product(load_span(d_out, first, head, 0, V), state)
        d_gate = d_gate + query * reading
        d_query = d_query + reading + key * (own * rate)
        d_write = d_write + own * query
        if L2NORM:
            _store_sums(sums, rows, 0, ct.sum(query * d_query, 1, keepdims=True))
        _store_tokens(dq, first, tokens, head, part, d_query)
        if not STRONG:
            d_erase = ct.where(behind, product(erased, write_behind), product(erased, write_first))
            d_gate = d_gate + wide(erase_low) * d_erase
            d_erase = forth * d_erase
        erasing = before * -k_norm * product(load_span(d_writes, first, head, 0, V), state)
        d_gate = d_gate + erase * erasing
        d_erase = d_erase + erasing
        later = power(product(table(tables, BEHIND), gates)) * k_norm * product(_chunk(writes, place, 0, V), d_state)
        d_write = d_write + later
        through = key * (later * rate)
        total = ct.sum(wide(state) * wide(d_state), 0, keepdims=True) * _decay(decay, place, part, PART)
        total = total + ct.sum(through, 0, keepdims=True)
        if ERASE:
            d_key = d_erase * by_channel + d_write
            d_rate = key * d_erase
            if SIGMOID:
                d_rate = through_strength(d_rate, by_channel, DOUBLE)
            _store_tokens(d_beta, first, tokens, head, part, d_rate)
        else:
            d_key = d_erase + rate * d_write
            _store_sums(sums, rows, 1, ct.sum(key * d_write, 1, keepdims=True))
        if L2NORM:
            d_key = d_key - key * load_number(numbers, place, 1)
        _store_tokens(dk, first, tokens, head, part, d_key)
        d_gate = _summed_up(prefixes, ct.where(inside, d_gate - through, 0.0)) + total
        _store_gates(g, a_log, dt_bias, dg, d_rates, d_bias, first, tokens, head, part, place, rows, d_gate, options)

    if STRONG:
        for at in range(ct.bid(0), ct.gather(places, (0,)) * PARTS, ct.num_blocks(0)):
            place = ct.gather(places, (1 + at // PARTS,))
            slot, head = place // HEADS, place % HEADS
            first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
            work(place, at % PARTS, slot, head, first, tokens)
    else:
        place, part = ct.bid(0) // PARTS, ct.bid(0) % PARTS
        slot, head = place // HEADS, place % HEADS
        first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
        # Loaded whatever the tokens are, so that it does not wait for them.
        marked = ct.gather(strong, (slot, head))
        if (tokens > 0) & (marked == 0):
            work(place, part, slot, head, first, tokens)


def _store_sums(sums, rows, which, column):
    at, EACH = rows
    _store_sum(sums, at, which, column)
    for more in ct.static_iter(range(1, EACH)):
        _store_sum(sums, at + more, which, ct.zeros((C, 1), ct.float32))


def _store_gates(g, a_log, dt_bias, dg, d_rates, d_bias, first, tokens, head, part, place, rows, d_gate, options):
    """The gradient of g and of its parameters, from that of the log gates."""
    SAFE, A_LOG, DT_BIAS, LINEAR, LOWER = options
    PART = d_gate.shape[1]
    if LINEAR:
        factor = wide(load_span(g, first, head, part, PART))
        d_gate = ct.where(factor > 1e-10, d_gate / ct.maximum(factor, 1e-10), 0.0)
    if SAFE:
        logit, rate = wide(load_span(g, first, head, part, PART)), 1.0
        if DT_BIAS:
            bias = ct.load(dt_bias, (head, part), (1, PART), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
            logit = logit + wide(bias)
        if A_LOG:
            rate = ct.exp(wide(ct.gather(a_log, (head,))))
        half = 1.0 / (1.0 + ct.exp(-logit * rate))
        # Behind the chunk's end g may be anything.
        inside = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1)) < tokens
        d_gate = ct.where(inside, d_gate * (half * (1.0 - half) * (rate * LOWER)), 0.0)
        if DT_BIAS:
            ct.store(d_bias, (place, part), ct.sum(d_gate, 0, keepdims=True), allow_tma=False)
        if A_LOG:
            at, EACH = rows
            ct.scatter(d_rates, (at,), ct.sum(ct.where(inside, d_gate * logit, 0.0)))
            for more in ct.static_iter(range(1, EACH)):
                ct.scatter(d_rates, (at + more,), ct.zeros((), ct.float32))
    _store_tokens(dg, first, tokens, head, part, d_gate)


def _store_sum(sums, block, which, column):
    ct.store(sums, (block, which, 0), ct.reshape(column, (1, 1, C)), allow_tma=False)


def load_number(numbers, place, which):
    """(C, 1) of an array (places, kinds, C)."""
    tile = ct.load(numbers, (0, which, place), (C, 1, 1), order=(2, 1, 0), check_bounds=False, allow_tma=False)
    return ct.reshape(tile, (C, 1))


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
    beta,
    w,
    q_norms,
    d_writes,
    d_query,
    sums,
    d_rates,
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
    A_LOG: Static[bool],
    DT_BIAS: Static[bool],
):
    """Block (slot, head) writes what needs all key columns of a chunk: with L2NORM dq; dv and dw with ERASE, d_beta
    without; and the chunk's part of the gradient of a_log.

    It also clears 64 of the rows, if there are so many, that belong to no sequence.
    """
    place = ct.bid(0)
    slot, head = place // HEADS, place % HEADS
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    if tokens > 0:
        row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
        if A_LOG:
            total = ct.zeros((), ct.float32)
            for part in ct.static_iter(range(PARTS)):
                total = total + ct.gather(d_rates, (place * PARTS + part,))
            ct.scatter(d_a_log, (place,), total)
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


def _tokens(array, first, tokens, head, WIDTH):
    """The rows of a chunk of one head of an array (total, heads, dim), zero behind the chunk's end."""
    rows = rows_of(array, first, first + tokens)
    tile = ct.load(rows, (0, head, 0), (C, 1, WIDTH), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return ct.reshape(tile, (C, WIDTH))
