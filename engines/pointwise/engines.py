"""The reference engine of pointwise graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_jax.engines.base import Artifact, BaseEngine, Inline, PlanConfig
from cudnn_jax.engines.pointwise.facts import PointwiseFacts
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, Node, data_type, pygraph

_ANY = frozenset("binary_select cmp_eq cmp_ge cmp_gt cmp_le cmp_lt cmp_neq gen_index identity".split()) | frozenset(
    "logical_and logical_not logical_or".split()
)
_NUMBERS = frozenset("abs add add_square bias ceil div floor max min mod mul neg scale sub".split())
_UNSERVED = frozenset({data_type.FP4_E2M1, data_type.FP8_E8M0})
_STORED = frozenset({data_type.FP8_E4M3, data_type.FP8_E5M2})
"""Types to keep numbers in, and not to compute in."""


class PointwiseReference(BaseEngine):
    """Every pointwise mode in plain JAX, inlined into the caller's program, on every platform."""

    name = "xla"
    kind = "xla"

    def configs(self, graph: pygraph, facts: PointwiseFacts, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        reasons = [f"cannot express {', '.join(facts.unexplained)}"] if facts.unexplained else []
        reasons += [f"dtype {dtype.value}, not served" for dtype in facts.dtypes if dtype in _UNSERVED]
        typed = [pair for pair in zip(graph.nodes, facts.compute_types, strict=True) if pair[0].type == "POINTWISE"]
        reasons += [reason for node, compute in typed if (reason := domain(node, compute))]
        if reasons:
            raise GraphNotSupportedError("; ".join(dict.fromkeys(reasons)))
        return [()]

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        from cudnn_jax.engines.pointwise import reference

        return Inline(reference.evaluator(graph, facts))


def domain(node: Node, compute: data_type) -> str | None:
    """Why a node cannot compute in its type, or None."""
    mode = node.params["mode"]
    if compute in _STORED:
        return f"{mode} with compute type {compute.value}, which only stores numbers"
    if compute.is_floating or mode in _ANY or (mode in _NUMBERS and compute is not data_type.BOOLEAN):
        return None
    return f"{mode} with compute type {compute.value}, needs a {'number' if mode in _NUMBERS else 'floating'} type"
