"""The norm engines that the manifest names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_jax.engines.base import Artifact, BaseEngine, Inline, PlanConfig
from cudnn_jax.engines.capabilities import Capabilities
from cudnn_jax.engines.norm.facts import NormFacts
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, data_type, pygraph

_REFERENCE = Capabilities(
    dtypes=frozenset({data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE}),
    compute=frozenset({data_type.FLOAT, data_type.DOUBLE}),
)


class NormReference(BaseEngine):
    """RMS norm in plain JAX, inlined into the caller's program: every platform, rank and axes."""

    name = "xla"
    kind = "xla"

    def configs(self, graph: pygraph, facts: NormFacts, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        reasons = [f"cannot express {', '.join(facts.unexplained)}"] if facts.unexplained else []
        reasons += [reason for dtype in facts.dtypes.values() if (reason := _REFERENCE.element_type(dtype))]
        reasons += [reason] if (reason := _REFERENCE.compute_type(facts.compute)) else []
        if reasons:
            raise GraphNotSupportedError("; ".join(dict.fromkeys(reasons)))
        return [()]

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        from cudnn_jax.engines.norm import reference

        make = reference.forward if facts.direction == "fwd" else reference.backward
        return Inline(make(facts))
