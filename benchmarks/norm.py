"""`python -m benchmarks norm`: every setting of the RMS norm engine beside jitted jax.numpy, in one interleaved run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
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
from benchmarks.verification import verify
from cudnn_jax import _target
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.norm import facts, rmsnorm_tiles, samples
from cudnn_jax.engines.planning import pygraph

DIRECTIONS = ("forward", "backward", "forward+backward")
PEER = "jax.numpy"
EPSILON = 1e-5
SM_COUNT = 132
"""Of an H200."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A bfloat16 matrix, normalised over its columns, with a scale."""

    rows: int
    cols: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"

    def nbytes(self, direction: str) -> float:
        """Bytes of whole matrices moved at least: x and y; grad, x and dx."""
        matrices = {"forward": 2, "backward": 3, "forward+backward": 5}[direction]
        return 2.0 * matrices * self.rows * self.cols


CASES = (Case(16384, 4096), Case(16384, 8192), Case(8192, 16384), Case(131072, 512))
QUICK_CASES = (Case(64, 128), Case(33, 1000))
TOLERANCE = {"y": 5e-3, "dx": 1.5e-2, "d_scale": 1.5e-2}
RESULTS = {"forward": ("y",), "backward": ("dx", "d_scale"), "forward+backward": ("y", "dx", "d_scale")}


# ---- Candidates: functions of (x, scale, grad, statistics) ------------------------------------------------


def ours(case: Case, direction: str, forward: str | None, backward: str | None) -> Function:
    ahead, back = samples.forward(case.rows, case.cols), samples.backward(case.rows, case.cols)

    def run_forward(x: Any, scale: Any, grad: Any, statistics: Any) -> Any:
        return cudnn_jax.call(ahead, x, scale, implementation=forward)

    def run_backward(x: Any, scale: Any, grad: Any, statistics: Any) -> Any:
        return cudnn_jax.call(back, grad, x, scale, statistics, implementation=backward)

    def run_both(x: Any, scale: Any, grad: Any, statistics: Any) -> Any:
        y, made = run_forward(x, scale, grad, statistics)
        return y, *run_backward(x, scale, grad, made)

    return {"forward": run_forward, "backward": run_backward, "forward+backward": run_both}[direction]


def peer(direction: str) -> Function:
    """What a JAX user would write, with autodiff; the backward alone is given the statistics, as ours is."""

    def normal(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)

    def forward(x: Any, scale: Any) -> Any:
        return (normal(x) * scale).astype(x.dtype)

    def run_forward(x: Any, scale: Any, grad: Any, statistics: Any) -> Any:
        return (forward(x, scale),)

    def run_backward(x: Any, scale: Any, grad: Any, statistics: Any) -> Any:
        wide, inner = x.astype(jnp.float32) * statistics, (grad * scale).astype(jnp.float32)
        dx = statistics * (inner - wide * jnp.mean(inner * wide, axis=-1, keepdims=True))
        d_scale = jnp.sum(grad.astype(jnp.float32) * wide, axis=0, keepdims=True)
        return dx.astype(x.dtype), d_scale.astype(scale.dtype)

    def run_both(x: Any, scale: Any, grad: Any, statistics: Any) -> Any:
        y, pull = jax.vjp(forward, x, scale)
        return y, *pull(grad)

    return {"forward": run_forward, "backward": run_backward, "forward+backward": run_both}[direction]


def settings(graph: pygraph, count: int) -> list[str]:
    """The engine's plans for `count` multiprocessors by name, in its order, whether or not its compiler is here."""
    graph.freeze()
    found = [
        PlanConfig(0, knobs, engine="cutile_rmsnorm") for knobs in rmsnorm_tiles.settings(facts.analyze(graph), count)
    ]
    return [plan.name for plan in found]


def plans(case: Case, direction: str) -> dict[str, Function]:
    """Our candidates by name, the one that is ranked first in front."""
    count = _target.current().sm_count or SM_COUNT
    makers = (samples.forward, samples.backward)
    ahead, back = ([*settings(make(case.rows, case.cols), count), "xla"] for make in makers)
    if direction == "forward":
        return {name: ours(case, direction, name, None) for name in ahead}
    if direction == "backward":
        return {name: ours(case, direction, None, name) for name in back}
    pairs = [(ahead[0], name) for name in back] + [(name, back[0]) for name in ahead[1:]]
    return {f"{first} + {second}": ours(case, direction, first, second) for first, second in pairs}


def programs() -> Iterator[tuple[pygraph, str]]:
    """Every program that the full run on an H200 asks for by name."""
    for case in CASES:
        for make in (samples.forward, samples.backward):
            for name in settings(make(case.rows, case.cols), SM_COUNT):
                yield make(case.rows, case.cols), name


# ---- The run ----------------------------------------------------------------------------------------------


def draw(case: Case, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((case.rows, case.cols), (1, case.cols), (case.rows, case.cols))
    x, scale, grad = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    wide = x.astype(jnp.float32)
    return x, scale, grad, jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)


def reference(arguments: Any) -> dict[str, jax.Array]:
    """The answer in float32."""
    wide = [array.astype(jnp.float32) for array in arguments]
    return dict(zip(RESULTS["forward+backward"], jax.jit(peer("forward+backward"))(*wide), strict=True))


def run_case(case: Case, report: Report, effort: Effort, seed: int) -> None:
    arguments = draw(case, seed)
    answer = reference(arguments)
    for direction in DIRECTIONS:
        where = {"case": str(case), "direction": direction}
        candidates = plans(case, direction)
        want = {name: answer[name] for name in RESULTS[direction]}
        verified = verify(candidates, {PEER: peer(direction)}, arguments, want, TOLERANCE, effort.threads)
        report.left_out += [{**where, "name": name, "reason": reason} for name, reason in verified.left_out.items()]
        report.wrong += [{**where, "name": name, "reason": reason} for name, reason in verified.wrong.items()]
        timings = harness.interleave(verified.compiled, arguments, effort, seed)
        beside = {PEER: timings[PEER]} if PEER in timings else {}
        timed = [name for name in candidates if name in timings]
        for name in timed:
            report.add(
                timings[name],
                beside,
                plan=name,
                clock="wall",
                chosen=name == timed[0],
                roofline_ms=report.ceilings.roofline_ms(0.0, case.nbytes(direction)),
                error=verified.errors[name],
                **where,
            )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks norm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny cases: a check of the benchmark, not of speed")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: a fresh one)")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    effort = Effort(rounds=5, window_ms=2.0) if args.quick else Effort()
    report = Report("norm", seed, harness.measure_ceilings(args.quick))
    for case in QUICK_CASES if args.quick else CASES:
        run_case(case, report, effort, seed)
        harness.free_memory()
        report.write(args.out)
    report.show(console)
    console.print(f"written to {report.write(args.out)}", highlight=False)
    return 1 if report.wrong else 0
