"""Attention written out densely in float64 NumPy, with the gradients of its definition. Nothing here imports JAX.

Everything has a user's axis order: query (B, T, N, D), key (B, S, NK, D), value (B, S, NK, DV), output (B, T, N, DV),
logsumexp (B, T, N). Padding may hold NaN: entries past a length are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Answer:
    """What attention gives. The gradients are None where no cotangent was given."""

    o: np.ndarray
    lse: np.ndarray
    d_query: np.ndarray | None = None
    d_key: np.ndarray | None = None
    d_value: np.ndarray | None = None
    d_bias: np.ndarray | None = None


def visible(t, s, *, left=None, right=None, alignment="top_left", q_length=None, kv_length=None):
    """(T, S) booleans for one sequence: key j counts for query i."""
    q_length = t if q_length is None else q_length
    kv_length = s if kv_length is None else kv_length
    seen = np.zeros((t, s), bool)
    shift = kv_length - q_length if alignment == "bottom_right" else 0
    for i in range(q_length):
        low = 0 if left is None else max(i + shift - left, 0)
        high = kv_length if right is None else min(i + shift + right + 1, kv_length)
        if high > low:
            seen[i, low:high] = True
    return seen


def attention(
    query, key, value, bias=None, mask=None, *, scale=None, left=None, right=None, alignment="top_left",
    q_lengths=None, kv_lengths=None, d_o=None, d_lse=None,
) -> Answer:  # fmt: skip
    """The output and logsumexp and, given a cotangent `d_o` (and maybe `d_lse`), all gradients."""
    b, t, n, d = query.shape
    s, nk, dv = key.shape[1], key.shape[2], value.shape[3]
    scale = d**-0.5 if scale is None else scale
    out, lse = np.zeros((b, t, n, dv)), np.full((b, t, n), -np.inf)
    d_query, d_key, d_value = np.zeros((b, t, n, d)), np.zeros((b, s, nk, d)), np.zeros((b, s, nk, dv))
    d_bias = None if bias is None else np.zeros(bias.shape)
    for ib in range(b):
        q_length = t if q_lengths is None else int(q_lengths[ib])
        kv_length = s if kv_lengths is None else int(kv_lengths[ib])
        seen = visible(t, s, left=left, right=right, alignment=alignment, q_length=q_length, kv_length=kv_length)
        for head in range(n):
            kv_head = head // (n // nk)
            q, k, v = (np.zeros(x.shape) for x in (query[ib, :, 0], key[ib, :, 0], value[ib, :, 0]))
            q[:q_length] = query[ib, :q_length, head]
            k[:kv_length] = key[ib, :kv_length, kv_head]
            v[:kv_length] = value[ib, :kv_length, kv_head]
            keep = seen if mask is None else seen & _plane(mask, ib, head, t, s)
            logits = scale * (q @ k.T)
            if bias is not None:
                logits = np.where(keep, logits + np.where(keep, _plane(bias, ib, head, t, s), 0), 0)
            logits = np.where(keep, logits, -np.inf)
            some = keep.any(axis=1)
            top = np.where(some, logits.max(axis=1, initial=-np.inf), 0)
            weight = np.exp(logits - top[:, None])
            total = np.where(some, weight.sum(axis=1), 1)
            p = weight / total[:, None]
            out[ib, :, head] = p @ v
            lse[ib, :, head] = np.where(some, top + np.log(total), -np.inf)
            if d_o is None:
                continue
            go = np.zeros((t, dv))
            go[:q_length] = d_o[ib, :q_length, head]
            d_p = go @ v.T
            d_s = p * (d_p - (p * d_p).sum(axis=1, keepdims=True))
            if d_lse is not None:
                d_s += p * np.where(some, d_lse[ib, :, head], 0)[:, None]
            d_query[ib, :, head] = scale * (d_s @ k)
            d_key[ib, :, kv_head] += scale * (d_s.T @ q)
            d_value[ib, :, kv_head] += p.T @ go
            if bias is not None:
                _add_plane(d_bias, d_s, ib, head)
    return Answer(out, lse) if d_o is None else Answer(out, lse, d_query, d_key, d_value, d_bias)


def _plane(array, batch, head, t, s):
    b, n = array.shape[:2]
    return np.broadcast_to(array[batch if b > 1 else 0, head if n > 1 else 0], (t, s))


def _add_plane(total, d_s, batch, head):
    b, n, t, s = total.shape
    if t == 1:
        d_s = d_s.sum(axis=0, keepdims=True)
    if s == 1:
        d_s = d_s.sum(axis=1, keepdims=True)
    total[batch if b > 1 else 0, head if n > 1 else 0] += d_s


def distance(actual, expected, scale=1.0) -> float:
    """||x - y|| / max(||y||, 1e-2 of the norm of an array of this size whose entries are about `scale`)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    floor = 1e-2 * scale * np.sqrt(expected.size)
    difference = np.linalg.norm((actual - expected).ravel())
    return float(difference / max(np.linalg.norm(expected.ravel()), floor)) if expected.size else 0.0
