"""Attention of float8 tensors in float64, one batch and head after the other; the oracle of its reference.

S = attn_scale * (descale_q q)(descale_k k)^T + bias, P = softmax(S) with the sink's logit, O = P (descale_v v). P and,
in the backward, dS are quantised inside: P times scale_s in q's type, dS times scale_dP in dO's. Outputs in float8 are
the results times their scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Inside = Callable[[Array], Array]

B, N, T, D = 2, 4, 128, 128
ATTN_SCALE = 0.125
QUANTISED = ("O", "dQ", "dK", "dV")
TOLERANCE = 6e-2
"""Of the norm of a result: float8_e4m3fn has 3 bits behind the leading one, and rounds inside and at the end."""
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)


def largest(kind: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(kind).max)


def rounded(array: Any, kind: np.dtype[Any] = E4M3) -> Array:
    """Numbers of the type, in float64: the nearest, of two the even one, or the largest that it has.

    Written out: ml_dtypes brings float64 to float32 before, which rounds twice.
    """
    numbers = ml_dtypes.finfo(kind)
    x = np.clip(np.asarray(array, np.float64), -largest(kind), largest(kind))
    exponent = np.maximum(np.frexp(x)[1] - 1, numbers.minexp)
    quantum = 2.0 ** (exponent - numbers.nmant)
    return np.asarray(np.rint(x / quantum) * quantum)


def exact(array: Array) -> Array:
    return array


def fitting(array: Array, kind: np.dtype[Any] = E4M3) -> np.float64:
    """A power of two that brings the largest magnitude to between a quarter and a half of the type's."""
    return np.float64(2.0 ** np.floor(np.log2(largest(kind) / 2 / np.abs(array).max())))


def _softmax(logits: Array, sink: Array) -> tuple[Array, Array]:
    """The softmax of each row and its logsumexp; a row of -inf is 0, and its logsumexp -inf."""
    top = np.maximum(logits.max(-1, keepdims=True, initial=-np.inf), sink)
    powers, extra = (np.exp(x - np.where(top == -np.inf, 0, top)) for x in (logits, sink))
    total = powers.sum(-1, keepdims=True) + extra
    with np.errstate(divide="ignore"):
        return powers / np.where(total == 0, 1, total), np.where(top == -np.inf, -np.inf, top) + np.log(total)


