"""`python -m benchmarks pointwise`: every plan of residual + gelu(x + bias) beside jitted jax.numpy, in one run.

The operation reads two matrices and writes one: what bounds it is the memory, so the roofline is bytes over the copy
bandwidth of the same run. A jitted jax.numpy expression is what XLA fuses into one kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import cudnn_jax
from benchmarks import harness
from benchmarks.harness import Effort, Function
from benchmarks.report import Report
from cudnn_jax.engines.base import DECLINES
from cudnn_jax.engines.execution import target_of
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.pointwise import samples


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
    """A candidate: a function of (x, bias, residual)."""

    def run(x: Any, bias: Any, residual: Any) -> Any:
        return cudnn_jax.call(case.graph(), x, bias, residual, implementation=name)[0]

    return run


def peer(case: Case) -> Function:
    """What a JAX user writes: float32 inside, which XLA keeps in registers."""

    def run(x: Any, bias: Any, residual: Any) -> Any:
        wide = x.astype(jnp.float32) + bias.astype(jnp.float32)
        made = jax.nn.gelu(wide, approximate=case.approximation == "tanh") + residual.astype(jnp.float32)
        return made.astype(x.dtype)

    return run


def plans(case: Case) -> tuple[list[str], str]:
    """The names of our plans, and of the one that runs by default."""
    graph = case.graph()
    graph.create_execution_plans(target=target_of(None))
    return [each.name for each in graph.plans], graph.build_plans()[0].name


def draw(case: Case, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((case.rows, case.cols), (1, case.cols), (case.rows, case.cols))
    return tuple(jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes, strict=True))


def run_case(case: Case, report: Report, effort: Effort, seed: int) -> None:
    arguments = draw(case, seed)
    where = {"case": str(case), "direction": "forward"}
    names, chosen = plans(case)
    candidates = {name: plan(case, name) for name in names} | {PEER: peer(case)}
    compiled, stopped = harness.compile_all(candidates, arguments, effort.threads)
    for name, error in stopped.items():
        entry = {**where, "name": name, "reason": harness.one_line(error)}
        (report.left_out if isinstance(error, DECLINES) else report.wrong).append(entry)
    want = jax.jit(peer(case))(*(x.astype(jnp.float32) for x in arguments))
    errors = {name: check(fn, arguments, want) for name, fn in compiled.items()}
    for name, error in errors.items():
        if not error <= TOLERANCE[case.dtype]:
            report.wrong.append({**where, "name": name, "reason": f"relative error {error:.2g}"})
    right = {name: fn for name, fn in compiled.items() if errors[name] <= TOLERANCE[case.dtype]}
    timings = harness.interleave(right, arguments, effort, seed)
    beside = {PEER: timings[PEER]} if PEER in timings else {}
    for name in names:
        if name in timings:
            report.add(
                timings[name],
                beside,
                plan=name,
                clock="wall",
                chosen=name == chosen,
                roofline_ms=report.ceilings.roofline_ms(0.0, case.nbytes),
                error={"out": errors[name]},
                **where,
            )


def check(fn: Function, arguments: Any, want: jax.Array) -> float:
    harness.poison([jax.ShapeDtypeStruct(want.shape, arguments[0].dtype)])
    return harness.relative_error(fn(*arguments), want)


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pointwise", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny cases: a check of the benchmark, not of speed")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: a fresh one)")
    parser.add_argument("--threads", type=int, default=6, help="compilations at a time (default 6)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = arguments_of(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    effort = Effort(rounds=5, window_ms=2.0, threads=args.threads) if args.quick else Effort(threads=args.threads)
    cases = [case for case in (QUICK_CASES if args.quick else CASES) if args.only in str(case)]
    report = Report("pointwise", seed, harness.measure_ceilings(args.quick))
    for case in cases:
        began = time.perf_counter()
        run_case(case, report, effort, seed)
        harness.free_memory()
        report.write(args.out)
        console.print(f"{case}: {time.perf_counter() - began:.1f} s")
    report.show(console)
    path = report.write(args.out)
    console.print(f"written to {path}", highlight=False)
    return 1 if report.wrong or not cases else 0
