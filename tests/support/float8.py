"""Attention of float8 tensors in float64, as cuDNN's kernels compute it but for the rounding inside of them.

S = attn_scale * (descale_q q)(descale_k k)^T, P = softmax(S), O = P (descale_v v). P and, in the backward, dS are
quantised inside: P times scale_s, dS times scale_dP. Outputs in float8 are the results times their scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]

B, N, T, D = 2, 4, 128, 128
ATTN_SCALE = 0.125
QUANTISED = ("O", "dQ", "dK", "dV")
TOLERANCE = 6e-2
"""Of the norm of a result: float8_e4m3fn has 3 bits behind the leading one, and rounds inside and at the end."""
LARGEST = 448.0
"""Of float8_e4m3fn."""


def _softmax(logits: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    top = logits.max(-1, keepdims=True)
    powers = np.exp(logits - top)
    total = powers.sum(-1, keepdims=True)
    return powers / total, top + np.log(total)


def _rounded(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import ml_dtypes

    return np.asarray(array).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _fitting(array: np.ndarray[Any, Any]) -> float:
    """A power of two that brings the largest magnitude to between a quarter and a half of float8's."""
    return float(2.0 ** np.floor(np.log2(LARGEST / 2 / np.abs(array).max())))


def forward(given: Arrays, inside: Any = lambda array: array) -> Arrays:
    """The results by port; `inside` rounds what is quantised inside."""
    q, k, v = (given[name] * given[f"descale_{name}"] for name in "qkv")
    p, stats = _softmax(ATTN_SCALE * q @ k.swapaxes(-1, -2))
    out = inside(p * given["scale_s"]) * given["descale_s"] @ v
    return {
        "O": out * given["scale_o"],
        "Stats": stats,
        "Amax_S": np.abs(p).max(),
        "Amax_O": np.abs(out).max(),
    }


def backward(given: Arrays, inside: Any = lambda array: array) -> Arrays:
    """The results by port, of the forward's own o and stats."""
    q, k, v, o, d_o = (given[name] * given[f"descale_{name}"] for name in ("q", "k", "v", "o", "dO"))
    p = np.exp(ATTN_SCALE * q @ k.swapaxes(-1, -2) - given["stats"])
    d_v = (inside(p * given["scale_s"]) * given["descale_s"]).swapaxes(-1, -2) @ d_o
    d_p = p * (d_o @ v.swapaxes(-1, -2) - (d_o * o).sum(-1, keepdims=True)) * ATTN_SCALE
    d_s = inside(d_p * given["scale_dP"]) * given["descale_dP"]
    made = {"dQ": d_s @ k, "dK": d_s.swapaxes(-1, -2) @ q, "dV": d_v}
    results = {name: array * given[f"scale_{name}"] for name, array in made.items()}
    return results | {f"amax_{name}": np.abs(array).max() for name, array in (made | {"dP": d_p}).items()}


def drawn(rng: np.random.Generator) -> Arrays:
    """Operands of the forward by port, in float64: numbers that float8 and float32 hold, and scales that fit."""
    given: Arrays = {name: _rounded(rng.standard_normal((B, N, T, D))) for name in "qkv"}
    given |= {f"descale_{name}": np.float64(np.float32(rng.uniform(0.5, 1.5))) for name in "qkv"}
    given |= {"scale_s": np.float64(256), "descale_s": np.float64(1 / 256), "scale_o": np.float64(1)}
    given["scale_o"] = np.float64(_fitting(forward(given)["O"]))
    return given


def drawn_backward(rng: np.random.Generator) -> Arrays:
    """Operands of the backward by port, with the forward's results among them."""
    given = drawn(rng)
    made = forward(given)
    given |= {"o": _rounded(made["O"]), "descale_o": 1 / given["scale_o"], "stats": made["Stats"]}
    given |= {"dO": _rounded(rng.standard_normal((B, N, T, D))), "descale_dO": np.float64(np.float32(0.75))}
    given |= {name: np.float64(1) for name in ("scale_dQ", "scale_dK", "scale_dV", "scale_dP", "descale_dP")}
    largest = backward(given)
    given |= {f"scale_{name}": np.float64(_fitting(largest[f"amax_{name}"])) for name in ("dQ", "dK", "dV", "dP")}
    return given | {"descale_dP": 1 / given["scale_dP"]}
