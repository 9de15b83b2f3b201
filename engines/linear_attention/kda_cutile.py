"""The cuTile engines of Kimi Delta Attention and Gated DeltaNet 2, chunk by chunk."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from cudnn_jax.engines.linear_attention import kda_backward_cutile, kda_forward_cutile
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_cutile import CutileGdn


class CutileKda(CutileGdn):
    """As `CutileGdn`, with a gate for each key channel."""

    name = "cutile_kda"
    served = dataclasses.replace(CutileGdn.served, sm_lo=90, sm_hi=119)
    most_keys: ClassVar[dict[str, dict[int, int]]] = {"fwd": {90: 128}, "bwd": {90: 128}}
    programs: ClassVar[dict[str, Any]] = {"fwd": kda_forward_cutile, "bwd": kda_backward_cutile}

    def _most_chunks(self, facts: LinearFacts) -> int:
        """Parts of the keys share the first axis of a grid as well."""
        return super()._most_chunks(facts) // max(-(-facts.key_dim // kda_backward_cutile.FEWEST_KEYS), 1)


class CutileGdn2(CutileKda):
    """As `CutileKda`, with beta for each key channel and w for each value column. On sm_100 its image for strong gates
    keeps registers in local memory, and with few of them images of `kda_prepare` were wrong on an H200: not served."""

    name = "cutile_gdn2"
    served = dataclasses.replace(CutileKda.served, sm_hi=90)
