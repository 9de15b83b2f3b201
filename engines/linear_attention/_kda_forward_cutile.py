"""cuTile kernel of Kimi Delta Attention's forward: the scan over the chunks that `_kda_chunks_cutile` prepared."""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._gdn_forward_cutile import load_start, store_final, store_state
from cudnn_jax.engines.linear_attention._tiles_cutile import C, load_rows, product, rows_of, wide

Static = ct.Constant


def _load_tile(array, slot, head, WIDTH, LATENCY):
    """(C, WIDTH) of an array (slots, heads, C, dim)."""
    tile = ct.load(array, (slot, head, 0, 0), (1, 1, C, WIDTH), padding_mode=ct.PaddingMode.ZERO, latency=LATENCY)
    return ct.reshape(tile, (C, WIDTH))


def _load_decay(decay, slot, head, K):
    """(K, 1): not a reshaped row, which is loaded once and moved between threads."""
    tile = ct.load(
        decay, (0, 0, head, slot), (K, 1, 1, 1), order=(3, 2, 1, 0), padding_mode=ct.PaddingMode.ZERO, allow_tma=False
    )
    return ct.reshape(tile, (K, 1))


def kda_scan(
    v,
    w,
    cu_seqlens,
    first_slot,
    order,
    inverse,
    attention,
    erase,
    read,
    keep,
    decay,
    initial,
    indices,
    output,
    final,
    checkpoints,
    first_checkpoint,
    K: Static[int],
    V: Static[int],
    V_RATIO: Static[int],
    WRITE: Static[bool],
    INITIAL: Static[bool],
    INDICES: Static[bool],
    FINAL: Static[bool],
    OVERWRITE: Static[bool],
    EVERY: Static[int],
    LATENCY: Static[int],
    ORDER: Static[bool],
):
    """Block (part of V columns, head, sequence) walks over its sequence's chunks and writes its part of the output.

    The order and the states are those of `gdn_scan`. With WRITE, `w` (total, HO, V) multiplies the values.
    """
    part, head, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    if ORDER:
        sequence = ct.gather(order, (sequence,))
    begin, end = ct.gather(cu_seqlens, (sequence,)), ct.gather(cu_seqlens, (sequence + 1,))
    slot = ct.gather(first_slot, (sequence,))
    place, known, state = load_start(initial, final, indices, sequence, head, part, K, V, INITIAL, INDICES, OVERWRITE)
    if begin < end:
        values, outputs = rows_of(v, begin, end), rows_of(output, begin, end)
        if WRITE:
            writes = rows_of(w, begin, end)
        chunks = ct.astype((end - begin + (C - 1)) // C, ct.int32)
        if EVERY:
            kept = ct.gather(first_checkpoint, (sequence,)) - 1
        decays = _load_decay(decay, slot, head, K)
        for at in range(chunks):
            if EVERY:
                if (at > 0) & (at % EVERY == 0):
                    store_state(checkpoints, kept + at // EVERY, head, part, state, K, V)
            erasing = _load_tile(erase, slot + at, head, K, LATENCY)
            value = wide(load_rows(values, at, head // V_RATIO, part, V, LATENCY))
            if WRITE:
                value = value * wide(load_rows(writes, at, head, part, V, LATENCY))
            solve = _load_tile(inverse, slot + at, head, C, LATENCY)
            keeping = _load_tile(keep, slot + at, head, K, LATENCY)
            reading = _load_tile(read, slot + at, head, K, LATENCY)
            score = _load_tile(attention, slot + at, head, C, LATENCY)
            # The next chunk's, so that nothing waits for them.
            ahead = _load_decay(decay, slot + ct.minimum(at + 1, chunks - 1), head, K)
            low = ct.astype(state, erase.dtype)
            wanted = ct.astype(value - product(erasing, low), erase.dtype)
            written = ct.astype(product(solve, wanted), erase.dtype)
            state = state * decays + product(ct.transpose(keeping), written)
            made = ct.mma(score, written, product(reading, low))
            ct.store(outputs, (at, head, part), ct.reshape(ct.astype(made, output.dtype), (C, 1, V)), allow_tma=False)
            decays = ahead
    if FINAL:
        store_final(final, sequence, place, known, head, part, state, K, V, OVERWRITE)
