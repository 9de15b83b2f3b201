"""Which of cuDNN's plans are offered, by what a comparison of their results with the reference's on a GPU found.

What was compared and was right is in neither table; `benchmarks/results` holds what was found, `operations-*.json`.
"""

from __future__ import annotations

from collections.abc import Container

from cudnn_jax.graph import Node, pygraph

WRONG = {
    "INSTANCE_NORM_BACKWARD": (
        "cuDNN 9.19.0 summed one instance of a batch of 4 twice in DScale and left another out, on an H200"
    ),
    "MOE_GROUPED_MATMUL GATHER": "cuDNN 9.19.0's kernel accessed memory that is none of its operands', on an H200",
}
"""A node type, or a type and its mode -> what went wrong. These plans are never offered."""

NOT_COMPARED = frozenset(
    {
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
"""Node types, or types and their mode, whose results were not compared yet: these plans are opt-in."""


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
    """What the tables may call a node."""
    mode = node.params.get("mode")
    return (node.type, f"{node.type} {mode}") if mode else (node.type,)


def _among(graph: pygraph, names: Container[str]) -> list[str]:
    return sorted({name for node in graph.nodes for name in names_of(node) if name in names})
