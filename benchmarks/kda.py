"""`python -m benchmarks kda`: Kimi Delta Attention and Gated DeltaNet 2 beside flash-linear-attention, in one
interleaved run on one GPU.

`linear_attention` beside this file says what is timed. Both sides take the natural logarithm of each channel's decay,
in float32. The peer runs twice: as it is, and with `safe_gate`, by which its caller promises that no gate is below -5;
ours makes do without the promise. Its Gated DeltaNet 2 needs as many heads of q and k as of v: where there are fewer,
it gets them repeated before anything is timed, and its gradients of them are added up behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import gdn, linear_attention, peers_fla
from benchmarks.linear_attention import Case, Peer
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target

CASES = tuple(
    replace(case, name=f"{operation} {case}", operation=operation)
    for operation in ("kda", "gdn2")
    for case in gdn.CASES
)


def programs(target: Target) -> Iterator[tuple[pygraph, str]]:
    """Every program that the full run asks for by name."""
    return linear_attention.programs_of(CASES, target)


def peers(case: Case, data: Mapping[str, Any]) -> dict[str, Peer]:
    from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    if case.operation == "kda":
        make = partial(peers_fla.peer, case, data)
        chunks, step = chunk_kda, fused_recurrent_kda
    else:
        make = partial(peers_fla.peer, case, data, names={"beta": "b"}, equal_heads=True)
        chunks, step = chunk_gdn2, fused_recurrent_gdn2
    if case.decode:
        return {peers_fla.NAME: make(step)}
    return {peers_fla.NAME: make(chunks), f"{peers_fla.NAME} safe_gate": make(partial(chunks, safe_gate=True))}


def main(argv: list[str]) -> int:
    return linear_attention.main("kda", CASES, peers, __doc__, argv)
