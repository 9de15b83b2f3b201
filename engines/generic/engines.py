"""The generic reference engine, which the manifest names."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines import ragged
from cudnn_jax.engines.base import Artifact, BaseEngine, Inline, PlanConfig
from cudnn_jax.engines.generic import limits
from cudnn_jax.engines.generic.facts import GenericFacts
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, pygraph


class GenericReference(BaseEngine):
    """A graph node by node in plain JAX, inlined into the caller's program, on every platform."""

    name = "xla"
    kind = "xla"

    def configs(self, graph: pygraph, facts: GenericFacts, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        reasons = [reason] if (reason := ragged.reason(graph)) else []
        for node, compute in zip(graph.nodes, facts.compute_types, strict=True):
            if reason := limits.reason(node, compute, target):
                reasons.append(f"{node.label}: {reason}")
        if reasons:
            raise GraphNotSupportedError("; ".join(dict.fromkeys(reasons)))
        return [()]

    def build_plan(self, graph: pygraph, facts: GenericFacts, config: PlanConfig, target: Target) -> Artifact:
        from cudnn_jax.engines.generic import reference

        return Inline(ragged.padded(graph, reference.evaluator(graph, facts, target)))
