"""`python -m benchmarks gdn_reference`: the reference engine of Gated DeltaNet on a CPU, beside the step formula.

The step formula is one token after another under `jax.lax.scan`, and its gradient autodiff's. Its forward has
the states in the cache and is no slow thing on a CPU: three products of a matrix and a vector a token, which the first
lines set against the rate of a large product of matrices. No engine goes below that; in chunks of 32 there is about
twice as much to multiply, in matrices that a CPU multiplies at half that rate. The gradient by autodiff keeps every
token's state, 400 MB of them at the sizes here, and that is where chunks win.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import jax
import jax.numpy as jnp

import cudnn_jax
from benchmarks import harness

Array = jax.Array


def step_formula(q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
    """o (T, H, V) of one sequence, q and k (T, H, K), v (T, H, V), g and beta (T, H)."""

    def token(state: Array, row: Any) -> tuple[Array, Array]:
        q, k, v, g, beta = row
        state = jnp.exp(g)[:, None, None] * state
        rest = v - jnp.einsum("hvk,hk->hv", state, k)
        state += (beta[:, None] * rest)[:, :, None] * k[:, None, :]
        return state, q.shape[-1] ** -0.5 * jnp.einsum("hvk,hk->hv", state, q)

    start = jnp.zeros((q.shape[1], v.shape[2], q.shape[2]))
    return jax.lax.scan(token, start, (q, k, v, g, beta))[1]


def reference(*tokens: Array) -> Array:
    out: Array = cudnn_jax.gdn(*(x[None] for x in tokens), implementation="xla")[0][0]
    return out


def operands(length: int, heads: int, width: int) -> list[Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (length, heads, width)) for key in keys[:3])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g, beta = (jax.random.uniform(key, (length, heads)) for key in keys[3:])
    return [q, k, v, -0.2 * g, beta]


def floor(length: int, heads: int, width: int) -> tuple[float, float]:
    """(GFLOP/s of a large product of matrices, the milliseconds that the forward's own products take at that rate)."""
    size = 1024
    square = [jnp.ones((size, size))] * 2
    compiled, _ = harness.compile_all({"product": jnp.matmul}, square, threads=1)
    ms = harness.interleave(compiled, square, harness.Effort(rounds=9), seed=0)["product"].ms
    rate = 2 * size**3 / ms * 1e-6
    return rate, 6 * length * heads * width**2 / rate * 1e-6


def measure(length: int, heads: int, width: int, rounds: int) -> list[dict[str, Any]]:
    """One row a direction: milliseconds of both, their ratio within a round, and how far their results are apart."""
    given = operands(length, heads, width)
    cotangent = jax.random.normal(jax.random.key(1), given[2].shape)

    def both(fn: Any) -> Any:
        return lambda *tokens: jax.vjp(fn, *tokens)[1](cotangent)

    rows = []
    for direction, made in (("forward", lambda fn: fn), ("forward and backward", both)):
        candidates = {"step formula": made(step_formula), "reference": made(reference)}
        compiled, failed = harness.compile_all(candidates, given, threads=1)
        if failed:
            raise next(iter(failed.values()))
        answers = [jax.tree.leaves(compiled[name](*given)) for name in candidates]
        timings = harness.interleave(compiled, given, harness.Effort(rounds=rounds), seed=0)
        ratio, spread = timings["reference"].ratio_to(timings["step formula"])
        rows.append(
            {
                "what": direction,
                **{f"{name} ms": round(timings[name].ms, 2) for name in candidates},
                "step formula over reference": round(ratio, 2),
                "spread": round(spread, 2),
                "error": max(harness.relative_error(*pair) for pair in zip(*answers, strict=True)),
            }
        )
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gdn_reference", description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="K and V")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    if jax.default_backend() != "cpu":
        parser.error("the figures are a CPU's: set JAX_PLATFORMS=cpu")
    print(f"T {args.length}, {args.heads} heads, K = V = {args.width}, {os.cpu_count()} cores")
    rate, least = floor(args.length, args.heads, args.width)
    print(f"a large product: {rate:.0f} GFLOP/s, at which the forward's own products take {least:.2f} ms")
    for row in measure(args.length, args.heads, args.width, args.rounds):
        print(json.dumps(row))
    return 0
