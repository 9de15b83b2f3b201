"""The cuTile program of Kimi Delta Attention's and Gated DeltaNet 2's forward."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_launch import C, Given, Knobs, power
from cudnn_jax.engines.linear_attention.kda_launch import KdaLaunch, Prepared
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph

_LATENCY = {1: 3, 2: 1}
"""Of the scan's loads, by its blocks on a multiprocessor."""


def settings(facts: LinearFacts, target: Target) -> list[Knobs]:
    """`values`, the columns of a state that a block of the scan keeps, and its `blocks` on a multiprocessor at a time,
    as in `gdn_forward_cutile`."""
    assert target.sm_count is not None
    narrow, wide = min(32, power(facts.value_dim)), min(64, power(facts.value_dim))
    few = facts.sequences * facts.heads * -(-facts.value_dim // narrow) <= target.sm_count
    made = [(narrow, 1), (wide, 2)] if few else [(wide, 2), (narrow, 1)]
    # One setting whatever is packed, if bits may not depend on it.
    alone = facts.batch_invariant or facts.key_dim > 128
    return [(("values", values), ("blocks", blocks)) for values, blocks in ([(narrow, 1)] if alone else made)]


def add_steps(builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target) -> None:
    """Appends all that gives the graph's outputs to a program."""
    _Launch(builder, graph, facts, knobs, target).add()


class _Launch(KdaLaunch):
    def add(self) -> None:
        facts = self.facts
        output = Array(facts.dtype, (facts.total, facts.heads * facts.value_dim)), self.given["O"][1]
        parts, blocks = -(-facts.value_dim // self.knobs["values"]), self.knobs["blocks"]
        order = self.order(parts * facts.heads, blocks)
        chunks, first_slot = self.table(output, order)
        self._scan([first_slot, order], self.prepare_channels(chunks, self.tables()), (parts, blocks))

    def _scan(self, walks: Sequence[Given | None], prepared: Prepared, grid: tuple[int, int]) -> None:
        from cudnn_jax.engines.linear_attention import _kda_forward_cutile as kernels

        facts, taken, (parts, blocks) = self.facts, self.taken, grid
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
            (parts, facts.heads, facts.sequences),
            occupancy=blocks,
        )
