"""The attention engines that the manifest names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_jax.engines import ragged
from cudnn_jax.engines.base import Artifact, BaseEngine, Inline, PlanConfig
from cudnn_jax.engines.capabilities import Capabilities
from cudnn_jax.engines.sdpa.facts import BLOCK_MASK_TILE, SdpaFacts
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, data_type, pygraph

_REFERENCE = Capabilities(
    dtypes=frozenset(
        {
            data_type.FLOAT,
            data_type.HALF,
            data_type.BFLOAT16,
            data_type.DOUBLE,
            data_type.FP8_E4M3,
            data_type.FP8_E5M2,
        }
    ),
)


class SdpaReference(BaseEngine):
    """Blockwise attention in plain JAX, inlined into the caller's program: every platform, every option."""

    name = "xla"
    kind = "xla"

    def configs(self, graph: pygraph, facts: SdpaFacts, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        reasons = [f"cannot express {', '.join(facts.unexplained)}"] if facts.unexplained else []
        reasons += [reason for reason in (_tiles_of(facts), ragged.reason(graph)) if reason]
        reasons += [reason for dtype in facts.dtypes if (reason := _REFERENCE.element_type(dtype))]
        if reasons:
            raise GraphNotSupportedError("; ".join(reasons))
        return [()]

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        from cudnn_jax.engines.sdpa import reference

        make = reference.forward if facts.direction == "fwd" else reference.backward
        return Inline(ragged.padded(graph, make(facts, target.platform)))


def _tiles_of(facts: SdpaFacts) -> str | None:
    """Why a block mask has not one bit for each tile, or None."""
    if facts.block_mask_dim is None:
        return None
    rows, keys = (-(-length // BLOCK_MASK_TILE) for length in (facts.q_len, facts.kv_len))
    whole = (facts.batch, facts.q_heads, rows, -(-keys // 8))
    given = facts.block_mask_dim
    if len(given) == 4 and given[2:] == whole[2:] and all(x in (1, y) for x, y in zip(given, whole, strict=True)):
        return None
    return f"block_mask {given}, serves {whole}: a bit for each tile of {BLOCK_MASK_TILE} rows and keys"
