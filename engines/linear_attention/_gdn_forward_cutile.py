"""cuTile kernel of the Gated DeltaNet forward: the scan over the chunks that `_gdn_chunks_cutile` prepared."""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._gdn_chunks_cutile import LOG2_E, load_column, load_last, power
from cudnn_jax.engines.linear_attention._tiles_cutile import C, load_rows, product, rows_of, wide

Static = ct.Constant

_TILE = 256
_LATENCY = 1
"""Of the scan's loads: more of it makes room for more chunks ahead, and slower code."""


def _load_square(array, slot, head):
    return ct.reshape(ct.load(array, (slot, head, 0, 0), (1, 1, C, C), latency=_LATENCY), (C, C))


def _load_factors(gates, rates, q_norms, k_norms, slot, head, L2NORM):
    rate, gate, last = load_column(rates, slot, head), load_column(gates, slot, head), load_last(gates, slot, head)
    if L2NORM:
        return rate, gate, last, load_column(q_norms, slot, head), load_column(k_norms, slot, head)
    return rate, gate, last


def gdn_scan(
    q,
    k,
    v,
    cu_seqlens,
    first_slot,
    order,
    gates,
    rates,
    inverse,
    attention,
    q_norms,
    k_norms,
    initial,
    indices,
    output,
    final,
    checkpoints,
    first_checkpoint,
    K: Static[int],
    V: Static[int],
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    V_RATIO: Static[int],
    SCALE: Static[float],
    L2NORM: Static[bool],
    INITIAL: Static[bool],
    INDICES: Static[bool],
    FINAL: Static[bool],
    OVERWRITE: Static[bool],
    EVERY: Static[int],
    ORDER: Static[bool],
    AHEAD: Static[bool],
):
    """Block (part of V columns, head, sequence) walks over its sequence's chunks and writes its part of the output.

    With ORDER the sequence is the one that `order` has in that place.

    With INITIAL it starts from `initial`, the sequence's row or if INDICES the one that `indices` names; from 0 if
    there is no such row. With FINAL it writes the state behind them into the sequence's row of `final`; with EVERY, the
    state before each EVERY-th chunk but the first. With OVERWRITE `final` is `initial`, read through it and written
    where it was read.

    With AHEAD a chunk's factors are loaded while the one before is worked on.

    The state is (K, V), turned against the arrays' (V, K). K is the key dim rounded up to a power of two.
    """
    part, head, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    if ORDER:
        sequence = ct.gather(order, (sequence,))
    begin, end = ct.gather(cu_seqlens, (sequence,)), ct.gather(cu_seqlens, (sequence + 1,))
    slot = ct.gather(first_slot, (sequence,))
    place, known, state = load_start(initial, final, indices, sequence, head, part, K, V, INITIAL, INDICES, OVERWRITE)
    if begin < end:
        queries, keys, values = (rows_of(q, begin, end), rows_of(k, begin, end), rows_of(v, begin, end))
        outputs = rows_of(output, begin, end)
        chunks = ct.astype((end - begin + (C - 1)) // C, ct.int32)
        if EVERY:
            row = ct.gather(first_checkpoint, (sequence,)) - 1
        if AHEAD:
            factors = _load_factors(gates, rates, q_norms, k_norms, slot, head, L2NORM)
        for at in range(chunks):
            if EVERY:
                if (at > 0) & (at % EVERY == 0):
                    store_state(checkpoints, row + at // EVERY, head, part, state, K, V)
            key = load_rows(keys, at, head // K_RATIO, 0, K, _LATENCY)
            value = load_rows(values, at, head // V_RATIO, part, V, _LATENCY)
            solve = _load_square(inverse, slot + at, head)
            query = load_rows(queries, at, head // Q_RATIO, 0, K, _LATENCY)
            score = _load_square(attention, slot + at, head)
            if AHEAD:
                # The next chunk's, so that nothing waits for them.
                next_slot = slot + ct.minimum(at + 1, chunks - 1)
                ahead = _load_factors(gates, rates, q_norms, k_norms, next_slot, head, L2NORM)
            else:
                factors = _load_factors(gates, rates, q_norms, k_norms, slot + at, head, L2NORM)
            gate, last = factors[1] * LOG2_E, factors[2] * LOG2_E
            erase, keep = power(gate), factors[0] * power(last - gate)
            read = erase * SCALE
            if L2NORM:
                read = read * factors[3]
                erase, keep = erase * factors[4], keep * factors[4]
            low = ct.astype(state, k.dtype)
            wanted = wide(value) - product(key, low) * erase
            written = product(solve, ct.astype(wanted, k.dtype))
            left, kept = state * power(last), ct.astype(written * keep, k.dtype)
            # Where a state was loaded, a product that starts from another tile waits for each of its instructions.
            state = left + product(ct.transpose(key), kept) if INITIAL else ct.mma(ct.transpose(key), kept, left)
            made = product(query, low) * read + product(score, ct.astype(written, k.dtype))
            made = ct.reshape(ct.astype(made, output.dtype), (C, 1, V))
            ct.store(outputs, (at, head, part), made, allow_tma=False)
            if AHEAD:
                factors = ahead
    if FINAL:
        store_final(final, sequence, place, known, head, part, state, K, V, OVERWRITE)


def load_start(initial, final, indices, sequence, head, part, K, V, INITIAL, INDICES, OVERWRITE):
    """Where a sequence's state lies in an array (rows, heads, V, K), whether there is such a row, and the state (K, V)
    that it starts from, 0 where there is none."""
    place = ct.gather(indices, (sequence,)) if INDICES else sequence
    states = final if OVERWRITE else initial
    known = (place >= 0) & (place < states.shape[0]) if INDICES else True
    state = ct.zeros((K, V), ct.float32)
    if INITIAL:
        index = (ct.where(known, place, 0) if INDICES else place, head, part, 0)
        given = ct.load(states, index, (1, 1, V, K), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        state = wide(ct.transpose(ct.reshape(given, (V, K))))
        if INDICES:
            state = ct.where(known, state, 0.0)
    return place, known, state


def store_final(final, sequence, place, known, head, part, state, K, V, OVERWRITE):
    """The state behind a sequence, over the one that it started from with OVERWRITE."""
    if OVERWRITE:
        if known:
            store_state(final, place, head, part, state, K, V)
    else:
        store_state(final, sequence, head, part, state, K, V)


def store_state(array, row, head, part, state, K, V):
    turned = ct.reshape(ct.astype(ct.transpose(state), array.dtype), (1, 1, V, K))
    ct.store(array, (row, head, part, 0), turned)


def gdn_checkpoint_rows(cu_seqlens, first_checkpoint, EVERY: Static[int]):
    """Block s writes how many states the sequences before s keep, one after every EVERY tokens short of their end."""
    sequence = ct.bid(0)
    places = ct.arange(_TILE, dtype=ct.int32)
    count = ct.zeros((_TILE,), ct.int32)
    for tile in range(ct.cdiv(sequence, _TILE)):
        at = tile * _TILE + places
        earlier = at < sequence
        start, stop = ct.gather(cu_seqlens, (at,), mask=earlier), ct.gather(cu_seqlens, (at + 1,), mask=earlier)
        length = ct.astype(stop - start, ct.int32)
        count = count + ct.where(earlier & (length > 0), (length - 1) // EVERY, 0)
    ct.scatter(first_checkpoint, (sequence,), ct.sum(count, axis=0))
