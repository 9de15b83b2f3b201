"""The cuTile kernel of gated delta rules token by token, for sequences of a few tokens: it moves each state once."""

from __future__ import annotations

import cuda.tile as ct

from cudnn_jax.engines.linear_attention._kda_chunks_cutile import log_gates
from cudnn_jax.engines.linear_attention._tiles_cutile import rows_of, strength, wide

Static = ct.Constant

_CLEARED = 16
"""Rows of the output that are cleared at a time."""


def _row(array, token, head, WIDTH):
    """(1, WIDTH) of an array (total, heads, width), float32, 0 past the width."""
    tile = ct.load(array, (token, head, 0), (1, 1, WIDTH), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return wide(ct.reshape(tile, (1, WIDTH)))


def _normalised(row):
    return row * ct.rsqrt(ct.sum(row * row, axis=1, keepdims=True) + 1e-6)


def _pad(CHECK):
    return ct.PaddingMode.ZERO if CHECK else ct.PaddingMode.UNDETERMINED


def _load_state(states, at, head, slice_of_v, ROWS, WIDTH, CHECK):
    tile = ct.load(
        states,
        (at, head, slice_of_v, 0),
        (1, 1, ROWS, WIDTH),
        padding_mode=_pad(CHECK),
        check_bounds=CHECK,
        allow_tma=False,
    )
    return wide(ct.reshape(tile, (ROWS, WIDTH)))


def _store_state(states, at, head, slice_of_v, state, ROWS, WIDTH, CHECK):
    tile = ct.reshape(ct.astype(state, states.dtype), (1, 1, ROWS, WIDTH))
    ct.store(states, (at, head, slice_of_v, 0), tile, check_bounds=CHECK, allow_tma=False)


def _column(array, token, head, part, ROWS):
    """(ROWS, 1) of an array (total, heads, width), float32, 0 past the width."""
    tile = ct.load(array, (token, head, part), (1, 1, ROWS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return wide(ct.reshape(tile, (ROWS, 1)))


def _decay(g, token, head, a_log, dt_bias, WIDTH, CHANNELS, SAFE, A_LOG, DT_BIAS, LINEAR, LOWER):
    """A number, or with CHANNELS (1, WIDTH)."""
    if CHANNELS:
        gate = _row(g, token, head, WIDTH)
        return ct.exp(log_gates(gate, a_log, dt_bias, head, 0, WIDTH, SAFE, A_LOG, DT_BIAS, LINEAR, LOWER))
    gate = wide(ct.gather(g, (token, head)))
    if LINEAR:
        return ct.maximum(gate, 1e-10)
    if SAFE:
        if DT_BIAS:
            gate = gate + wide(ct.gather(dt_bias, (head,)))
        gate = -(ct.maximum(gate, 0.0) + ct.log(1.0 + ct.exp(-ct.abs(gate))))
        if A_LOG:
            gate = gate * ct.exp(wide(ct.gather(a_log, (head,))))
    return ct.exp(gate)


def gdn_recurrent(
    q,
    k,
    v,
    g,
    beta,
    w,
    a_log,
    dt_bias,
    cu_seqlens,
    state_indices,
    initial_state,
    final_state,
    out,
    SEQUENCES: Static[int],
    ROWS: Static[int],
    WIDTH: Static[int],
    Q_RATIO: Static[int],
    K_RATIO: Static[int],
    V_RATIO: Static[int],
    SCALE: Static[float],
    CHANNELS: Static[bool],
    ERASE: Static[bool],
    POOL: Static[bool],
    INITIAL: Static[bool],
    FINAL: Static[bool],
    OVERWRITE: Static[bool],
    L2NORM: Static[bool],
    SIGMOID: Static[bool],
    DOUBLE: Static[bool],
    SAFE: Static[bool],
    A_LOG: Static[bool],
    DT_BIAS: Static[bool],
    LINEAR: Static[bool],
    LOWER: Static[float],
    CHECK: Static[bool],
):
    """Block (slice of V, head, sequence) runs ROWS rows of one state through its sequence's tokens.

    The blocks of sequence SEQUENCES clear the rows of `out` that belong to none. WIDTH is the key dim rounded up to a
    power of two. With CHANNELS, g (total, HO, K) has a gate for each key channel; with ERASE, so has beta, and w
    (total, HO, V) multiplies the values. With OVERWRITE `final_state` is `initial_state`, and that is read through it.
    """
    slice_of_v, head, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    if sequence == SEQUENCES:
        end = ct.astype(ct.gather(cu_seqlens, (SEQUENCES,)), ct.int32)
        left = out.shape[0] - end
        if left > 0:
            rows = rows_of(out, end, end + left)
            for tile in range(ct.cdiv(left, _CLEARED)):
                ct.store(rows, (tile, head, slice_of_v), ct.zeros((_CLEARED, 1, ROWS), out.dtype), allow_tma=False)
    else:
        first = ct.astype(ct.gather(cu_seqlens, (sequence,)), ct.int32)
        last = ct.astype(ct.gather(cu_seqlens, (sequence + 1,)), ct.int32)
        at = ct.gather(state_indices, (sequence,)) if POOL else sequence
        known = True
        if POOL:
            states = final_state if OVERWRITE else initial_state
            known = (at >= 0) & (at < states.shape[0])
        state = ct.zeros((ROWS, WIDTH), ct.float32)
        if INITIAL:
            if known:
                state = _load_state(
                    final_state if OVERWRITE else initial_state, at, head, slice_of_v, ROWS, WIDTH, CHECK
                )
        for token in range(first, last):
            key = _row(k, token, head // K_RATIO, WIDTH)
            query = _row(q, token, head // Q_RATIO, WIDTH)
            if L2NORM:
                key, query = _normalised(key), _normalised(query)
            value = _column(v, token, head // V_RATIO, slice_of_v, ROWS)
            rate = _row(beta, token, head, WIDTH) if ERASE else wide(ct.gather(beta, (token, head)))
            if SIGMOID:
                rate = strength(rate, DOUBLE)
            erase = key * rate if ERASE else key
            decay = _decay(g, token, head, a_log, dt_bias, WIDTH, CHANNELS, SAFE, A_LOG, DT_BIAS, LINEAR, LOWER)
            # Both sums are of the old state, so that neither waits for the other.
            if CHANNELS:
                read = ct.sum(state * (erase * decay), axis=1, keepdims=True)
                kept = ct.sum(state * (query * decay), axis=1, keepdims=True)
            else:
                read = ct.sum(state * erase, axis=1, keepdims=True) * decay
                kept = ct.sum(state * query, axis=1, keepdims=True) * decay
            if ERASE:
                written = value * _column(w, token, head, slice_of_v, ROWS) - read
            else:
                written = (value - read) * rate
            state = state * decay + written * key
            made = (kept + written * ct.sum(key * query, axis=1, keepdims=True)) * SCALE
            ct.store(
                out,
                (token, head, slice_of_v),
                ct.reshape(ct.astype(made, out.dtype), (1, 1, ROWS)),
                allow_tma=False,
            )
        if FINAL:
            if OVERWRITE:
                if known and last > first:
                    _store_state(final_state, at, head, slice_of_v, state, ROWS, WIDTH, CHECK)
            else:
                _store_state(final_state, sequence, head, slice_of_v, state, ROWS, WIDTH, CHECK)
