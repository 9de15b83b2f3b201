"""`python -m benchmarks sdpa`: every attention plan of this device beside the peers that are installed.

Forward runs each plan of an inference call. Forward and backward together run each backward plan behind the forward
plan that leads, and each other forward plan (which then writes its logsumexp) before the backward plan that leads.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import cudnn_jax
from benchmarks import harness
from benchmarks.comparison import Benchmark, Comparison
from benchmarks.harness import Effort, Function
from benchmarks.report import Report
from cudnn_jax.ops.sdpa import BACKWARD, FORWARD, SdpaConfig

FORWARD_ONLY, BOTH = "forward", "forward+backward"


@dataclasses.dataclass(frozen=True)
class Case:
    """bfloat16 self-attention: B, S, N query heads, NK key-value heads, D."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False

    def __str__(self) -> str:
        heads = f"H{self.heads}" + ("" if self.heads == self.kv_heads else f"/{self.kv_heads}")
        return f"B{self.batch} S{self.length} {heads} D{self.head_dim} {'causal' if self.causal else 'full'}"

    @property
    def pairs(self) -> int:
        """Query-key pairs that are kept, in one head."""
        return self.length * (self.length + 1) // 2 if self.causal else self.length**2

    def work(self, direction: str) -> tuple[float, float]:
        """Floating-point operations (the backward forms the scores again: 5 products to 2) and bytes moved at least."""
        flops = 4.0 * self.batch * self.heads * self.pairs * self.head_dim
        q_bytes = 2.0 * self.batch * self.length * self.heads * self.head_dim
        kv_bytes = q_bytes * self.kv_heads / self.heads
        if direction == FORWARD_ONLY:
            return flops, 2 * q_bytes + 2 * kv_bytes
        return 3.5 * flops, 4 * q_bytes + 4 * kv_bytes


SHAPES = (
    (4, 4096, 16, 16, 128),
    (4, 4096, 16, 16, 64),
    (4, 4096, 16, 16, 256),
    (1, 16384, 64, 8, 128),
    (16, 1024, 16, 16, 128),
)
QUICK_SHAPES = ((2, 64, 4, 4, 32), (1, 128, 4, 2, 64))
TOLERANCE = {"out": 5e-3, "d_query": 1.5e-2, "d_key": 1.5e-2, "d_value": 1.5e-2}


# ---- Candidates: functions of (query, key, value, d_out) --------------------------------------------------


def forward_plan(case: Case, plan: str | None) -> Function:
    def run(q: Any, k: Any, v: Any, _: Any) -> Any:
        return (cudnn_jax.sdpa(q, k, v, is_causal=case.causal, implementation=plan),)

    return run


def both_plans(case: Case, forward: str | None, backward: str | None) -> Function:
    """The operation and its gradient with a plan pinned for each, which `implementation` alone cannot say."""
    config = SdpaConfig(
        scale=case.head_dim**-0.5,
        alignment="top_left",
        left=None,
        right=0 if case.causal else None,
        deterministic=False,
        implementation=forward,
        stats=True,
    )

    def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        operands = {"query": q, "key": k, "value": v}
        made = FORWARD.bind(config, operands)
        operands |= {"out": made["out"], "lse": made["lse"], "d_out": d_out}
        grads = BACKWARD.bind(dataclasses.replace(config, implementation=backward), operands)
        return made["out"], grads["d_query"], grads["d_key"], grads["d_value"]

    return run


def plans(case: Case, direction: str, arguments: Any) -> tuple[dict[str, Function], str]:
    """Our candidates by name, the one that runs by default, and nothing that is ranked twice."""
    if direction == FORWARD_ONLY:
        row = _explained(forward_plan(case, None), arguments)["sdpa_fwd"]
        return {name: forward_plan(case, name) for name in row["plans"]}, row["plan"]
    rows = _explained(both_plans(case, None, None), arguments)
    forward, backward = rows["sdpa_fwd"], rows["sdpa_bwd"]
    pairs = [(forward["plan"], name) for name in backward["plans"]]
    pairs += [(name, backward["plan"]) for name in forward["plans"] if name != forward["plan"]]
    named = {f"{first} + {second}": both_plans(case, first, second) for first, second in pairs}
    return named, f"{forward['plan']} + {backward['plan']}"


def _explained(fn: Function, arguments: Any) -> dict[str, Any]:
    return {row["operation"]: row for row in cudnn_jax.explain(fn, *arguments).rows}


def _flash_attention_3() -> Callable[..., Any]:
    mha = importlib.import_module("flash_attn3_jax").flash_mha
    return lambda q, k, v, causal: mha(q, k, v, is_causal=causal)


def _jax_nn(implementation: str) -> Callable[[], Callable[..., Any]]:
    def attend(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)

    return lambda: attend


PEERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "jax.nn cudnn": _jax_nn("cudnn"),
    "jax.nn xla": _jax_nn("xla"),
    "flash-attn3-jax": _flash_attention_3,
}


