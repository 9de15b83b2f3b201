"""What one `graph.execute` costs the host, with a program that does next to nothing: three inputs, one output.

A call is timed from Python, `CALLS` in a row from an idle device, so that a queue that fills up does not count. Beside
it stands the same program as a custom call of a jitted function, which is the other way to run it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import cudnn_jax
from benchmarks import harness
from benchmarks.harness import Timing
from benchmarks.report import Report
from cudnn_jax import _runtime, data_type
from cudnn_jax.engines import execution, manifest
from cudnn_jax.engines.base import Artifact, BaseEngine, PlanConfig
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph

SHAPE = (1, 1, 2, 8)
CALLS = 200
SLOT = 98


class Empty(BaseEngine):
    """Serves forward attention with zeros: one fill of the output."""

    name = "empty"
    kind = "test"

    def configs(self, graph: pygraph, facts: Any, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        return [()]

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        builder = ProgramBuilder(graph, target)
        builder.step("fill", dest=("operand", len(graph.inputs)), value=0, width=1, bytes=4 * int(np.prod(SHAPE)))
        return builder.build()


@contextmanager
def empty_engine() -> Iterator[None]:
    old = manifest.FAMILIES["sdpa_fwd"]
    slot = manifest.EngineSlot(SLOT, Empty.name, (__name__, Empty.__name__))
    manifest.FAMILIES["sdpa_fwd"] = dataclasses.replace(old, slots=(slot, *old.slots))
    try:
        yield
    finally:
        manifest.FAMILIES["sdpa_fwd"] = old


def empty_graph(target: Target) -> tuple[Any, list[Any]]:
    """A planned graph and its tensors, inputs then output."""
    graph = cudnn_jax.pygraph(io_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor(dim=SHAPE) for _ in range(3))
    o, _ = graph.sdpa(q, k, v, generate_stats=False)
    o.set_output(True)
    with empty_engine():
        graph.create_execution_plans(target=target, implementation=Empty.name)
        graph.build_plans()
    return graph, [q, k, v, o]


def ways(target: Target) -> tuple[dict[str, list[Any]], Callable[[], Any]]:
    """Buffers of each kind, and a function that waits for the device."""
    if target.platform == "cpu":
        memory = [np.ones(SHAPE, np.float32) for _ in range(4)]
        addresses, device = [array.ctypes.data for array in memory], None
        kinds: dict[str, list[Any]] = {"numpy": memory}
        wait: Callable[[], Any] = lambda: None  # noqa: E731
    else:
        import torch

        memory = [torch.ones(SHAPE, device=f"cuda:{target.ordinal}") for _ in range(4)]
        addresses, device = [tensor.data_ptr() for tensor in memory], target.ordinal
        kinds, wait = {"torch": memory}, torch.cuda.synchronize
    jax_inputs = [jax.device_put(jnp.ones(SHAPE)) for _ in range(3)]
    views = [cudnn_jax.DeviceView(at, SHAPE, "float32", device=device, owner=memory) for at in addresses]
    kinds |= {"jax inputs": [*jax_inputs, memory[3]], "DeviceView": views, "address": addresses}
    return kinds, wait


def timed(call: Callable[[], Any], wait: Callable[[], Any], rounds: int) -> Timing:
    """Milliseconds per call of the host alone."""
    values = []
    for _ in range(rounds + 1):
        wait()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        values.append((time.perf_counter() - began) * 1e3 / CALLS)
        wait()
    return Timing(np.asarray(values[1:]))


def jitted(graph: Any) -> Callable[[], Any]:
    """The same program inside `jax.jit`, on JAX arrays."""
    _, program = graph.build_plans()
    _runtime.register()
    result = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    attribute = np.frombuffer(program.data, np.uint8)
    fn = jax.jit(lambda *x: jax.ffi.ffi_call(_runtime.TARGET, result)(*x, program=attribute))
    given = [jnp.ones(SHAPE) for _ in range(3)]
    jax.block_until_ready(fn(*given))
    return lambda: fn(*given)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks eager", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: a check of the benchmark, not of speed")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    args = parser.parse_args(argv)
    rounds = 5 if args.quick else 101
    console = Console(width=None if sys.stdout.isatty() else 200)
    report = Report("eager", 0, harness.measure_ceilings(quick=True))

    target = execution.target_of(None)
    graph, tensors = empty_graph(target)
    handle = cudnn_jax.create_handle()
    kinds, wait = ways(target)
    where = {"case": "empty program, 3 inputs, 1 output", "direction": target.platform, "clock": "host"}
    peer = {"jax.jit": timed(jitted(graph), wait, rounds)}
    for name, buffers in kinds.items():
        call = dict(zip(tensors, buffers, strict=True))
        graph.execute(call, None, handle)
        timing = timed(lambda call=call: graph.execute(call, None, handle), wait, rounds)
        report.add(timing, peer, plan=name, chosen=True, **where)
    report.show(console)
    for row in report.rows:
        console.print(f"{row.plan}: {row.ms * 1e3:.2f} ± {row.spread * 1e3:.2f} us a call", highlight=False)
    console.print(f"written to {report.write(args.out)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
