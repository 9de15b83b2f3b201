"""`python -m benchmarks gdn`: Gated DeltaNet beside flash-linear-attention, in one interleaved run on one GPU.

Two clocks. "kernel": what the GPU is busy with, timed over replays of a CUDA graph that holds the call. "wall": what a
user waits for, from an idle device until the last of some calls is done, of a jitted call of ours and an eager call of
the peer. For the first, ours runs on torch's memory through `graph.execute`'s door, so that both sides are captured,
fed and counted alike; a plan is checked against the reference engine in float32 before it is timed. The peer refuses
its backward on Hopper with some releases of Triton, which make it wrong; it is timed all the same, as nothing else is
there, and its errors stand in the rows of the JSON's `peer_errors`. `memory` is what a forward and a backward take at
most beyond what they are given.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import cudnn_jax
from benchmarks import harness
from benchmarks.harness import Timing
from benchmarks.linear_attention import plans, recurrent
from benchmarks.report import Report
from cudnn_jax.engines import execution, planning
from cudnn_jax.engines.base import DECLINES, Program
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target

PEER = "flash-linear-attention"
RECURRENT = recurrent("gdn")
DIRECTIONS = ("forward", "backward", "forward+backward")
TOLERANCE = {"O": 8e-3, "final_state": 8e-3, "dQ": 1.5e-2, "dK": 1.5e-2, "dV": 1.5e-2, "dG": 1.5e-2, "dBeta": 1.5e-2}
INPUTS = ("q", "k", "v", "g", "beta", "cu_seqlens")
GRADIENTS = ("dQ", "dK", "dV", "dG", "dBeta")
CHUNK = 64

Launch = Callable[[], Any]
"""Queues the work on torch's current stream and returns the results."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Packed sequences in bfloat16, K = V = 128, q and k normalised by the operation, states in float32."""

    name: str
    lengths: tuple[int, ...]
    heads_q: int
    heads_v: int
    decode: bool = False
    """From states of their own, which are written over; forward only."""
    dim: int = 128

    def __str__(self) -> str:
        return self.name

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def tensors(self, graph: pygraph) -> dict[str, Any]:
        t, d = self.total, self.dim
        shapes = {"q": (t, self.heads_q, d), "k": (t, self.heads_q, d), "v": (t, self.heads_v, d)}
        made = {name: graph.tensor(dim, name=name) for name, dim in shapes.items()}
        for name in ("g", "beta"):
            made[name] = graph.tensor((t, self.heads_v), data_type="float32", name=name)
        made["cu_seqlens"] = graph.tensor((len(self.lengths) + 1,), data_type="int32", name="cu_seqlens")
        return made

    def forward(self) -> tuple[pygraph, dict[str, Any]]:
        graph = cudnn_jax.pygraph(io_data_type="bfloat16")
        tensors, options = self.tensors(graph), {}
        if self.decode:
            shape = (len(self.lengths), self.heads_v, self.dim, self.dim)
            tensors["initial_state"] = graph.tensor(shape, data_type="float32", name="initial_state")
            options = {"output_final_state": True, "overwrite_initial_state": True}
        out, state, _ = graph.gdn(**tensors, use_qk_l2norm=True, **options)
        made = {"O": out} | ({"final_state": state} if state is not None else {})
        return graph, tensors | {name: tensor.set_output(True) for name, tensor in made.items()}

    def backward(self) -> tuple[pygraph, dict[str, Any]]:
        graph = cudnn_jax.pygraph(io_data_type="bfloat16")
        tensors = self.tensors(graph)
        tensors["dO"] = graph.tensor((self.total, self.heads_v, self.dim), name="dO")
        made = graph.gdn_bwd(**tensors, use_qk_l2norm=True)
        return graph, tensors | {name: tensor.set_output(True) for name, tensor in zip(GRADIENTS, made, strict=False)}

    def work(self, direction: str) -> tuple[float, float]:
        """(operations, bytes): those of the chunked form, and each operand and result moved once."""
        rows, d, heads = self.total, self.dim, self.heads_v
        if self.decode:
            return 8.0 * rows * heads * d * d, 8.0 * len(self.lengths) * heads * d * d
        # Of a chunk and head: K K^T, Q K^T and the inverse applied, and products with the state.
        forward = 2.0 * rows * heads * (3 * CHUNK * d + 3 * d * d)
        whole = 2.0 * rows * d * (2 * self.heads_q + 2 * heads) + 8.0 * rows * heads
        # The backward reads what the forward read and dO, and writes as much as the forward read.
        back = 2.0 * rows * d * (4 * self.heads_q + 3 * heads) + 16.0 * rows * heads
        operations = {"forward": forward, "backward": 3 * forward, "forward+backward": 4 * forward}
        moved = {"forward": whole, "backward": back, "forward+backward": whole + back}
        return operations[direction], moved[direction]