class _Head:
    """One batch and query head: its descaled operands, 0 where `rows` and `keep` have nothing, and its logits."""

    def __init__(self, given: Arrays, b: int, n: int, keep: Array | None, rows: Array | None) -> None:
        self.group = given["q"].shape[1] // given["k"].shape[1]
        self.at, self.kv = (b, n), (b, n // self.group)
        q, k, v = given["q"][self.at], given["k"][self.kv], given["v"][self.kv]
        seen = np.ones((len(q), len(k)), bool) if keep is None else keep[b]
        self.rows = (seen.any(1) if rows is None else rows[b])[:, None]
        keys = seen.any(0)[:, None]
        self.q = np.where(self.rows, q, 0) * given["descale_q"]
        self.k, self.v = (np.where(keys, x, 0) * given[f"descale_{name}"] for name, x in (("k", k), ("v", v)))
        bias = 0
        if "bias" in given:
            bias = np.broadcast_to(given["bias"], (*given["q"].shape[:2], *seen.shape))[self.at]
        self.logits = np.where(seen, given.get("attn_scale", ATTN_SCALE) * (self.q @ self.k.T) + bias, -np.inf)
        self.sink = np.where(self.rows, given["sink_token"][0, n] if "sink_token" in given else -np.inf, -np.inf)


def _heads(given: Arrays, keep: Array | None, rows: Array | None) -> list[_Head]:
    batch, heads = given["q"].shape[:2]
    return [_Head(given, b, n, keep, rows) for b in range(batch) for n in range(heads)]


def forward(given: Arrays, inside: Inside = exact, keep: Array | None = None, rows: Array | None = None) -> Arrays:
    """The results by port; `inside` rounds what is quantised inside.

    `keep` (B, T, S) is which keys a row sees, and `rows` (B, T) which rows there are: those that see any if None.
    """
    batch, heads, length, _ = given["q"].shape
    out, stats = np.zeros((batch, heads, length, given["v"].shape[3])), np.zeros((batch, heads, length, 1))
    amax = 0.0
    for head in _heads(given, keep, rows):
        p, lse = _softmax(head.logits, head.sink)
        out[head.at] = inside(p * given["scale_s"]) * given["descale_s"] @ head.v
        stats[head.at] = lse
        amax = max(amax, p.max(initial=0))
    return {"O": out * given["scale_o"], "Stats": stats, "Amax_S": np.float64(amax), "Amax_O": np.abs(out).max()}


def backward(
    given: Arrays, inside: Inside = exact, keep: Array | None = None, inside_gradient: Inside | None = None
) -> Arrays:
    """The results by port, of the forward's own o and stats; `inside_gradient` rounds dS, otherwise `inside`."""
    made = {f"d{name.upper()}": np.zeros(given[name].shape) for name in "qkv"}
    sinks, amax = np.zeros((1, given["q"].shape[1], 1, 1)), 0.0
    for head in _heads(given, keep, None):
        o, d_o = (np.where(head.rows, given[name][head.at], 0) * given[f"descale_{name}"] for name in ("o", "dO"))
        stats = np.where(head.rows, given["stats"][head.at], np.inf)
        pull = (d_o * o).sum(-1, keepdims=True)
        p = np.exp(head.logits - stats)
        d_s = p * (d_o @ head.v.T - pull) * given.get("attn_scale", ATTN_SCALE)
        narrow = (inside_gradient or inside)(d_s * given["scale_dP"]) * given["descale_dP"]
        made["dQ"][head.at] = narrow @ head.k
        made["dK"][head.kv] += narrow.T @ head.q
        made["dV"][head.kv] += (inside(p * given["scale_s"]) * given["descale_s"]).T @ d_o
        sinks[0, head.at[1]] -= (np.exp(head.sink - stats) * pull).sum()
        amax = max(amax, np.abs(d_s).max(initial=0))
    results = {name: array * given[f"scale_{name}"] for name, array in made.items()}
    results |= {f"amax_{name}": np.abs(array).max() for name, array in made.items()}
    results |= {"amax_dP": np.float64(amax)}
    return results | ({"dSink_token": sinks} if "sink_token" in given else {})


def _number(rng: np.random.Generator) -> np.float64:
    """One that float32 holds."""
    return np.float64(np.float32(rng.uniform(0.5, 1.5)))


def drawn(rng: np.random.Generator) -> Arrays:
    """Operands of the forward by port, in float64: numbers that float8 and float32 hold, and scales that fit."""
    given: Arrays = {name: rounded(rng.standard_normal((B, N, T, D))) for name in "qkv"}
    given |= {f"descale_{name}": _number(rng) for name in "qkv"}
    given |= {"scale_s": np.float64(256), "descale_s": np.float64(1 / 256), "scale_o": np.float64(1)}
    given["scale_o"] = fitting(forward(given)["O"])
    return given


def drawn_backward(rng: np.random.Generator) -> Arrays:
    """Operands of the backward by port, with the forward's results among them."""
    given = drawn(rng)
    made = forward(given)
    given |= {"o": rounded(made["O"]), "descale_o": 1 / given["scale_o"], "stats": made["Stats"]}
    given |= {"dO": rounded(rng.standard_normal((B, N, T, D))), "descale_dO": np.float64(np.float32(0.75))}
    given |= {name: np.float64(1) for name in ("scale_dQ", "scale_dK", "scale_dV", "scale_dP", "descale_dP")}
    most = backward(given)
    given |= {f"scale_{name}": fitting(most[f"amax_{name}"]) for name in ("dQ", "dK", "dV", "dP")}
    return given | {"descale_dP": 1 / given["scale_dP"]}
