"""The cuTile program of Kimi Delta Attention's and Gated DeltaNet 2's forward."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention import gdn_forward_cutile
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_launch import C, Given, Knobs, power
from cudnn_jax.engines.linear_attention.kda_launch import KdaLaunch, Prepared
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph

_LATENCY = {1: 3, 2: 1}
"""Of the scan's loads, by its blocks on a multiprocessor."""


settings = gdn_forward_cutile.settings


def add_steps(builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target) -> None:
    """Appends all that gives the graph's outputs to a program."""
    _Launch(builder, graph, facts, knobs, target).add()


class _Launch(KdaLaunch):
    def add(self) -> None:
        facts = self.facts
        output = Array(facts.dtype, (facts.total, facts.heads * facts.value_dim)), self.given["O"][1]
        order = self.order(self.parts * facts.heads, self.knobs["blocks"])
        chunks, first_slot = self.table(output, order)
        self._scan([first_slot, order], self.prepare_channels(chunks, first_slot, self.tables()))

    def _scan(self, walks: Sequence[Given | None], prepared: Prepared) -> None:
        from cudnn_jax.engines.linear_attention import _kda_forward_cutile as kernels

        facts, taken, blocks = self.facts, self.taken, self.knobs["blocks"]
        first_checkpoint = self.checkpoint_rows()
        self.run(
            kernels.kda_scan,
            [
                *map(taken.get, ("v", "w", "cu_seqlens")),
                *walks,
                *prepared[:6],
                *map(taken.get, ("initial_state", "state_indices", "O", "final_state", "state_checkpoints")),
                first_checkpoint,
            ],
            [
                *(power(facts.key_dim), self.knobs["values"], self.ratios[2], self.by_channel),
                *("initial_state" in self.given, facts.pool, "final_state" in taken),
                *(facts.overwrite, facts.checkpoint_every // C if first_checkpoint else 0),
                *(_LATENCY[blocks], walks[1] is not None),
            ],
            (self.parts, facts.heads, facts.sequences),
            occupancy=blocks,
        )
