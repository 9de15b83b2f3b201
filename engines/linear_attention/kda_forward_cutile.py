"""The cuTile program of Kimi Delta Attention's and Gated DeltaNet 2's forward."""

from __future__ import annotations

from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_launch import C, Given, Knobs, power
from cudnn_jax.engines.linear_attention.kda_launch import KdaLaunch, Prepared, channels
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph

_LATENCY = 2
"""Of the scan's loads."""


def settings(facts: LinearFacts, target: Target) -> list[Knobs]:
    """`values`, the columns of a state that a block of the scan keeps: narrow parts are more blocks, wide ones read a
    chunk less often; of a long state a wide part spills registers. `channels`, those of a chunk that are prepared at a
    time; `latency`, a hint of how far ahead the scan's loads are started."""
    narrow, wide = min(32, power(facts.value_dim)), min(64, power(facts.value_dim))
    # One setting whatever is packed, if bits may not depend on it.
    one = facts.batch_invariant or facts.key_dim > 128
    most = channels(facts)
    made = [(narrow, most, _LATENCY)]
    if not one:
        made += [(narrow, most, 1), (narrow, most, 3), (wide, most, _LATENCY)]
        made += [(narrow, 64, _LATENCY)] if most > 64 else []
    names = ("values", "channels", "latency")
    return [tuple(zip(names, each, strict=True)) for each in dict.fromkeys(made)]


def add_steps(builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target) -> None:
    """Appends all that gives the graph's outputs to a program."""
    _Launch(builder, graph, facts, knobs, target).add()


class _Launch(KdaLaunch):
    def add(self) -> None:
        facts = self.facts
        output = Array(facts.dtype, (facts.total, facts.heads * facts.value_dim)), self.given["O"][1]
        chunks, first_slot = self.table(output)
        self._scan(first_slot, self.prepare_channels(chunks, self.tables()))

    def _scan(self, first_slot: Given, prepared: Prepared) -> None:
        from cudnn_jax.engines.linear_attention import _kda_forward_cutile as kernels

        facts, taken = self.facts, self.taken
        first_checkpoint = self.checkpoint_rows()
        self.run(
            kernels.kda_scan,
            [
                *map(taken.get, ("v", "w", "cu_seqlens")),
                first_slot,
                *prepared[:6],
                *map(taken.get, ("initial_state", "state_indices", "O", "final_state", "state_checkpoints")),
                first_checkpoint,
            ],
            [
                *(power(facts.key_dim), self.knobs["values"], self.ratios[2], self.by_channel),
                *("initial_state" in self.given, facts.pool, "final_state" in taken),
                *(facts.overwrite, facts.checkpoint_every // C if first_checkpoint else 0, self.knobs["latency"]),
            ],
            (-(-facts.value_dim // self.knobs["values"]), facts.heads, facts.sequences),
            occupancy=1,
        )
