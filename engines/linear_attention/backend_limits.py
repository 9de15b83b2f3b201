"""The backend has no linear attention, so that it need not be asked."""

from __future__ import annotations

from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.target import Target


def mismatch(facts: LinearFacts, target: Target) -> str:
    """Why the backend cannot serve the graph."""
    return f"operation {facts.operation}, the backend has no linear attention"
