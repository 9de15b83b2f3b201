"""cuTile kernel of the Gated DeltaNet forward: the scan over the chunks that `_gdn_chunks_cutile` prepared."""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._gdn_chunks_cutile import LOG2_E, C, load_column, load_last, power, wide

Static = ct.Constant


def _load_chunk(array, at, head, part, WIDTH):
    """(C, WIDTH) of a chunk of one head; latency 1 keeps one more buffer, and products in flight, apart from it."""
    index, shape = (at, head, part), (C, 1, WIDTH)
    return ct.reshape(ct.load(array, index, shape, padding_mode=ct.PaddingMode.ZERO, latency=1), (C, WIDTH))


def _load_prepared(array, slot, head, WIDTH):
    return ct.reshape(ct.load(array, (slot, head, 0, 0), (1, 1, C, WIDTH), latency=1), (C, WIDTH))


def _product(x, y):
    """Into an accumulator of its own: one that holds a scaled tile makes tileiras 13.4 wait for each instruction."""
    return ct.mma(x, y, ct.zeros((x.shape[0], y.shape[1]), ct.float32))


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
    gates,
    rates,
    attention,
    update,
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
    POOL: Static[bool],
    EVERY: Static[int],
):
    """Block (part of V columns, head, sequence) walks over its sequence and writes its part of the output, of the final
    state if FINAL, and of the state before every EVERY-th chunk but the first if EVERY is not 0.

    The state is (K, V), turned against the arrays' (V, K). K is the key dim rounded up to a power of two.
    """
    part, head, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    begin = ct.astype(ct.gather(cu_seqlens, (sequence,)), ct.int32)
    end = ct.astype(ct.gather(cu_seqlens, (sequence + 1,)), ct.int32)
    slot = ct.gather(first_slot, (sequence,))
    place = sequence
    inside = True
    if INDICES:
        place = ct.gather(indices, (sequence,))
        inside = (place >= 0) & (place < initial.shape[0])
        place = ct.where(inside, place, 0)
    state = ct.zeros((K, V), ct.float32)
    if INITIAL:
        given = ct.load(initial, (place, head, part, 0), (1, 1, V, K), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        state = wide(ct.transpose(ct.reshape(given, (V, K))))
        if INDICES:
            state = ct.where(inside, state, 0.0)
    if begin < end:
        queries = q.slice(axis=0, start=begin, stop=end)
        keys = k.slice(axis=0, start=begin, stop=end)
        values = v.slice(axis=0, start=begin, stop=end)
        outputs = output.slice(axis=0, start=begin, stop=end)
        chunks = ct.cdiv(end - begin, C)
        factors = _load_factors(gates, rates, q_norms, k_norms, slot, head, L2NORM)
        for at in range(chunks):
            key = _load_chunk(keys, at, head // K_RATIO, 0, K)
            value = _load_chunk(values, at, head // V_RATIO, part, V)
            change = _load_prepared(update, slot + at, head, K)
            query = _load_chunk(queries, at, head // Q_RATIO, 0, K)
            score = _load_prepared(attention, slot + at, head, C)
            # The next chunk's, so that nothing waits for them.
            next_slot = slot + ct.minimum(at + 1, chunks - 1)
            ahead = _load_factors(gates, rates, q_norms, k_norms, next_slot, head, L2NORM)
            rate = factors[0]
            erase = power(factors[1] * LOG2_E)
            read = erase * SCALE
            if L2NORM:
                read = read * factors[3]
                erase = erase * factors[4]
            low = ct.astype(state, k.dtype)
            wanted = ct.astype((wide(value) - _product(key, low) * erase) * rate, k.dtype)
            state = state * power(factors[2] * LOG2_E) + _product(ct.transpose(change), wanted)
            made = _product(query, low) * read + _product(score, wanted)
            made = ct.reshape(ct.astype(made, output.dtype), (C, 1, V))
            ct.store(outputs, (at, head, part), made, allow_tma=False)
            factors = ahead
    if FINAL:
        turned = ct.reshape(ct.astype(ct.transpose(state), final.dtype), (1, 1, V, K))
        ct.store(final, (sequence, head, part, 0), turned)
