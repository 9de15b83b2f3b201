"""The reference engine of linear attention that the manifest names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from cudnn_jax.engines.base import Artifact, BaseEngine, Inline, PlanConfig
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, pygraph

_MODULES = {"gdn": "reference_gdn", "kda": "reference_kda", "gdn2": "reference_kda"}
"""Operation -> module of this room."""


class LinearReference(BaseEngine):
    """Chunked linear attention in plain JAX, inlined into the caller's program: every platform, every option."""

    name = "xla"
    kind = "xla"

    def configs(self, graph: pygraph, facts: LinearFacts, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        reasons = [f"cannot express {', '.join(facts.unexplained)}"] if facts.unexplained else []
        reasons += ["batch_invariant, sums may round otherwise in another batch"] if facts.batch_invariant else []
        if reasons:
            raise GraphNotSupportedError("; ".join(reasons))
        return [()]

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        reference = importlib.import_module(f"cudnn_jax.engines.linear_attention.{_MODULES[facts.operation]}")
        make = reference.forward if facts.direction == "fwd" else reference.backward
        return Inline(make(facts, target.platform))
