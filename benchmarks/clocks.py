"""What times our plans and a peer of torch alike: replays of CUDA graphs, and calls as users write them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import cudnn_jax
from benchmarks.harness import Timing
from cudnn_jax.engines import execution, planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target

Launch = Callable[[], Any]
"""Queues the work on torch's current stream and returns the results."""


def to_jax(tensor: Any) -> jax.Array:
    return jax.numpy.from_dlpack(tensor.contiguous())


class Plan:
    """One of our plans of a graph, run on torch's memory and stream."""

    def __init__(self, made: tuple[pygraph, dict[str, Any]], target: Target, implementation: str | None) -> None:
        graph, self.tensors = made
        planned = planning.plan(graph, target, implementation)
        assert isinstance(planned.artifact, Program), planned.plan.name
        self.name = planned.plan.name
        self.workspace = planned.artifact.workspace
        self.execution = execution.prepare(graph, target, planned.artifact)
        self.results = [name for name, tensor in self.tensors.items() if tensor.producer is not None]
        self.handle = cudnn_jax.create_handle()

    def __call__(self, data: Mapping[str, Any], fill: float | None = None) -> dict[str, Any]:
        import torch

        cudnn_jax.set_stream(self.handle, torch.cuda.current_stream())
        types = {"bfloat16": torch.bfloat16, "float32": torch.float32}
        made = {}
        for name in self.results:
            if name == "final_state":  # a check leaves the caller's as they are
                state = data["initial_state"]
                made[name] = state if fill is None else state.clone()
                continue
            tensor = self.tensors[name]
            made[name] = torch.empty(tensor.dim, dtype=types[tensor.data_type.value], device="cuda")
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device="cuda") if self.workspace else None
        if fill is not None:
            for name in self.results:
                if name != "final_state":
                    made[name].fill_(fill)
            if workspace is not None:
                workspace.fill_(0xFF)
        given = {**data, **made} | ({"initial_state": made["final_state"]} if "final_state" in made else {})
        buffers = {tensor: given[name] for name, tensor in self.tensors.items()}
        self.execution.run(buffers, workspace, self.handle)
        return made


class Replay:
    """A launch captured in a CUDA graph."""

    def __init__(self, launch: Launch) -> None:
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                launch()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = launch()

    def ms(self, calls: int) -> float:
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / calls


class Jitted:
    """Plans of a case in one jitted function of jax arrays; states that are written over are donated."""

    def __init__(self, plans: list[tuple[pygraph, dict[str, Any], str]], data: Mapping[str, Any]) -> None:
        for graph, _, _ in plans:
            graph.freeze()
        self.arrays = {name: to_jax(tensor).copy() for name, tensor in data.items() if tensor is not None}
        names = {tensor: name for _, tensors, _ in plans for name, tensor in tensors.items()}
        self.inputs = sorted({names[tensor] for graph, _, _ in plans for tensor in graph.inputs})
        self.over = "initial_state" if "initial_state" in self.inputs else None

        def call(*arrays: jax.Array) -> dict[str, jax.Array]:
            given, made = dict(zip(self.inputs, arrays, strict=True)), {}
            for graph, _, plan in plans:
                outputs = cudnn_jax.call(graph, *(given[names[tensor]] for tensor in graph.inputs), implementation=plan)
                made |= dict(zip([names[tensor] for tensor in graph.outputs], outputs, strict=True))
            return made

        donated = (self.inputs.index(self.over),) if self.over else ()
        self.fn = jax.jit(call, donate_argnums=donated)
        self.ms(3)

    def ms(self, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            made = self.fn(*(self.arrays[name] for name in self.inputs))
            if self.over:
                self.arrays[self.over] = made["final_state"]
        jax.block_until_ready(made)
        return (time.perf_counter() - began) * 1e3 / calls


class Eager:
    """A peer's call as its users write it."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def ms(self, calls: int) -> float:
        import torch

        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            self.launch()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3 / calls


def in_turns(
    clocks: Mapping[str, Callable[[int], float]], rounds: int, window_ms: float, seed: int
) -> dict[str, Timing]:
    calls = {name: int(np.clip(round(window_ms / max(ms(3), 1e-3)), 1, 200)) for name, ms in clocks.items()}
    found = {name: np.full(rounds, np.nan) for name in clocks}
    rng = np.random.default_rng(seed)
    for turn in range(rounds):
        for name in rng.permutation(list(clocks)):
            found[name][turn] = clocks[name](calls[name])
    return {name: Timing(values) for name, values in found.items()}


def peak_bytes(launch: Launch) -> int:
    """Bytes that a launch holds at most beyond what was held before it, its results included."""
    import torch

    launch()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = launch()
    torch.cuda.synchronize()
    del kept
    return int(torch.cuda.max_memory_allocated() - before)
