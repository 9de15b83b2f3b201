"""Small graphs that the tests of the graph share."""

from __future__ import annotations

from typing import Any

from cudnn_jax.graph import Tensor, pygraph

B, N, NK, T, S, D, DV = 2, 4, 2, 8, 16, 32, 24


def heads(graph: pygraph, name: str, b: int, n: int, t: int, d: int, **more: Any) -> Tensor:
    """(B, T, N, D) in memory, seen as (B, N, T, D)."""
    return graph.tensor((b, n, t, d), (t * n * d, d, n * d, 1), name=name, **more)


def qkv(graph: pygraph, t: int = T, s: int = S, b: int = B) -> dict[str, Tensor]:
    return {
        "q": heads(graph, "q", b, N, t, D),
        "k": heads(graph, "k", b, NK, s, D),
        "v": heads(graph, "v", b, NK, s, DV),
    }


def backward_ports(graph: pygraph, t: int = T, s: int = S) -> dict[str, Tensor]:
    return qkv(graph, t, s) | {
        "o": heads(graph, "o", B, N, t, DV),
        "dO": heads(graph, "dO", B, N, t, DV),
        "stats": graph.tensor((B, N, t, 1), data_type="float32", name="stats"),
    }


def lengths(graph: pygraph, b: int = B) -> dict[str, Any]:
    made = {name: graph.tensor((b, 1, 1, 1), data_type="int32", name=name) for name in ("seq_len_q", "seq_len_kv")}
    return made | {"use_padding_mask": True}


def masked_attention(**options: Any) -> pygraph:
    """Attention with a boolean mask, written as a bias of 0 and -inf."""
    graph = pygraph(io_data_type="bfloat16")
    ports = qkv(graph)
    mask = graph.tensor((B, 1, 1, S), data_type="bool", name="mask")
    zero, hidden = graph.scalar(0.0, "float32"), graph.scalar(float("-inf"), "float32")
    bias = graph.binary_select(zero, hidden, mask)
    out, stats = graph.sdpa(**ports, bias=bias, attn_scale=0.125, generate_stats=True, **options)
    out.set_output(True)
    stats.set_output(True)
    return graph