_PACKED = tuple(int(length) for length in np.random.default_rng(2024).integers(128, 2049, 32))
CASES = (
    Case("2 x 8192, 16 heads", (8192, 8192), 16, 16),
    Case("1 x 8192, 16 q and 32 v heads", (8192,), 16, 32),
    Case("1 x 65536, 16 heads", (65536,), 16, 16),
    Case("32 of 128 to 2048, 16 heads", _PACKED, 16, 16),
    Case("decode 256 x 1, 32 heads", (1,) * 256, 32, 32, decode=True),
    Case("decode 256 x 8, 32 heads", (8,) * 256, 32, 32, decode=True),
)


def makers(case: Case) -> dict[str, Callable[[], tuple[pygraph, dict[str, Any]]]]:
    """The graphs of a case, by direction."""
    return {"forward": case.forward} if case.decode else {"forward": case.forward, "backward": case.backward}


def candidates_of(case: Case, make: Callable[[], tuple[pygraph, dict[str, Any]]], target: Target) -> list[str]:
    """The plans that are timed: those of the token-by-token engine only where sequences are short."""
    return [name for name in plans(make()[0], target) if case.decode or not name.startswith(RECURRENT)]


def programs(target: Target) -> Iterator[tuple[pygraph, str]]:
    """Every program that the full run asks for by name."""
    for case in CASES:
        for make in makers(case).values():
            for name in candidates_of(case, make, target):
                yield make()[0], name


# ---- Data -------------------------------------------------------------------------------------------------


def draw(case: Case, seed: int) -> dict[str, Any]:
    """torch tensors by port, as a trained model's: keys are normalised, decays are mild."""
    import torch

    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=rng, device="cuda")

    t, d = case.total, case.dim
    starts = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
    return {
        "q": normal(t, case.heads_q, d).bfloat16(),
        "k": normal(t, case.heads_q, d).bfloat16(),
        "v": normal(t, case.heads_v, d).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(t, case.heads_v) + 3.0),
        "beta": torch.sigmoid(normal(t, case.heads_v)),
        "cu_seqlens": torch.tensor(starts, device="cuda"),
        "dO": normal(t, case.heads_v, d).bfloat16(),
        "initial_state": normal(len(case.lengths), case.heads_v, d, d) if case.decode else None,
    }


def to_jax(tensor: Any) -> jax.Array:
    return jnp.from_dlpack(tensor.contiguous())


