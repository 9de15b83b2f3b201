"""Timing that can be trusted: candidates of the same arguments in turns, in one run, checked on poisoned memory first.

Drifts of clock and temperature then fall on all alike, and a ratio is taken within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


def poison(shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Leaves NaN in free memory of the sizes that results will take, so that an unwritten element shows."""
    held = [jnp.full(x.shape, jnp.nan, x.dtype) for x in shapes if jnp.issubdtype(x.dtype, jnp.inexact)]
    jax.block_until_ready(held)
    for x in held:
        x.delete()


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """||got - want|| over the larger of ||want|| and a hundredth of the norm of unit-scale numbers.

    Equal infinities differ by 0, others by infinity or NaN; NaN stays NaN.
    """
    return float(_relative_error(got, want)) if want.size else 0.0


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    wide = jnp.promote_types(want.dtype, jnp.float32)
    got, want = got.astype(wide).ravel(), want.astype(wide).ravel()
    same = jnp.isinf(want) & (got == want)
    got, want = jnp.where(same, 0, got), jnp.where(same, 0, want)
    return jnp.linalg.norm(got - want) / jnp.maximum(jnp.linalg.norm(want), 1e-2 * want.size**0.5)


def rotated(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """One order a round, each begun by another name than the last."""
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        yield [*names[first:], *names[:first]]


def interleave(
    compiled: Mapping[str, Function], arguments: Sequence[Any], effort: Effort, orders: Iterable[Sequence[str]]
) -> dict[str, Timing]:
    """Times all candidates in turns, in one of `orders` each round."""
    estimates = {name: _estimate(fn, arguments, effort.window_ms) for name, fn in compiled.items()}
    fastest = min(estimates.values(), default=0.0)
    calls = {name: int(np.clip(round(effort.window_ms / ms), 1, 200)) for name, ms in estimates.items()}
    slow = {name for name, ms in estimates.items() if ms > effort.slow_factor * fastest}
    rounds = {name: np.full(effort.rounds, np.nan) for name in compiled}
    for turn, order in enumerate(orders):
        for name in order:
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
