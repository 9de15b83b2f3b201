"""`python -m benchmarks runtime`: what one execution costs the host inside our XLA handler, by kind of step.

The handler's own time is all of its time less what the library call itself takes (cuLaunchKernelEx,
CuteDSLRT_Function_Run, cudnnBackendExecute), both measured on the same calls. It is measured again with 100 to 10,000
other programs, each with an image of its own, loaded in the process; then all of them are released, and the device's
memory and the runtime's counts are compared with what they were.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
from rich.console import Console
from rich.table import Table

import cudnn_jax
from benchmarks import report
from benchmarks.harness import Timing
from cudnn_jax import _ffi
from cudnn_jax.engines import planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.execution import operands_of, target_of
from cudnn_jax.graph import data_type

LIVE = (0, 100, 1000, 10_000)
AIMS_US = {"cubin": 1.0, "cute": 2.0, "cudnn": 2.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph whose program has steps of one kind, and the arrays to run it on."""

    kind: str
    implementation: str
    graph: planning.pygraph
    arrays: tuple[jax.Array, ...]

    def call(self, *arrays: Any) -> tuple[jax.Array, ...]:
        return cudnn_jax.call(self.graph, *arrays, implementation=self.implementation)

    @property
    def program(self) -> Program:
        planned = planning.plan(self.graph, target_of(None), self.implementation)
        assert isinstance(planned.artifact, Program)
        return planned.artifact


def cases() -> list[Case]:
    """Shapes too small to keep the device busy: the host is what is measured."""
    return [_norm(), _pointwise(), _attention()]


def _norm() -> Case:
    graph = cudnn_jax.pygraph(io_data_type="bfloat16")
    x, scale = graph.tensor((64, 1024), name="x"), graph.tensor((1, 1024), name="scale")
    y, _ = graph.rmsnorm(
        norm_forward_phase="INFERENCE", input=x, scale=scale, epsilon=graph.scalar(1e-6, "float32", rank=2)
    )
    y.set_output(True).set_data_type(data_type.BFLOAT16)
    return Case(
        "cubin", "cutile_rmsnorm", graph, (jnp.ones((64, 1024), jnp.bfloat16), jnp.ones((1, 1024), jnp.bfloat16))
    )


def _pointwise() -> Case:
    graph = cudnn_jax.pygraph(io_data_type="bfloat16")
    x, bias, residual = (
        graph.tensor(dim, name=name) for dim, name in (((64, 1024), "x"), ((1, 1024), "b"), ((64, 1024), "r"))
    )
    graph.add(residual, graph.gelu(graph.add(x, bias))).set_output(True).set_data_type(data_type.BFLOAT16)
    rows, row = jnp.ones((64, 1024), jnp.bfloat16), jnp.ones((1, 1024), jnp.bfloat16)
    by_name = {"x": rows, "b": row, "r": rows}
    return Case("cute", "cutedsl_bias_gelu", graph, tuple(by_name[tensor.name] for tensor in graph.inputs))


def _attention() -> Case:
    graph = cudnn_jax.pygraph(io_data_type="bfloat16")
    dim = (1, 1, 64, 64)
    q, k, v = (graph.tensor(dim, name=name) for name in "qkv")
    out, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=0.125, generate_stats=False)
    out.set_output(True).set_dim(dim).set_stride((4096, 4096, 64, 1)).set_data_type(data_type.BFLOAT16)
    return Case("cudnn", "cudnn", graph, (jnp.ones(dim, jnp.bfloat16),) * 3)


# ---- Programs by the thousand -----------------------------------------------------------------------------


def payload_of(artifact: bytes) -> dict[str, Any]:
    payload: dict[str, Any] = msgpack.unpackb(msgpack.unpackb(artifact)["payload"])
    return payload


def variant(artifact: bytes, number: int) -> bytes:
    """The same program with images that nobody else has: a number behind their end, which no loader reads."""
    payload = payload_of(artifact)
    for step in payload["steps"]:
        step["image"] += number.to_bytes(8, "little")
    body = msgpack.packb(payload)
    outer = msgpack.unpackb(artifact) | {"payload": body, "sha256": hashlib.sha256(body).digest()}
    packed: bytes = msgpack.packb(outer)
    return packed