def peers(case: Case, direction: str) -> tuple[dict[str, Function], dict[str, str]]:
    """The peers that can be tried here, and why the others are not."""
    found: dict[str, Function] = {}
    left_out: dict[str, str] = {}
    for name, load in PEERS.items():
        reason = _too_large(case, direction) if name == "jax.nn xla" else None
        try:
            attend = load()
        except ImportError as error:
            reason = harness.one_line(error)
        if reason:
            left_out[name] = reason
            continue
        found[name] = _peer(attend, case.causal, direction)
    return found, left_out


def _peer(attend: Callable[..., Any], causal: bool, direction: str) -> Function:
    def forward(q: Any, k: Any, v: Any, _: Any) -> Any:
        return (attend(q, k, v, causal),)

    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, causal), q, k, v)
        return out, *pull(d_out)

    return forward if direction == FORWARD_ONLY else both


def _too_large(case: Case, direction: str) -> str | None:
    """jax.nn "xla" holds whole score matrices: about 2 in float32 forward, 4 with the backward."""
    scores = 4 * case.batch * case.heads * case.length**2
    needed = scores * (2 if direction == FORWARD_ONLY else 4)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if needed > 0.7 * limit:
        return f"holds score matrices of about {needed / 1e9:.0f} GB, the device has {limit / 1e9:.0f}"
    return None


# ---- Reference --------------------------------------------------------------------------------------------


def reference(case: Case, arguments: Any) -> dict[str, jax.Array]:
    """Plain attention and its gradient in float32, one query head at a time."""
    group = case.heads // case.kv_heads

    def head(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.matmul(q, k.T, precision="highest") * case.head_dim**-0.5
        if case.causal:
            rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            scores = jnp.where(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) <= rows, scores, -jnp.inf)
        return jnp.matmul(jax.nn.softmax(scores), v, precision="highest")

    def head_and_gradients(arrays: Any) -> Any:
        q, k, v, d_out = (x.astype(jnp.float32) for x in arrays)
        out, pull = jax.vjp(head, q, k, v)
        return out, *pull(d_out)

    @jax.jit
    def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        by_head = [_heads_first(x, repeats) for x, repeats in ((q, 1), (k, group), (v, group), (d_out, 1))]
        return jax.lax.map(head_and_gradients, by_head)

    out, d_query, d_key, d_value = run(*arguments)

    def back(x: jax.Array, groups: int) -> jax.Array:
        split = x.reshape(case.batch, case.heads // groups, groups, case.length, case.head_dim).sum(2)
        return jnp.swapaxes(split, 1, 2)

    return {
        "out": back(out, 1),
        "d_query": back(d_query, 1),
        "d_key": back(d_key, group),
        "d_value": back(d_value, group),
    }


def _heads_first(x: jax.Array, repeats: int) -> jax.Array:
    heads = jnp.repeat(jnp.swapaxes(x, 1, 2), repeats, axis=1)
    return heads.reshape(-1, *heads.shape[2:])


# ---- The run ----------------------------------------------------------------------------------------------


def run_case(case: Case, report: Report, effort: Effort, seed: int) -> None:
    arguments = draw(case, seed)
    want = reference(case, arguments)
    for direction in (FORWARD_ONLY, BOTH):
        ours, chosen = plans(case, direction, arguments)
        others, absent = peers(case, direction)
        report.left_out += [
            {"case": str(case), "direction": direction, "name": name, "reason": reason}
            for name, reason in absent.items()
        ]
        Comparison(
            case=str(case),
            direction=direction,
            arguments=arguments,
            ours=ours,
            peers=others,
            chosen=chosen,
            want=want,
            tolerance=TOLERANCE,
            work=case.work(direction),
        ).run(report, effort, seed)


def draw(case: Case, seed: int) -> tuple[jax.Array, ...]:
    q_shape = (case.batch, case.length, case.heads, case.head_dim)
    kv_shape = (case.batch, case.length, case.kv_heads, case.head_dim)
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def host_time(report: Report, effort: Effort, seed: int) -> None:
    """What one execution costs the host inside our handler, on a shape too small to keep the device busy."""
    case = Case(1, 64, 1, 1, 64, causal=True)
    arguments = draw(case, seed)
    for direction in (FORWARD_ONLY, BOTH):
        _, chosen = plans(case, direction, arguments)
        fn = forward_plan(case, None) if direction == FORWARD_ONLY else both_plans(case, None, None)
        where = {"case": str(case), "direction": direction}
        try:
            timing = harness.handler_time(jax.jit(fn), arguments, calls=500, rounds=effort.rounds)
        except jax.errors.JaxRuntimeError as error:
            report.wrong.append({**where, "name": chosen, "reason": harness.one_line(error)})
            continue
        if timing is None:
            reason = "no handler ran: the plan is inlined, or replayed from a captured graph"
            report.left_out.append({**where, "name": f"host time of {chosen}", "reason": reason})
            continue
        report.add(timing, {}, plan=chosen, clock="host", chosen=True, **where)


def cases(quick: bool) -> list[Case]:
    return [Case(*shape, causal=causal) for shape in (QUICK_SHAPES if quick else SHAPES) for causal in (True, False)]


def main(argv: list[str]) -> int:
    return Benchmark("sdpa", __doc__, cases(quick=False), cases(quick=True), run_case, host_time).main(argv)