def reference(case: Case, data: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Results in float32 by the reference engine, which float64 judges in the tests."""
    wide = {name: to_jax(tensor) for name, tensor in data.items() if tensor is not None}
    wide |= {name: wide[name].astype(jnp.float32) for name in ("q", "k", "v", "dO")}

    def forward(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return cudnn_jax.gdn(q, k, v, g, beta, cu_seqlens=wide["cu_seqlens"], use_qk_l2norm=True, implementation="xla")[
            0
        ]

    if case.decode:
        options = {"initial_state": wide["initial_state"], "output_final_state": True, "implementation": "xla"}
        options |= {"cu_seqlens": wide["cu_seqlens"], "use_qk_l2norm": True}
        made = jax.jit(lambda *arrays: cudnn_jax.gdn(*arrays, **options))(*(wide[name] for name in INPUTS[:5]))
        return {"O": made[0], "final_state": made[1]}

    @jax.jit
    def both(*arrays: Any) -> Any:
        out, back = jax.vjp(forward, *arrays)
        return out, *back(wide["dO"])

    made = both(*(wide[name] for name in INPUTS[:5]))
    return dict(zip(("O", *GRADIENTS), made, strict=True))


# ---- Candidates -------------------------------------------------------------------------------------------


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


def peer_candidates(case: Case, data: Mapping[str, Any]) -> dict[str, Launch]:
    import torch

    if case.decode:
        return decode_candidates(case, data)
    # A dense batch needs no table of chunks: the peer is given the form that is faster for it.
    leaves = {name: data[name].detach().clone().requires_grad_() for name in INPUTS[:5]}
    dense = len(set(case.lengths)) == 1
    batch = len(case.lengths) if dense else 1
    starts = None if dense else data["cu_seqlens"].long()
    d_out = data["dO"].view(batch, case.total // batch, *data["dO"].shape[1:])

    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True  # what its refusal asks

    def run() -> Any:
        # Views within: their gradients run on the stream that they were made on, which may be capturing.
        order = [leaf.view(batch, case.total // batch, *leaf.shape[1:]) for leaf in leaves.values()]
        return chunk_gated_delta_rule(*order, use_qk_l2norm_in_kernel=True, cu_seqlens=starts)[0]

    def forward() -> Any:
        with torch.no_grad():
            return {"O": run().view(case.total, case.heads_v, case.dim)}

    def both() -> Any:
        out = run()
        found = torch.autograd.grad(out, list(leaves.values()), d_out)
        return {"O": out.detach().view(case.total, case.heads_v, case.dim)} | dict(zip(GRADIENTS, found, strict=True))

    return {"forward": forward, "forward+backward": both}


def decode_candidates(case: Case, data: Mapping[str, Any]) -> dict[str, Launch]:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    batch = len(case.lengths)
    shaped = {name: data[name].view(batch, case.total // batch, *data[name].shape[1:]) for name in INPUTS[:5]}
    state = data["initial_state"].transpose(-1, -2).contiguous()  # (N, HV, K, V) there

    def step() -> Any:
        out, after = fused_recurrent_gated_delta_rule(
            **shaped, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return {"O": out.view(case.total, case.heads_v, case.dim), "final_state": after}

    return {"forward": step}


# ---- Clocks -----------------------------------------------------------------------------------------------


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


# ---- The run ----------------------------------------------------------------------------------------------


def errors_of(made: Mapping[str, Any], want: Mapping[str, jax.Array]) -> dict[str, float]:
    return {name: harness.relative_error(to_jax(tensor), want[name]) for name, tensor in made.items()}


Clocks = dict[tuple[str, str], Replay | Jitted | Eager]
"""By direction, and plan or peer."""


def add_rows(
    report: Report,
    case: Case,
    clock: str,
    clocks: Clocks,
    chosen: Mapping[str, str],
    errors: Mapping[tuple[str, str], dict[str, float]],
    rounds: int,
    seed: int,
) -> None:
    timed = in_turns({"|".join(key): each.ms for key, each in clocks.items()}, rounds, 10.0, seed)
    timings = {tuple(key.split("|")): timing for key, timing in timed.items()}
    if ("forward", PEER) in timings and ("forward+backward", PEER) in timings:
        rest = timings["forward+backward", PEER].rounds - timings["forward", PEER].rounds
        timings["backward", PEER] = Timing(rest)  # it reuses what its forward saved
    for direction in DIRECTIONS:
        peer = {PEER: timings[direction, PEER]} if (direction, PEER) in timings else {}
        for (where, name), timing in timings.items():
            if where != direction or name == PEER:
                continue
            report.add(
                timing,
                peer,
                case=str(case),
                direction=direction,
                plan=name,
                clock=clock,
                chosen=name == chosen.get(direction),
                roofline_ms=report.ceilings.roofline_ms(*case.work(direction)),
                error=errors.get((direction, name)),
            )


def run_case(case: Case, report: Report, rounds: int, seed: int) -> None:
    import torch

    target = execution.target_of(None)
    data = draw(case, seed)
    want = reference(case, data)
    launches: dict[str, dict[str, Launch]] = {direction: {} for direction in DIRECTIONS}
    errors: dict[tuple[str, str], dict[str, float]] = {}
    chosen: dict[str, str] = {}
    candidates: dict[str, dict[str, Plan]] = {"forward": {}, "backward": {}}
    for direction, make in makers(case).items():
        for name in candidates_of(case, make, target):
            where = {"case": str(case), "direction": direction, "name": name}
            try:
                plan = Plan(make(), target, name)
                found = errors_of(plan(data, float("nan")), want)
            except DECLINES as error:
                report.left_out.append({**where, "reason": harness.one_line(error)})
                continue
            bad = {each: error for each, error in found.items() if not error <= TOLERANCE[each]}
            if bad:
                report.wrong.append({**where, "reason": f"relative error {bad}"})
                continue
            candidates[direction][name], errors[direction, name] = plan, found
            chosen.setdefault(direction, name)
            launches[direction][name] = lambda plan=plan: plan(data)
    if len(chosen) == 2:
        ahead, back = candidates["forward"][chosen["forward"]], candidates["backward"][chosen["backward"]]
        together = f"{ahead.name} + {back.name}"
        chosen["forward+backward"] = together
        launches["forward+backward"][together] = lambda: (ahead(data), back(data))
    peers = peer_candidates(case, data)
    for direction, launch in peers.items():
        made = launch()
        if case.decode:
            made["final_state"] = made["final_state"].transpose(-1, -2)
        report.peer_errors[f"{case}, {direction}"] = errors_of(made, want)
        launches[direction][PEER] = launch
    kernels: Clocks = {
        (direction, name): Replay(launch) for direction, group in launches.items() for name, launch in group.items()
    }
    add_rows(report, case, "kernel", kernels, chosen, errors, rounds, seed)
    kernels.clear()
    waits: Clocks = {(direction, PEER): Eager(launch) for direction, launch in peers.items()}
    for direction, name in chosen.items():
        made_of = makers(case) if direction == "forward+backward" else {direction: makers(case)[direction]}
        waits[direction, name] = Jitted([(*make(), chosen[part]) for part, make in made_of.items()], data)
    add_rows(report, case, "wall", waits, chosen, errors, rounds, seed)
    waits.clear()
    if case.decode:
        return
    report.memory[str(case)] = {name: peak_bytes(launch) for name, launch in launches["forward+backward"].items()}
    torch.cuda.synchronize()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gdn", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, help="of the random inputs (default: a fresh one)")
    args = parser.parse_args(argv)
    os.environ["CUDNN_JAX_CUTILE_GDN"] = "1"
    console = Console(width=None if sys.stdout.isatty() else 200)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    report = Report("gdn", seed, harness.measure_ceilings(False))
    for case in CASES:
        if args.only in str(case):
            run_case(case, report, args.rounds, seed)
            report.write(args.out)
    report.show(console)
    for case, found in report.memory.items():
        console.print(
            f"memory of {case}: " + ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in found.items())
        )
    return 1 if report.wrong or not report.rows else 0
