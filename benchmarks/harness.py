"""Timing that can be trusted: candidates interleaved in one run, medians, ceilings measured beside them.

A candidate is a name and a function. All candidates of a comparison take the same arguments; each is compiled once,
checked against a reference on poisoned memory, then timed in turns, so that drifts of clock and temperature fall on all
alike and a ratio is taken within a round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[..., Any]


@dataclass(frozen=True)
class Effort:
    """How long a comparison may take.

    Attributes:
      rounds: turns of every candidate; one `slow_factor` times slower than the fastest takes `slow_rounds` only.
      window_ms: calls are queued without waiting until about this long is filled.
      threads: compilations at a time.
    """

    rounds: int = 15
    window_ms: float = 15.0
    slow_factor: float = 10.0
    slow_rounds: int = 4
    threads: int = 6


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best, measured in this run."""

    copy_gb_s: float
    matmul_tflop_s: float

    def roofline_ms(self, flops: float, nbytes: float) -> float:
        return max(flops / (self.matmul_tflop_s * 1e9), nbytes / (self.copy_gb_s * 1e6))


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, one number a round; NaN for a round that was left out."""

    rounds: np.ndarray

    @property
    def ms(self) -> float:
        return float(np.nanmedian(self.rounds))

    @property
    def spread(self) -> float:
        """Half the interquartile range."""
        return half_iqr(self.rounds)

    def ratio_to(self, peer: Timing) -> tuple[float, float]:
        """Median and half interquartile range of peer / self over the rounds that both have."""
        ratios = peer.rounds / self.rounds
        return float(np.nanmedian(ratios)), half_iqr(ratios)


def half_iqr(values: np.ndarray) -> float:
    low, high = np.nanpercentile(values, [25, 75])
    return float(high - low) / 2


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


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


def poison(shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Leaves NaN in free memory of the sizes that results will take, so that an unwritten element shows."""
    held = [jnp.full(x.shape, jnp.nan, x.dtype) for x in shapes]
    jax.block_until_ready(held)
    for x in held:
        x.delete()


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """||got - want|| over the larger of ||want|| and a hundredth of the norm of unit-scale numbers; NaN stays NaN."""
    return float(_relative_error(got, want))


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32).ravel(), want.astype(jnp.float32).ravel()
    return jnp.linalg.norm(got - want) / jnp.maximum(jnp.linalg.norm(want), 1e-2 * want.size**0.5)


def interleave(
    compiled: Mapping[str, Function], arguments: Sequence[Any], effort: Effort, seed: int
) -> dict[str, Timing]:
    """Times all candidates in turns, in a fresh random order each round."""
    estimates = {name: _estimate(fn, arguments, effort.window_ms) for name, fn in compiled.items()}
    fastest = min(estimates.values(), default=0.0)
    calls = {name: int(np.clip(round(effort.window_ms / ms), 1, 200)) for name, ms in estimates.items()}
    slow = {name for name, ms in estimates.items() if ms > effort.slow_factor * fastest}
    rounds = {name: np.full(effort.rounds, np.nan) for name in compiled}
    rng = np.random.default_rng(seed)
    for turn in range(effort.rounds):
        for name in rng.permutation(list(compiled)):
            if name not in slow or turn < effort.slow_rounds:
                rounds[name][turn] = wall_ms(compiled[name], arguments, calls[name])
    return {name: Timing(values) for name, values in rounds.items()}


def _estimate(fn: Function, arguments: Sequence[Any], window_ms: float) -> float:
    ms = wall_ms(fn, arguments, 1)
    return ms if ms > window_ms else min(wall_ms(fn, arguments, 3) for _ in range(3))


def wall_ms(fn: Function, arguments: Sequence[Any], calls: int) -> float:
    """Milliseconds per call: `calls` queued at once, from an idle device until the last is done."""
    began = time.perf_counter()
    for _ in range(calls):
        out = fn(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) * 1e3 / calls


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
