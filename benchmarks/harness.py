"""The candidates of a comparison compiled and timed in turns, and the ceilings measured beside them.

A candidate is a name and a function. All candidates of a comparison take the same arguments; each is compiled once,
checked against a reference on poisoned memory, then timed in turns, so that drifts of clock and temperature fall on all
alike and a ratio is taken within a round.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax import _measure
from cudnn_jax._measure import Effort, Function, Timing, one_line, poison, relative_error, wall_ms

__all__ = ["Effort", "Function", "Timing", "one_line", "poison", "relative_error", "wall_ms"]


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best, measured in this run."""

    copy_gb_s: float
    matmul_tflop_s: float

    def roofline_ms(self, flops: float, nbytes: float) -> float:
        return max(flops / (self.matmul_tflop_s * 1e9), nbytes / (self.copy_gb_s * 1e6))


def compile_all(
    candidates: Mapping[str, Function], arguments: Sequence[Any], threads: int
) -> tuple[dict[str, Function], dict[str, BaseException]]:
    """Compiles each candidate; returns the compiled ones and, by name, what stopped the others."""

    def build(fn: Function) -> Function:
        return jax.jit(fn).lower(*arguments).compile()

    with ThreadPoolExecutor(max_workers=threads) as pool:
        futures = {name: pool.submit(build, fn) for name, fn in candidates.items()}
    errors = {name: future.exception() for name, future in futures.items()}
    compiled = {name: future.result() for name, future in futures.items() if errors[name] is None}
    return compiled, {name: error for name, error in errors.items() if error is not None}


def interleave(
    compiled: Mapping[str, Function], arguments: Sequence[Any], effort: Effort, seed: int
) -> dict[str, Timing]:
    """Times all candidates in turns, in a fresh random order each round."""
    rng = np.random.default_rng(seed)
    orders = (rng.permutation(list(compiled)) for _ in range(effort.rounds))
    return _measure.interleave(compiled, arguments, effort, orders)


def measure_ceilings(quick: bool) -> Ceilings:
    """Copy bandwidth (bytes read plus written) and the bfloat16 matrix product rate."""
    megabytes, side = (16, 256) if quick else (2048, 8192)
    words = jax.random.normal(jax.random.key(0), (megabytes << 18,), jnp.float32)
    left, right = jax.random.normal(jax.random.key(1), (2, side, side), jnp.bfloat16)
    copy, product = jax.jit(lambda x: x * 1.5), jax.jit(jnp.matmul)
    repeats, calls = (3, 3) if quick else (10, 10)
    for fn, arguments in ((copy, (words,)), (product, (left, right))):
        wall_ms(fn, arguments, 3)
    copy_ms = np.median([wall_ms(copy, (words,), calls) for _ in range(repeats)])
    product_ms = np.median([wall_ms(product, (left, right), calls) for _ in range(repeats)])
    return Ceilings(float(2 * words.nbytes / copy_ms / 1e6), float(2 * side**3 / product_ms / 1e9))


def handler_time(fn: Function, arguments: Sequence[Any], calls: int, rounds: int) -> Timing | None:
    """Milliseconds that the host spends in our handler per execution, by its own counters; None if it never ran."""
    from cudnn_jax import _ffi

    jax.block_until_ready(fn(*arguments))
    values = []
    for _ in range(rounds):
        before = _ffi.counters()
        for _ in range(calls):
            out = fn(*arguments)
        jax.block_until_ready(out)
        after = _ffi.counters()
        executions = after["executions"] - before["executions"]
        if not executions:
            return None
        values.append((after["handler_ns"] - before["handler_ns"]) / executions / 1e6)
    return Timing(np.asarray(values))


def free_memory() -> None:
    """Collects the compiled programs of a finished case, which sit in reference cycles, and what they hold."""
    gc.collect()
