"""`python -m benchmarks pointwise`: every plan of residual + gelu(x + bias) beside jitted jax.numpy, in one run.

The operation reads two matrices and writes one: what bounds it is the memory, so the roofline is bytes over the copy
bandwidth of the same run. A jitted jax.numpy expression is what XLA fuses into one kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import cudnn_jax
from benchmarks.comparison import Benchmark, Comparison
from benchmarks.harness import Effort, Function
from benchmarks.report import Report
from cudnn_jax.engines import planning
from cudnn_jax.engines.execution import target_of
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.pointwise import samples
from cudnn_jax.engines.target import Target


@dataclasses.dataclass(frozen=True)
class Case:
    """A matrix of `rows` x `cols`."""

    rows: int
    cols: int
    dtype: str = "bfloat16"
    approximation: str = "erf"

    def __str__(self) -> str:
        return f"{self.rows} x {self.cols} {self.dtype} {self.approximation}"

    @property
    def nbytes(self) -> float:
        itemsize = jnp.dtype(self.dtype).itemsize
        return float(itemsize) * (3 * self.rows * self.cols + self.cols)

    def graph(self) -> pygraph:
        return samples.bias_gelu(self.rows, self.cols, self.dtype, approximation=self.approximation)


CASES = (
    Case(16384, 5120),
    Case(8192, 4096, approximation="tanh"),
    Case(4096, 4096, "float32"),
    Case(8191, 4099),
)
QUICK_CASES = (Case(64, 96), Case(33, 13, "float32", "tanh"))
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-6}
PEER = "jax.numpy"


def plan(case: Case, name: str | None) -> Function:
    """A candidate: a function of (x, bias, residual) to a tuple."""

    def run(x: Any, bias: Any, residual: Any) -> Any:
        return cudnn_jax.call(case.graph(), x, bias, residual, implementation=name)

    return run


def peer(case: Case) -> Function:
    """What a JAX user writes: float32 inside, which XLA keeps in registers."""

    def run(x: Any, bias: Any, residual: Any) -> Any:
        wide = x.astype(jnp.float32) + bias.astype(jnp.float32)
        made = jax.nn.gelu(wide, approximate=case.approximation == "tanh") + residual.astype(jnp.float32)
        return (made.astype(x.dtype),)

    return run


def plans(case: Case) -> tuple[list[str], str]:
    """The names of our plans, and of the one that runs by default."""
    planned = planning.plan(case.graph(), target_of(None))
    return [each.name for each in planned.plans], planned.plan.name


def programs(target: Target) -> Iterator[tuple[pygraph, str | None]]:
    """Every program of a DSL that a full run asks for."""
    for case in CASES:
        yield case.graph(), None
        for each in planning.plan(case.graph(), target).plans:
            if each.kind == "cutedsl":
                yield case.graph(), each.name


def draw(case: Case, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((case.rows, case.cols), (1, case.cols), (case.rows, case.cols))
    return tuple(jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes, strict=True))


def run_case(case: Case, report: Report, effort: Effort, seed: int) -> None:
    arguments = draw(case, seed)
    names, chosen = plans(case)
    (want,) = jax.jit(peer(case))(*(x.astype(jnp.float32) for x in arguments))
    Comparison(
        case=str(case),
        direction="forward",
        arguments=arguments,
        ours={name: plan(case, name) for name in names},
        peers={PEER: peer(case)},
        chosen=chosen,
        want={"out": want},
        tolerance={"out": TOLERANCE[case.dtype]},
        work=(0.0, case.nbytes),
    ).run(report, effort, seed)


def main(argv: list[str]) -> int:
    return Benchmark("pointwise", __doc__, CASES, QUICK_CASES, run_case).main(argv)
