"""flash-linear-attention's operations as peers of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.linear_attention import Case, Peer, by_sequence

NAME = "flash-linear-attention"


def peer(
    case: Case,
    data: Mapping[str, Any],
    call: Callable[..., Any],
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    equal_heads: bool = False,
) -> Peer:
    """`call` has other `names` for some operands; with `equal_heads` it needs as many heads of q and k as of v."""

    def named(tensors: Mapping[str, Any], **options: Any) -> Any:
        shaped = by_sequence(case, tensors, *case.inputs)
        return call(**{names.get(name, name): x for name, x in shaped.items()}, use_qk_l2norm_in_kernel=True, **options)

    if case.decode:
        return _decoding(case, data, named)
    return _training(case, data, named, case.heads_v // case.heads_q if equal_heads else 1)


def _training(case: Case, data: Mapping[str, Any], call: Callable[..., Any], repeats: int) -> Peer:
    import torch

    # A dense batch needs no table of chunks: the peer is given the form that is faster for it.
    starts = None if len(set(case.lengths)) == 1 else data["cu_seqlens"].long()
    leaves = {name: data[name].detach().clone() for name in case.inputs}
    for name in ("q", "k"):
        leaves[name] = leaves[name].repeat_interleave(repeats, dim=1)
    for leaf in leaves.values():
        leaf.requires_grad_()
    d_out = by_sequence(case, data, "dO")["dO"]

    def run() -> Any:
        # Views within: their gradients run on the stream that they were made on, which may be capturing.
        return call(leaves, cu_seqlens=starts)[0]

    def forward() -> Any:
        with torch.no_grad():
            return {"O": run().view(case.total, case.heads_v, case.dim)}

    def both() -> Any:
        out = run()
        found = torch.autograd.grad(out, list(leaves.values()), d_out)
        gradients = dict(zip(case.gradients, found, strict=True))
        return {"O": out.detach().view(case.total, case.heads_v, case.dim)} | gradients

    def finish(made: dict[str, Any]) -> dict[str, Any]:
        """Gradients of heads that were repeated, added up."""
        shared = {"dQ", "dK"} & made.keys()
        return made | {name: made[name].unflatten(1, (case.heads_q, repeats)).float().sum(2) for name in shared}

    return Peer({"forward": forward, "forward+backward": both}, finish if repeats > 1 else dict)


def _decoding(case: Case, data: Mapping[str, Any], call: Callable[..., Any]) -> Peer:
    state = data["initial_state"].transpose(-1, -2).contiguous()  # (N, HV, K, V) there

    def step() -> Any:
        out, after = call(data, initial_state=state, output_final_state=True)
        return {"O": out.view(case.total, case.heads_v, case.dim), "final_state": after}

    def finish(made: dict[str, Any]) -> dict[str, Any]:
        return made | {"final_state": made["final_state"].transpose(-1, -2)}

    return Peer({"forward": step}, finish)
