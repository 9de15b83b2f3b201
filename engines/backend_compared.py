"""Which of cuDNN's plans are offered, by what a comparison of their results with the reference's on a GPU found.

What was compared and was right is in neither table; `benchmarks/results` holds what was found, `operations-*.json`.
"""

from __future__ import annotations

from collections.abc import Container

from cudnn_jax.engines.sdpa.facts import HALF_BESIDE_BFLOAT16, SEVERAL_TYPES, mixed_types, options_of
from cudnn_jax.graph import Node, pygraph

WRONG = {
    "INSTANCE_NORM_BACKWARD": (
        "cuDNN 9.19.0 summed one instance of a batch of 4 twice in DScale and left another out, on an H200"
    ),
    **dict.fromkeys(
        (f"SDPA {HALF_BESIDE_BFLOAT16}", f"SDPA_BACKWARD {HALF_BESIDE_BFLOAT16}"),
        "cuDNN 9.19.0's results were off by several times their size, on an H200",
    ),
    "MOE_GROUPED_MATMUL GATHER": "cuDNN 9.19.0's kernel accessed memory that is none of its operands', on an H200",
}
"""What `names_of` may call a node -> what went wrong. These plans are never offered."""

_OPTIONS_NOT_COMPARED = {
    "SDPA": (
        "attn_scale_prefolded",
        "block_mask",
        "cu_seq_len_kv",
        "cu_seq_len_q",
        "dropout",
        "dropout_mask",
        "dropout_scale",
        "kv_mask",
        "offset",
        "rng_dump",
        "seed",
        SEVERAL_TYPES,
        "softmax_precision",
        "stats_use_log2",
        "unfuse_fma",
    ),
    "SDPA_BACKWARD": (
        "attn_scale_prefolded",
        "dropout",
        "dropout_mask",
        "dropout_scale",
        "dropout_scale_inv",
        "offset",
        "rng_dump",
        "seed",
        SEVERAL_TYPES,
        "softmax_precision",
    ),
}
"""Attention's node types -> which of a node's `options_of` were not compared yet, and whether several types were."""

NOT_COMPARED = frozenset(
    {
        *(f"{node} {option}" for node, options in _OPTIONS_NOT_COMPARED.items() for option in options),
        "BLOCK_SCALE_QUANTIZE",
        "CONCATENATE",
        "MOE_GROUPED_MATMUL SCATTER",
        "MOE_GROUPED_MATMUL_BWD",
        "ROPE",
        "ROPE_BACKWARD",
        "SDPA_MXFP8",
        "SDPA_MXFP8_BACKWARD",
        "TRANSPOSE",
    }
)
"""What `names_of` may call a node whose results were not compared yet: these plans are opt-in."""


def wrong(graph: pygraph) -> str | None:
    """Why cuDNN is not asked for the graph, whatever was opted in to; or None."""
    return next((f"{name}: {WRONG[name]}" for name in _among(graph, WRONG)), None)


def not_compared(graph: pygraph) -> str | None:
    """What of the graph was not compared, or None."""
    if new := _among(graph, NOT_COMPARED):
        return f"node type {new[0]}"
    # One engine of cuDNN 9.19 takes them, also where neither reads the other's result.
    products = sum(node.type == "MATMUL" for node in graph.nodes)
    return f"a graph of {products} products" if products > 1 else None


def names_of(node: Node) -> tuple[str, ...]:
    """What the tables may call a node: its type, and that with its mode or with an option of attention."""
    if node.type in _OPTIONS_NOT_COMPARED:
        words = [*options_of(node), *([mixed] if (mixed := mixed_types(node)) else [])]
    else:
        words = [mode] if (mode := node.params.get("mode")) else []
    return (node.type, *(f"{node.type} {word}" for word in words))


def _among(graph: pygraph, names: Container[str]) -> list[str]:
    return sorted({name for node in graph.nodes for name in names_of(node) if name in names})
