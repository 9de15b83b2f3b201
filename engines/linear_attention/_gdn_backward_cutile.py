"""cuTile kernels of the Gated DeltaNet's backward. The formulas, and why the work is cut so, are in the notes beside.

Arithmetic is float32, operands of products have the io dtype. Optional arrays that are absent come as the constant
False. K and V are the key and value dim rounded up to powers of two; what lies past an array's end is read as zero.
"""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._gdn_chunks_cutile import GATE_FLOOR, LOG2_E, load_span, power
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
_FEW_REGISTERS = 1
"""Of loads that hold no addresses for later ones."""

ERASE, READ, KEEP, DECAY = range(4)
"""A chunk's factors, of row i: e^G_i, SCALE e^G_i, beta_i e^(G_last - G_i) and e^G_last, with k's norm in the first and
the third, q's in the second."""


def gdn_backward_factors(
    chunks,
    gates,
    rates,
    q_norms,
    k_norms,
    factors,
    HEADS: Static[int],
    SCALE: Static[float],
    L2NORM: Static[bool],
):
    """Block (slot, tile of HEADS heads) writes factors (slots + 1, HO, 4, C) from arrays (slots, HO, C)."""
    slot, part = ct.bid(0), ct.bid(1)
    if ct.gather(chunks, (slot, 1)) > 0:
        total = _heads(gates, slot, part, HEADS) * LOG2_E
        last = ct.load(gates, (slot, part, C - 1), (1, HEADS, 1), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        last = last * LOG2_E
        erase, keep = power(total), power(last - total) * _heads(rates, slot, part, HEADS)
        read = erase * SCALE
        if L2NORM:
            k_norm = _heads(k_norms, slot, part, HEADS)
            erase, keep, read = erase * k_norm, keep * k_norm, read * _heads(q_norms, slot, part, HEADS)
        made = (erase, read, keep, ct.zeros((1, HEADS, C), ct.float32) + power(last))
        for which in ct.static_iter(range(4)):
            tile = ct.reshape(made[which], (1, HEADS, 1, C))
            ct.store(factors, (slot, part, which, 0), tile, allow_tma=False)


def _heads(array, slot, part, HEADS):
    index, shape = (slot, part, 0), (1, HEADS, C)
    return ct.load(array, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)


def _square(array, place, LATENCY):
    return ct.reshape(ct.load(array, (place, 0, 0), (1, C, C), latency=LATENCY), (C, C))


def _factor(factors, place, which):
    """A number for each row of a chunk, (1, C)."""
    tile = ct.load(factors, (place, which, 0), (1, 1, C), check_bounds=False, allow_tma=False)
    return ct.reshape(tile, (1, C))


def _decay(factors, place, ROWS):
    tile = ct.load(factors, (0, DECAY, place), (ROWS, 1, 1), order=(2, 1, 0), check_bounds=False, allow_tma=False)
    return ct.reshape(tile, (ROWS, 1))


def _touch(factors, place):
    """A load that brings a chunk's factors to the L1 cache."""
    return ct.load(factors, (place, 0, 0), (1, 4, C), check_bounds=False, allow_tma=False)


def _forward(
    k, v, inverse, factors, initial, states, writes, first, count, origin, head, part, ratios, K, PART, LATENCY, INITIAL
):
    _, K_RATIO, V_RATIO = ratios
    heads, spare = ct.num_blocks(1), factors.shape[0] - 1
    state = ct.zeros((PART, K), ct.float32)
    if INITIAL:
        state = wide(load_part(initial, origin, part, 0, PART, K))
    touched = coming = ct.zeros((1, 4, C), ct.float32)
    for at in range(count):
        place = (first + at) * heads + head
        touched = touched + coming
        coming = _touch(factors, ct.minimum(place + heads, spare))
        keys = load_rows(k, at, head // K_RATIO, 0, K, LATENCY)
        values = load_rows(v, at, head // V_RATIO, part, PART, LATENCY)
        held = ct.astype(state, keys.dtype)
        store_part(states, place, part, 0, held)
        missed = wide(ct.transpose(values)) - _factor(factors, place, ERASE) * product(held, ct.transpose(keys))
        made = product(ct.astype(missed, keys.dtype), ct.transpose(_square(inverse, place, LATENCY)))
        store_rows(writes, at, head, part, ct.transpose(ct.astype(made, keys.dtype)))
        kept = ct.astype(made * _factor(factors, place, KEEP), keys.dtype)
        state = ct.mma(kept, keys, state * _decay(factors, place, PART))
    ct.store(factors, (spare, 0, 0), touched, check_bounds=False, allow_tma=False)


def _reverse(
    q,
    k,
    d_out,
    inverse,
    attention,
    factors,
    d_final,
    d_states,
    d_values,
    d_initial,
    first,
    count,
    origin,
    head,
    part,
    ratios,
    K,
    PART,
    LATENCY,
    INITIAL,
    FINAL,
):
    Q_RATIO, K_RATIO, _ = ratios
    heads, spare = ct.num_blocks(1), factors.shape[0] - 1
    state = ct.zeros((PART, K), ct.float32)
    if FINAL:
        state = wide(load_part(d_final, origin, part, 0, PART, K))
    touched = coming = ct.zeros((1, 4, C), ct.float32)
    for step in range(count):
        at = count - 1 - step
        place = (first + at) * heads + head
        touched = touched + coming
        coming = _touch(factors, ct.maximum(place - heads, 0))
        queries = load_rows(q, at, head // Q_RATIO, 0, K, LATENCY)
        keys = load_rows(k, at, head // K_RATIO, 0, K, LATENCY)
        grads = ct.transpose(load_rows(d_out, at, head, part, PART, LATENCY))
        held = ct.astype(state, keys.dtype)
        store_part(d_states, place, part, 0, held)
        d_writes = product(grads, _square(attention, place, LATENCY))
        d_writes = d_writes + _factor(factors, place, KEEP) * product(held, ct.transpose(keys))
        made = product(ct.astype(d_writes, keys.dtype), _square(inverse, place, LATENCY))
        store_rows(d_values, at, head, part, ct.transpose(ct.astype(made, keys.dtype)))
        read = ct.astype(wide(grads) * _factor(factors, place, READ), keys.dtype)
        state = ct.mma(read, queries, state * _decay(factors, place, PART))
        state = ct.mma(ct.astype(made * -_factor(factors, place, ERASE), keys.dtype), keys, state)
    if INITIAL:
        store_part(d_initial, origin, part, 0, ct.astype(state, d_initial.dtype))
    ct.store(factors, (spare, 0, 0), touched, check_bounds=False, allow_tma=False)


def gdn_backward_scans(
    q,
    k,
    v,
    d_out,
    inverse,
    attention,
    factors,
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
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    V_RATIO: Static[int],
    K: Static[int],
    PART: Static[int],
    PARTS: Static[int],
    LATENCY: Static[int],
    INITIAL: Static[bool],
    FINAL: Static[bool],
    ORDER: Static[bool],
):
    """Block (part, head, sequence) walks over a sequence's chunks, with PART value columns of the state. With ORDER the
    sequence is the one that `order` has in that place.

    The first PARTS parts go forward and write, for each chunk, the state before it and W; the others go backward and
    write the gradient of the state after it, and that of v. States are turned, (PART, K), so that they are the first
    operand of a product, which may lie in registers.

    The compiler loads factors where they are used, and a block has nothing else to do meanwhile: a chunk ahead they are
    loaded once for the cache. The last place of factors is spare, and takes the sum of these loads, or they would go.
    """
    part, head, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    if ORDER:
        sequence = ct.gather(order, (sequence,))
    start, stop = token(cu_seqlens, sequence), token(cu_seqlens, sequence + 1)
    first, count = ct.gather(first_slot, (sequence,)), ct.cdiv(stop - start, C)
    origin, ratios = sequence * ct.num_blocks(1) + head, (Q_RATIO, K_RATIO, V_RATIO)
    # An empty sequence may start where the arrays end, which a slice may not.
    start = ct.minimum(start, k.shape[0] - 1)
    stop = ct.maximum(start, stop)
    keys = rows_of(k, start, stop)
    walk = (first, count, origin, head)
    if part < PARTS:
        values, made = rows_of(v, start, stop), rows_of(writes, start, stop)
        _forward(keys, values, inverse, factors, initial, states, made, *walk, part, ratios, K, PART, LATENCY, INITIAL)
    else:
        queries, grads, d_made = rows_of(q, start, stop), rows_of(d_out, start, stop), rows_of(d_values, start, stop)
        squares, ends = (inverse, attention, factors), (d_final, d_states, d_made, d_initial)
        options = (ratios, K, PART, LATENCY, INITIAL, FINAL)
        _reverse(queries, keys, grads, *squares, *ends, *walk, part - PARTS, *options)


def _row(array, place):
    return ct.load(array, (place, 0), (1, C), check_bounds=False, allow_tma=False)


def _last(array, place):
    return ct.load(array, (place, C - 1), (1, 1), check_bounds=False, allow_tma=False)


def _load_gate(array, first, tokens, head):
    row = ct.arange(C, dtype=ct.int32)
    return ct.reshape(wide(ct.gather(array, (first + row, head), mask=row < tokens)), (C, 1))


def _through_safe_gate(d_gate, logit, a_log, dt_bias, d_gates, slot, head, A_LOG, DT_BIAS):
    """The gradient of a logit; of the gate's two parameters the chunk's part goes to d_gates (2, slots, heads)."""
    rate = -1.0
    if DT_BIAS:
        logit = logit + wide(ct.gather(dt_bias, (head,)))
    if A_LOG:
        rate = -ct.exp(wide(ct.gather(a_log, (head,))))
        gate = rate * (ct.maximum(logit, 0.0) + ct.log(1.0 + ct.exp(-ct.abs(logit))))
        ct.scatter(d_gates, (0, slot, head), ct.sum(d_gate * ct.maximum(gate, GATE_FLOOR)))
    d_gate = d_gate * rate / (1.0 + ct.exp(-logit))
    if DT_BIAS:
        ct.scatter(d_gates, (1, slot, head), ct.sum(d_gate))
    return d_gate


def _tokens(array, first, tokens, head, column, WIDTH, access):
    """The rows of a chunk of one head of an array (total, heads, dim): (C, WIDTH), zero behind the chunk's end."""
    FULL, LATENCY = access
    if FULL:
        return load_span(array, first, head, column, WIDTH)
    rows = rows_of(array, first, first + tokens)
    tile = ct.load(rows, (0, head, column), (C, 1, WIDTH), padding_mode=ct.PaddingMode.ZERO, latency=LATENCY)
    return ct.reshape(tile, (C, WIDTH))


def _store_tokens(array, first, tokens, head, column, tile, access):
    WIDTH = tile.shape[1]
    tile = ct.reshape(tile, (C, 1, WIDTH))
    if access[0]:
        array.tiled_view((C, 1, WIDTH), traversal_steps=(1, 1, WIDTH)).store((first, head, column), tile)
    else:
        ct.store(rows_of(array, first, first + tokens), (0, head, column), tile, allow_tma=False)


def _load_values(spans, first, tokens, head, part, V, access):
    """A part of a chunk's dO, W and dv, (C, V) each."""
    d_out, writes, d_values = spans
    grads = _tokens(d_out, first, tokens, head, part, V, access)
    written = _tokens(writes, first, tokens, head, part, V, access)
    return grads, written, _tokens(d_values, first, tokens, head, part, V, access)


def _sums_of_writes(spans, place, head, first, tokens, V, V_PARTS, access):
    """dO W^T and dv W^T, (C, C), summed over V_PARTS parts of V value columns."""
    read = erased = ct.zeros((C, C), ct.float32)
    for part in range(place >> 30, V_PARTS):
        grads, written, d_written = _load_values(spans, first, tokens, head, part, V, access)
        turned = ct.transpose(written)
        read, erased = ct.mma(grads, turned, read), ct.mma(d_written, turned, erased)
    return read, erased


def _sums_of_states(spans, ends, place, head, first, tokens, at, sizes, access):
    """dO S, dv S and W Z of the `at`-th PART key columns, (C, PART), summed over the parts of the value columns, and
    <S, Z> in a column."""
    (states, d_states), (V, V_PARTS, PART) = ends, sizes
    d_query = d_key = later = ct.zeros((C, PART), ct.float32)
    pairs = ct.zeros((V, 1), ct.float32)
    for part in range(place >> 30, V_PARTS):
        grads, written, d_written = _load_values(spans, first, tokens, head, part, V, access)
        state = load_part(states, place, part, at, V, PART, access[1])
        d_state = load_part(d_states, place, part, at, V, PART, access[1])
        pairs = pairs + ct.sum(wide(state) * wide(d_state), 1, keepdims=True)
        d_query, d_key = ct.mma(grads, state, d_query), ct.mma(d_written, state, d_key)
        later = ct.mma(written, d_state, later)
    return d_query, d_key, later, pairs


def _gradients(given, made, where, options, access):
    """The gradients of a chunk; `access` says whether it has C tokens, and the latency of its loads."""
    q, k, g, a_log, dt_bias, d_out, gates, rates, q_norms, k_norms, states, writes, d_states = given
    dq, dk, d_values, dg, d_beta, d_gates = made
    place, slot, head, first, tokens = where
    (SCALE, Q_RATIO, K_RATIO, V, V_PARTS, PART, PARTS, HELD, L2NORM), gate = options
    SIGMOID, DOUBLE, SAFE, A_LOG, DT_BIAS, LINEAR = gate
    rate, total, last = load_numbers(rates, place), load_numbers(gates, place) * LOG2_E, _last(gates, place) * LOG2_E
    before, after = power(total), power(last - total)
    q_norm, k_norm = ct.full((C, 1), SCALE, ct.float32), ct.full((C, 1), 1.0, ct.float32)
    if L2NORM:
        q_norm, k_norm = load_numbers(q_norms, place) * SCALE, load_numbers(k_norms, place)
    row = ct.reshape(ct.arange(C, dtype=ct.int32), (C, 1))
    column = ct.reshape(row, (1, C))
    decay = ct.where(row >= column, power(total - _row(gates, place) * LOG2_E), 0.0)
    if L2NORM:
        decay = decay * _row(k_norms, place)
    spans = (d_out, writes, d_values)
    if HELD:
        grads, written, d_written = _load_values(spans, first, tokens, head, 0, V, access)
        turned = ct.transpose(written)
        read = decay * q_norm * product(grads, turned)
        erased = ct.where(row > column, decay * -k_norm * product(d_written, turned), 0.0)
    else:
        read, erased = _sums_of_writes(spans, place, head, first, tokens, V, V_PARTS, access)
        read = decay * q_norm * read
        erased = ct.where(row > column, decay * -k_norm * erased, 0.0)
    read, erased = ct.astype(read, q.dtype), ct.astype(erased, q.dtype)
    by_query, by_key, after = q_norm * before, -k_norm * before, after * k_norm
    sum_query = sum_key = sum_within = sum_after = sum_rate = ct.zeros((C, 1), ct.float32)
    pairs = ct.zeros((V, 1), ct.float32)
    # Held until the sums over all columns are known.
    kept = ()
    for _ in ct.static_iter(range(2 * PARTS if HELD else 0)):
        kept = (*kept, ct.zeros((C, PART), q.dtype))
    # From 0: the compiler unrolls a loop whose length it knows, and holds every part at once.
    for at in range(place >> 30, PARTS):
        query = _tokens(q, first, tokens, head // Q_RATIO, at, PART, access)
        key = _tokens(k, first, tokens, head // K_RATIO, at, PART, access)
        if HELD:
            state = load_part(states, place, 0, at, V, PART)
            d_state = load_part(d_states, place, 0, at, V, PART)
            pairs = pairs + ct.sum(wide(state) * wide(d_state), 1, keepdims=True)
            rated = ct.astype(wide(key) * rate, key.dtype)
            d_query = ct.mma(read, rated, by_query * product(grads, state))
            d_key = ct.mma(erased, rated, by_key * product(d_written, state))
            later = after * product(written, d_state)
        else:
            ends, sizes = (states, d_states), (V, V_PARTS, PART)
            d_query, d_key, later, pair = _sums_of_states(spans, ends, place, head, first, tokens, at, sizes, access)
            pairs = pairs + pair
            rated = ct.astype(wide(key) * rate, key.dtype)
            d_query = ct.mma(read, rated, by_query * d_query)
            d_key = ct.mma(erased, rated, by_key * d_key)
            later = after * later
        within = ct.mma(ct.transpose(erased), key, product(ct.transpose(read), query))
        sum_query = sum_query + ct.sum(wide(query) * d_query, 1, keepdims=True)
        sum_key = sum_key + ct.sum(wide(key) * d_key, 1, keepdims=True)
        # The same rounded factors as in d_query and d_key: where decay is strong, all but the rounding cancels.
        sum_within = sum_within + ct.sum(wide(rated) * within, 1, keepdims=True)
        sum_after = sum_after + ct.sum(wide(key) * later, 1, keepdims=True)
        sum_rate = sum_rate + ct.sum(wide(key) * within, 1, keepdims=True)
        new = ct.astype(d_query, q.dtype), ct.astype(d_key + rate * (later + within), q.dtype)
        if HELD:
            grown = ()
            for each in ct.static_iter(range(2 * PARTS)):
                grown = (*grown, ct.where(at == each // 2, new[each % 2], kept[each]))
            kept = grown
        else:
            _store_tokens(dq, first, tokens, head, at, new[0], access)
            _store_tokens(dk, first, tokens, head, at, new[1], access)
    sum_rate = sum_rate + sum_after
    if HELD:
        for at in ct.static_iter(range(PARTS)):
            d_query, d_key = kept[2 * at], kept[2 * at + 1]
            if L2NORM:
                query = _tokens(q, first, tokens, head // Q_RATIO, at, PART, access)
                key = _tokens(k, first, tokens, head // K_RATIO, at, PART, access)
                by_norm = sum_query * q_norm * q_norm * (1.0 / (SCALE * SCALE))
                d_query = ct.astype(wide(d_query) - wide(query) * by_norm, q.dtype)
                by_norm = (sum_key + rate * sum_rate) * k_norm * k_norm
                d_key = ct.astype(wide(d_key) - wide(key) * by_norm, q.dtype)
            _store_tokens(dq, first, tokens, head, at, d_query, access)
            _store_tokens(dk, first, tokens, head, at, d_key, access)
    elif L2NORM:
        by_query = sum_query * q_norm * q_norm * (1.0 / (SCALE * SCALE))
        by_key = (sum_key + rate * sum_rate) * k_norm * k_norm
        for at in range(place >> 30, PARTS):
            query = _tokens(q, first, tokens, head // Q_RATIO, at, PART, access)
            d_query = wide(_tokens(dq, first, tokens, head, at, PART, access)) - wide(query) * by_query
            _store_tokens(dq, first, tokens, head, at, ct.astype(d_query, q.dtype), access)
            key = _tokens(k, first, tokens, head // K_RATIO, at, PART, access)
            d_key = wide(_tokens(dk, first, tokens, head, at, PART, access)) - wide(key) * by_key
            _store_tokens(dk, first, tokens, head, at, ct.astype(d_key, q.dtype), access)
    d_gate = ct.cumsum(sum_query + sum_key - sum_within, 0, reverse=True) + power(last) * ct.sum(pairs)
    sum_after = rate * sum_after
    d_gate = d_gate + ct.cumsum(sum_after, 0) - sum_after
    d_gate = ct.where(row < tokens, d_gate, 0.0)
    if SAFE:
        logit = _load_gate(g, first, tokens, head)
        d_gate = _through_safe_gate(d_gate, logit, a_log, dt_bias, d_gates, slot, head, A_LOG, DT_BIAS)
    if LINEAR:
        factor = _load_gate(g, first, tokens, head)
        d_gate = ct.where(factor > 1e-10, d_gate / ct.maximum(factor, 1e-10), 0.0)
    if SIGMOID:
        sum_rate = through_strength(sum_rate, rate, DOUBLE)
    store_numbers(dg, first, tokens, head, d_gate)
    store_numbers(d_beta, first, tokens, head, sum_rate)


def gdn_backward_gradients(
    q,
    k,
    g,
    a_log,
    dt_bias,
    d_out,
    gates,
    rates,
    q_norms,
    k_norms,
    states,
    writes,
    d_states,
    chunks,
    cu_seqlens,
    dq,
    dk,
    d_values,
    dg,
    d_beta,
    d_gates,
    SCALE: Static[float],
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    HEADS: Static[int],
    SEQUENCES: Static[int],
    V: Static[int],
    V_PARTS: Static[int],
    PART: Static[int],
    PARTS: Static[int],
    HELD: Static[bool],
    L2NORM: Static[bool],
    SIGMOID: Static[bool],
    DOUBLE: Static[bool],
    SAFE: Static[bool],
    A_LOG: Static[bool],
    DT_BIAS: Static[bool],
    LINEAR: Static[bool],
):
    """Block (slot, head) writes the gradients of its chunk's q, k, g and beta; of q and k, PART columns at a time. With
    HELD all V value columns are worked on at once, and registers hold the gradients of q and k until their norms' part
    is known. Else memory does, and value columns are worked on in V_PARTS parts of V.

    It also clears 64 of the rows, if there are so many, that belong to no sequence.
    """
    place = ct.bid(0)
    slot, head = place // HEADS, place % HEADS
    first, tokens = ct.gather(chunks, (slot, 0)), ct.gather(chunks, (slot, 1))
    given = (q, k, g, a_log, dt_bias, d_out, gates, rates, q_norms, k_norms, states, writes, d_states)
    made, where = (dq, dk, d_values, dg, d_beta, d_gates), (place, slot, head, first, tokens)
    gate = (SIGMOID, DOUBLE, SAFE, A_LOG, DT_BIAS, LINEAR)
    options = (SCALE, Q_RATIO, K_RATIO, V, V_PARTS, PART, PARTS, HELD, L2NORM), gate
    # A chunk that is not full costs descriptors of TMA; without HELD there is one way for all, of fewer registers.
    latency = None if HELD else _FEW_REGISTERS
    if HELD & (tokens == C):
        _gradients(given, made, where, options, (True, latency))
    elif tokens > 0:
        _gradients(given, made, where, options, (False, latency))
    else:
        if A_LOG:
            ct.scatter(d_gates, (0, slot, head), ct.zeros((), ct.float32))
        if DT_BIAS:
            ct.scatter(d_gates, (1, slot, head), ct.zeros((), ct.float32))
    behind = token(cu_seqlens, SEQUENCES) + slot * C
    if behind < dq.shape[0]:
        rows = ct.minimum(dq.shape[0] - behind, C)
        for at in ct.static_iter(range(PARTS)):
            _store_tokens(dq, behind, rows, head, at, ct.zeros((C, PART), q.dtype), (False, None))
            _store_tokens(dk, behind, rows, head, at, ct.zeros((C, PART), q.dtype), (False, None))
        for at in ct.static_iter(range(V_PARTS)):
            _store_tokens(d_values, behind, rows, head, at, ct.zeros((C, V), q.dtype), (False, None))
        store_numbers(dg, behind, rows, head, ct.zeros((C, 1), ct.float32))
        store_numbers(d_beta, behind, rows, head, ct.zeros((C, 1), ct.float32))


def gdn_backward_shared(parts, gradient, RATIO: Static[int], WIDTH: Static[int]):
    """Block (chunk, head) adds what RATIO heads give to the head that they share: parts (total, heads * RATIO, dim)."""
    chunk, head = ct.bid(0), ct.bid(1)
    total = ct.zeros((C, WIDTH), ct.float32)
    for at in ct.static_iter(range(RATIO)):
        total = total + wide(load_rows(parts, chunk, head * RATIO + at, 0, WIDTH, _LATENCY))
    store_rows(gradient, chunk, head, 0, ct.astype(total, gradient.dtype))


def gdn_backward_parameter(parts, gradient, WHICH: Static[int], ROWS: Static[int], COLS: Static[int]):
    """Adds the chunks' parts (2, slots, heads) of a gate's parameter in a fixed order, COLS heads a block."""
    total = ct.zeros((ROWS, COLS), ct.float32)
    for at in range(ct.cdiv(parts.shape[1], ROWS)):
        tile = ct.load(
            parts, (WHICH, at, ct.bid(0)), (1, ROWS, COLS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False
        )
        total = total + ct.reshape(tile, (ROWS, COLS))
    ct.store(gradient, (ct.bid(0),), ct.astype(ct.sum(total, 0), gradient.dtype), allow_tma=False)
