"""Where cuDNN would take a pointwise graph and answer otherwise than its operations are defined.

What is said of cuDNN here was seen on an H200 with cuDNN 9.19; tests/gpu holds the cases.
"""

from __future__ import annotations

from cudnn_jax.engines.pointwise.facts import PointwiseFacts
from cudnn_jax.engines.target import Target

_LEAST_RANK = 3


def mismatch(facts: PointwiseFacts, target: Target) -> str | None:
    """The reason not to ask cuDNN, or None."""
    if facts.least_rank < _LEAST_RANK:
        # A fused graph of matrices wrote its first row alone, and that one wrong.
        return f"rank {facts.least_rank}, asked from rank {_LEAST_RANK}"
    if facts.spread_first:
        # Past the first index it read behind such an operand.
        return f"{facts.spread_first} broadcast along axis 0, serves broadcasts along the others"
    if 0 in facts.index_axes:
        # Every index along the first axis was 0.
        return "gen_index along axis 0, asked from axis 1"
    return None
