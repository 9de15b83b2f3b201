"""Attention with every option of the graph's operation, written out densely in float64 NumPy. Nothing here imports JAX.

Arrays have a graph's axes, (B, N, T, D). What an option does to the logits is an array over (B, N, T, S).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Answer:
    """Results by the names of the operation's outputs."""

    named: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.named[name]


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float = 1.0,
    added: Array | float = 0.0,
    keep: Array | bool = True,
    rows: Array | bool = True,
    sink: Array | None = None,
    weight: Array | float = 1.0,
    d_o: Array | None = None,
    d_stats: Array | None = None,
) -> Answer:
    """Everything that the forward gives and, with a cotangent `d_o`, the backward.

    Args:
      added: to the scaled logits.
      keep: which logits count.
      rows: (B, 1, T, 1), the rows that exist.
      sink: (1, N, 1, 1).
      weight: what the probabilities are multiplied with after the softmax: a dropout.
      d_stats: the cotangent of the logsumexp.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    shape = (*q.shape[:3], k.shape[2])
    keep = np.broadcast_to(keep, shape) & rows
    s = np.where(keep, scale * q @ wide_k.swapaxes(2, 3) + np.where(keep, added, 0), -np.inf)
    one = np.where(rows, -np.inf if sink is None else np.asarray(sink, np.float64), -np.inf)
    one = np.broadcast_to(one, (*shape[:3], 1))
    whole = np.concatenate([s, one], axis=3)
    most = whole.max(axis=3, keepdims=True)
    some = most > -np.inf
    e = np.exp(whole - np.where(some, most, 0))
    total = e.sum(axis=3, keepdims=True)
    p_all = e / np.where(some, total, 1)
    p = p_all[..., :-1]
    with np.errstate(divide="ignore"):
        stats = np.where(some, most + np.log(total), -np.inf)
    made = {"O": (p * weight) @ wide_v, "Stats": stats, "score_max": most, "score_sum_exp": total}
    made["rng_dump"] = np.ones(shape)
    if d_o is not None:
        d_o = np.where(rows, np.asarray(d_o, np.float64), 0)
        d_p = weight * (d_o @ wide_v.swapaxes(2, 3))
        pull = (p * d_p).sum(axis=3, keepdims=True) - (0 if d_stats is None else np.where(rows, d_stats, 0))
        d_s = p * (d_p - pull)

        def folded(x: Array) -> Array:
            return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)

        made |= {
            "dQ": scale * d_s @ wide_k,
            "dK": folded(scale * d_s.swapaxes(2, 3) @ q),
            "dV": folded((p * weight).swapaxes(2, 3) @ d_o),
            "dBias": d_s,
            "dSink_token": -(p_all[..., -1:] * pull).sum(axis=(0, 2), keepdims=True),
        }
    return Answer(made)


def alibi(heads: int, t: int, s: int) -> Array:
    """(1, N, T, S). The slopes of 2 ** k heads are a geometric series; others are every second one of twice as many."""

    def series(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    near = 2 ** (heads.bit_length() - 1)
    slopes = np.array(series(near) + series(2 * near)[::2][: heads - near])
    return slopes[None, :, None, None] * (np.arange(s)[None, :] - np.arange(t)[:, None])


def within(lengths: Array, longest: int) -> Array:
    """(B, longest): the positions inside of each length."""
    return np.arange(longest) < np.asarray(lengths).reshape(-1, 1)
