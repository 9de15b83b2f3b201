"""What the benchmarks of linear attention share: cases, the plans that are timed, and one interleaved run on one GPU.

Two clocks. "kernel": what the GPU is busy with, timed over replays of a CUDA graph that holds the call. "wall": what a
user waits for, from an idle device until the last of some calls is done, of a jitted call of ours and an eager call of
the peer. For the first, ours runs on torch's memory through `graph.execute`'s door, so that both sides are captured,
fed and counted alike; a plan is checked against the reference engine in float32 before it is timed. `memory` is what a
forward and a backward take at most beyond what they are given.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import cudnn_jax
from benchmarks import harness
from benchmarks.clocks import Eager, Jitted, Launch, Plan, Replay, in_turns, peak_bytes, to_jax
from benchmarks.harness import Timing
from benchmarks.report import Report
from cudnn_jax.engines import execution, placement
from cudnn_jax.engines.base import DECLINES, PlanConfig
from cudnn_jax.engines.linear_attention import gdn_recurrent_cutile
from cudnn_jax.engines.linear_attention.facts import LinearFacts, analyze
from cudnn_jax.engines.linear_attention.gdn_cutile import CutileGdn
from cudnn_jax.engines.linear_attention.gdn_launch import Knobs
from cudnn_jax.engines.linear_attention.kda_cutile import CutileGdn2, CutileKda
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target
from cudnn_jax.graph.linear_attention import GRADIENTS, PER_TOKEN
from cudnn_jax.ops.gdn import GDN
from cudnn_jax.ops.gdn2 import GDN2
from cudnn_jax.ops.kda import KDA

DIRECTIONS = ("forward", "backward", "forward+backward")
TOLERANCE = {"O": 8e-3, "final_state": 8e-3, **dict.fromkeys(PER_TOKEN.values(), 1.5e-2)}
CHUNK = 64
CHUNKED = {"gdn": CutileGdn, "kda": CutileKda, "gdn2": CutileGdn2}
"""Operation -> its engine that works chunk by chunk."""
GATES = {operation.name: operation.gates for operation in (GDN, KDA, GDN2)}
"""Operation -> gate -> its axes behind the token's."""
BYTES = {"bfloat16": 2, "float32": 4}
AT_ONCE = 1 << 26
"""Elements of the values whose reference is made at a time: it holds tens of times as many."""


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
    operation: str = "gdn"

    def __str__(self) -> str:
        return self.name

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Operands whose rows are tokens, in the order of the function's parameters."""
        return ("q", "k", "v", *GATES[self.operation])

    @property
    def gradients(self) -> tuple[str, ...]:
        return tuple(GRADIENTS[name] for name in self.inputs)

    @property
    def gates(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type: float32, and bfloat16 where a projection's channels stand behind beta or w."""
        sizes = {"HO": self.heads_v, "K": self.dim, "V": self.dim}
        made = {}
        for name, axes in GATES[self.operation].items():
            shape = (self.total, *(sizes[axis] for axis in axes))
            made[name] = shape, "bfloat16" if len(axes) == 2 and name != "g" else "float32"
        return made

    def tensors(self, graph: pygraph) -> dict[str, Any]:
        t, d = self.total, self.dim
        shapes = {"q": (t, self.heads_q, d), "k": (t, self.heads_q, d), "v": (t, self.heads_v, d)}
        made = {name: graph.tensor(dim, name=name) for name, dim in shapes.items()}
        for name, (shape, dtype) in self.gates.items():
            made[name] = graph.tensor(shape, data_type=dtype, name=name)
        made["cu_seqlens"] = graph.tensor((len(self.lengths) + 1,), data_type="int32", name="cu_seqlens")
        return made

    def forward(self) -> tuple[pygraph, dict[str, Any]]:
        graph = cudnn_jax.pygraph(io_data_type="bfloat16")
        tensors, options = self.tensors(graph), {}
        if self.decode:
            shape = (len(self.lengths), self.heads_v, self.dim, self.dim)
            tensors["initial_state"] = graph.tensor(shape, data_type="float32", name="initial_state")
            options = {"output_final_state": True, "overwrite_initial_state": True}
        getattr(graph, self.operation)(**tensors, use_qk_l2norm=True, **options)
        return graph, tensors | _asked(graph)

    def backward(self) -> tuple[pygraph, dict[str, Any]]:
        graph = cudnn_jax.pygraph(io_data_type="bfloat16")
        tensors = self.tensors(graph)
        tensors["dO"] = graph.tensor((self.total, self.heads_v, self.dim), name="dO")
        getattr(graph, f"{self.operation}_bwd")(**tensors, use_qk_l2norm=True)
        return graph, tensors | _asked(graph)

    def work(self, direction: str) -> tuple[float, float]:
        """(operations, bytes): those of the chunked form, and each operand and result moved once."""
        rows, d, heads = self.total, self.dim, self.heads_v
        if self.decode:
            return 8.0 * rows * heads * d * d, 8.0 * len(self.lengths) * heads * d * d
        gates = sum(math.prod(shape) * BYTES[dtype] for shape, dtype in self.gates.values())
        # Of a chunk and head: K K^T, Q K^T and the inverse applied, and products with the state.
        forward = 2.0 * rows * heads * (3 * CHUNK * d + 3 * d * d)
        whole = 2.0 * rows * d * (2 * self.heads_q + 2 * heads) + gates
        # The backward reads what the forward read and dO, and writes as much as the forward read.
        back = 2.0 * rows * d * (4 * self.heads_q + 3 * heads) + 2 * gates
        operations = {"forward": forward, "backward": 3 * forward, "forward+backward": 4 * forward}
        moved = {"forward": whole, "backward": back, "forward+backward": whole + back}
        return operations[direction], moved[direction]


def _asked(graph: pygraph) -> dict[str, Any]:
    return {name: tensor.set_output(True) for name, tensor in graph.nodes[0].outputs.items()}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A peer's launches by direction; `finish` makes what they return comparable with ours, and is not timed."""

    launches: Mapping[str, Launch]
    finish: Callable[[dict[str, Any]], dict[str, Any]] = dict


Peers = Callable[[Case, Mapping[str, Any]], dict[str, Peer]]
"""A case and its data -> the peers of it by name."""


# ---- Our plans --------------------------------------------------------------------------------------------


def settings(facts: LinearFacts, target: Target) -> dict[str, list[Knobs]]:
    """Every setting of our engines by engine, also on a machine that cannot compile them."""
    chunked = CHUNKED[facts.operation]
    found = {chunked.name: chunked.programs[facts.direction].settings(facts, target)}
    if facts.direction == "fwd":
        found[recurrent(facts.operation)] = gdn_recurrent_cutile.settings(facts, target)
    return found


def recurrent(operation: str) -> str:
    """The name of an operation's engine that works token by token."""
    return f"cutile_{operation}_recurrent"


def plans(graph: pygraph, target: Target) -> list[str]:
    """The names of our plans, the first ranked in front, also on a machine that cannot compile them."""
    graph.freeze()
    facts = analyze(graph)
    listed = [
        PlanConfig(0, knobs, engine=engine) for engine, found in settings(facts, target).items() for knobs in found
    ]
    return [plan.name for plan in placement.arrange("linear_attention", facts, listed)]


def makers(case: Case) -> dict[str, Callable[[], tuple[pygraph, dict[str, Any]]]]:
    """The graphs of a case, by direction."""
    return {"forward": case.forward} if case.decode else {"forward": case.forward, "backward": case.backward}


def candidates_of(case: Case, make: Callable[[], tuple[pygraph, dict[str, Any]]], target: Target) -> list[str]:
    """The plans that are timed: those of the token-by-token engine only where sequences are short."""
    slow = () if case.decode else (recurrent(case.operation),)
    return [name for name in plans(make()[0], target) if not name.startswith(slow)]


def programs_of(cases: Sequence[Case], target: Target) -> Iterator[tuple[pygraph, str]]:
    """Every program that a full run over cases asks for by name."""
    for case in cases:
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
    made = {
        "q": normal(t, case.heads_q, d).bfloat16(),
        "k": normal(t, case.heads_q, d).bfloat16(),
        "v": normal(t, case.heads_v, d).bfloat16(),
    }
    for name, (shape, dtype) in case.gates.items():
        raw = normal(*shape)
        gate = torch.nn.functional.logsigmoid(raw + 3.0) if name == "g" else torch.sigmoid(raw)
        made[name] = gate.to(getattr(torch, dtype))
    return made | {
        "cu_seqlens": torch.tensor(starts, device="cuda"),
        "dO": normal(t, case.heads_v, d).bfloat16(),
        "initial_state": normal(len(case.lengths), case.heads_v, d, d) if case.decode else None,
    }


def by_sequence(case: Case, data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Tensors of equally long sequences with a batch in front, of others in a batch of one."""
    batch = len(case.lengths) if len(set(case.lengths)) == 1 else 1
    return {name: data[name].view(batch, case.total // batch, *data[name].shape[1:]) for name in names}


def reference(case: Case, data: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Results in float32 by the reference engine, which float64 judges in the tests; groups of heads in turn."""
    by_head = {name: to_jax(tensor) for name, tensor in data.items() if tensor is not None}
    options = {"cu_seqlens": by_head.pop("cu_seqlens"), "use_qk_l2norm": True, "implementation": "xla"}
    call = getattr(cudnn_jax, case.operation)

    @jax.jit
    def run(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        given = {name: x.astype(jnp.float32) for name, x in given.items()}
        tokens = [given[name] for name in case.inputs]
        if case.decode:
            made = call(*tokens, **options, initial_state=given["initial_state"], output_final_state=True)
            return dict(zip(("O", "final_state"), made, strict=True))
        out, back = jax.vjp(lambda *arrays: call(*arrays, **options)[0], *tokens)
        return dict(zip(("O", *case.gradients), (out, *back(given["dO"])), strict=True))

    turns = math.gcd(case.heads_q, 1 << (case.total * case.heads_v * case.dim // AT_ONCE).bit_length())
    groups = zip(*(jnp.split(x, turns, axis=1) for x in by_head.values()), strict=True)
    made = [run(dict(zip(by_head, group, strict=True))) for group in groups]
    return {name: jnp.concatenate([each[name] for each in made], axis=1) for name in made[0]}


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
    peers: Sequence[str],
    chosen: Mapping[str, str],
    errors: Mapping[tuple[str, str], dict[str, float]],
    rounds: int,
    seed: int,
) -> None:
    timed = in_turns({"|".join(key): each.ms for key, each in clocks.items()}, rounds, 10.0, seed)
    timings = {tuple(key.split("|")): timing for key, timing in timed.items()}
    for peer in peers:
        if ("forward", peer) in timings and ("forward+backward", peer) in timings:
            rest = timings["forward+backward", peer].rounds - timings["forward", peer].rounds
            timings["backward", peer] = Timing(rest)  # it reuses what its forward saved
    for direction in DIRECTIONS:
        beside = {peer: timings[direction, peer] for peer in peers if (direction, peer) in timings}
        for (where, name), timing in timings.items():
            if where != direction or name in peers:
                continue
            report.add(
                timing,
                beside,
                case=str(case),
                direction=direction,
                plan=name,
                clock=clock,
                chosen=name == chosen.get(direction),
                roofline_ms=report.ceilings.roofline_ms(*case.work(direction)),
                error=errors.get((direction, name)),
            )


def run_case(case: Case, peers_of: Peers, report: Report, rounds: int, seed: int) -> None:
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
    peers = peers_of(case, data)
    waits: Clocks = {}
    kernels: Clocks = {}
    for name, peer in peers.items():
        for direction, launch in peer.launches.items():
            try:
                report.peer_errors[f"{case}, {direction}, {name}"] = errors_of(peer.finish(launch()), want)
                waits[direction, name] = Eager(launch)
                kernels[direction, name] = Replay(launch)
            except Exception as error:  # whatever stops a peer is not ours
                where = {"case": str(case), "direction": direction, "name": name}
                report.left_out.append({**where, "reason": harness.one_line(error)})
                continue
            launches[direction][name] = launch
    for direction, group in launches.items():
        kernels |= {(direction, name): Replay(launch) for name, launch in group.items() if name not in peers}
    add_rows(report, case, "kernel", kernels, [*peers], chosen, errors, rounds, seed)
    kernels.clear()
    for direction, name in chosen.items():
        made_of = makers(case) if direction == "forward+backward" else {direction: makers(case)[direction]}
        waits[direction, name] = Jitted([(*make(), chosen[part]) for part, make in made_of.items()], data)
    add_rows(report, case, "wall", waits, [*peers], chosen, errors, rounds, seed)
    waits.clear()
    if case.decode:
        return
    report.memory[str(case)] = {name: peak_bytes(launch) for name, launch in launches["forward+backward"].items()}
    torch.cuda.synchronize()


def main(name: str, cases: Sequence[Case], peers_of: Peers, description: str | None, argv: list[str]) -> int:
    """The exit status: 1 if a plan was wrong or nothing was timed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=description)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, help="of the random inputs (default: a fresh one)")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="those that are timed beside (default: all)")
    args = parser.parse_args(argv)

    def chosen(case: Case, data: Mapping[str, Any]) -> dict[str, Peer]:
        if args.peers == []:
            return {}
        return {name: peer for name, peer in peers_of(case, data).items() if args.peers is None or name in args.peers}

    console = Console(width=None if sys.stdout.isatty() else 200)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    report = Report(name, seed, harness.measure_ceilings(False))
    for case in cases:
        if args.only in str(case):
            run_case(case, chosen, report, args.rounds, seed)
            report.write(args.out)
    report.show(console)
    for held, found in report.memory.items():
        console.print(
            f"memory of {held}: " + ", ".join(f"{each} {size / 2**20:,.0f} MiB" for each, size in found.items())
        )
    return 1 if report.wrong or not report.rows else 0
