"""Where cuDNN would take an attention graph and answer otherwise than the operation is defined."""

from __future__ import annotations

from cudnn_jax.engines.sdpa.facts import SdpaFacts
from cudnn_jax.engines.target import Target


def mismatch(facts: SdpaFacts, target: Target) -> str | None:
    """The reason not to ask cuDNN, or None."""
    if 0 in (facts.batch, facts.q_len, facts.kv_len):
        return f"length 0 in B{facts.batch} T{facts.q_len} S{facts.kv_len}, serves lengths of at least 1"
    if "dStats" in facts.ports:
        return "a cotangent of the residual, serves none"
    return None