def free_bytes() -> int:
    """Free memory of the current device, asked of the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


# ---- The run ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """Microseconds of the host per execution."""

    handler: Timing
    library: Timing

    @property
    def own(self) -> Timing:
        return Timing(self.handler.rounds - self.library.rounds)


def measure(
    compiled: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]], rounds: int, calls: int
) -> dict[str, Cost]:
    """All kinds in turns, from an idle device each time, with few calls queued so that no launch waits."""
    handler = {kind: np.zeros(rounds) for kind in compiled}
    library = {kind: np.zeros(rounds) for kind in compiled}
    _ffi.measure_library_calls(True)
    try:
        for turn in range(rounds):
            for kind, (fn, arrays) in compiled.items():
                jax.block_until_ready(fn(*arrays))
                before = _ffi.counters()
                for _ in range(calls):
                    jax.block_until_ready(fn(*arrays))
                after = _ffi.counters()
                executions = after["executions"] - before["executions"]
                assert executions == calls, f"{kind}: {executions} executions of {calls} calls reached the handler"
                handler[kind][turn] = (after["handler_ns"] - before["handler_ns"]) / calls / 1e3
                library[kind][turn] = (after["library_ns"] - before["library_ns"]) / calls / 1e3
    finally:
        _ffi.measure_library_calls(False)
    return {kind: Cost(Timing(handler[kind]), Timing(library[kind])) for kind in compiled}


def run(effort: tuple[int, int], live: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """One row for each kind of step and number of other live programs, then one for the release of all."""
    rounds, calls = effort
    chosen = cases()
    compiled = {case.kind: (jax.jit(case.call), case.arrays) for case in chosen}
    steps = {case.kind: len(payload_of(case.program.data)["steps"]) for case in chosen}
    for fn, arrays in compiled.values():
        jax.block_until_ready(fn(*arrays))
    template = next(case for case in chosen if case.kind == "cubin")
    device = target_of(None)
    outputs = [jnp.empty(tensor.dim, tensor.data_type.value) for tensor in template.graph.outputs]
    tensors = [*template.graph.inputs, *template.graph.outputs]
    buffers = {
        tensor: array.unsafe_buffer_pointer()
        for tensor, array in zip(tensors, (*template.arrays, *outputs), strict=True)
    }
    held: list[_ffi.Executable] = []
    gc.collect()
    at_first, counts = free_bytes(), _ffi.counters()
    for number in live:
        began = time.perf_counter()
        while len(held) < number:
            artifact = variant(template.program.data, len(held))
            held.append(executable(template.graph, artifact, device))
            # The first call loads it, on the buffers of the call that is measured.
            held[-1].execute(buffers)
        seconds = time.perf_counter() - began
        used = at_first - free_bytes()
        for kind, cost in measure(compiled, rounds, calls).items():
            yield {
                "kind": kind,
                "steps": steps[kind],
                "other_programs": number,
                "handler_us": cost.handler.ms,
                "library_us": cost.library.ms,
                "own_us": cost.own.ms,
                "own_spread_us": cost.own.spread,
                "aim_us": AIMS_US[kind],
                "loaded_in_s": seconds,
                "device_bytes": used,
            }
    most = at_first - free_bytes()
    held.clear()
    gc.collect()
    after = _ffi.counters()
    yield {
        "released": live[-1],
        "device_bytes_at_most": most,
        "device_bytes_left": at_first - free_bytes(),
        "programs_left": (after["programs_created"] - after["programs_destroyed"])
        - (counts["programs_created"] - counts["programs_destroyed"]),
        "images_left": (after["images_loaded"] - after["images_unloaded"])
        - (counts["images_loaded"] - counts["images_unloaded"]),
    }


def executable(graph: planning.pygraph, artifact: bytes, device: Any) -> _ffi.Executable:
    return _ffi.Executable(operands_of(graph), artifact, device.ordinal or 0, device.device_kind)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        title=f"microseconds of the host per execution on {jax.devices()[0].device_kind}", title_justify="left"
    )
    for heading in ("step", "other programs", "handler", "library call", "our own", "spread", "aim"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for row in rows:
        if "kind" in row:
            numbers = (row[key] for key in ("handler_us", "library_us", "own_us", "own_spread_us", "aim_us"))
            table.add_row(row["kind"], f"{row['other_programs']:,}", *(f"{number:.2f}" for number in numbers))
    console.print(table)
    console.print(rows[-1])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks runtime", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200, help="executions of each kind in a round")
    args = parser.parse_args(argv)
    rows = list(run((args.rounds, args.calls), LIVE))
    show(rows, Console(width=None if sys.stdout.isatty() else 160))
    path = report.write_json("runtime", {"rows": rows, "rounds": args.rounds, "calls": args.calls}, args.out)
    print(f"written to {path}")
    left = rows[-1]
    return 1 if left["programs_left"] or left["images_left"] else 0
