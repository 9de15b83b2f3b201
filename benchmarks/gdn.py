"""`python -m benchmarks gdn`: Gated DeltaNet beside flash-linear-attention, in one interleaved run on one GPU.

`linear_attention` beside this file says what is timed. The peer refuses its backward on Hopper with some releases of
Triton, which make it wrong; it is timed all the same, as nothing else is there, and its errors stand in the rows of the
JSON's `peer_errors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks import linear_attention, peers_fla
from benchmarks.linear_attention import Case, Peer
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target

_PACKED = tuple(int(length) for length in np.random.default_rng(2024).integers(128, 2049, 32))
CASES = (
    Case("2 x 8192, 16 heads", (8192, 8192), 16, 16),
    Case("1 x 8192, 16 q and 32 v heads", (8192,), 16, 32),
    Case("1 x 65536, 16 heads", (65536,), 16, 16),
    Case("32 of 128 to 2048, 16 heads", _PACKED, 16, 16),
    Case("decode 256 x 1, 32 heads", (1,) * 256, 32, 32, decode=True),
    Case("decode 256 x 8, 32 heads", (8,) * 256, 32, 32, decode=True),
)


def programs(target: Target) -> Iterator[tuple[pygraph, str]]:
    """Every program that the full run asks for by name."""
    return linear_attention.programs_of(CASES, target)


def peers(case: Case, data: Mapping[str, Any]) -> dict[str, Peer]:
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True  # what its refusal asks
    call = fused_recurrent_gated_delta_rule if case.decode else chunk_gated_delta_rule
    return {peers_fla.NAME: peers_fla.peer(case, data, call)}


def main(argv: list[str]) -> int:
    return linear_attention.main("gdn", CASES, peers, __doc__, argv)
