"""The cuTile program of Gated DeltaNet's forward. Its kernels are in `_gdn_chunks_cutile` and `_gdn_forward_cutile`."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_launch import (
    C,
    ChunkedLaunch,
    Given,
    Knobs,
    power,
    products_of_shared_memory,
)
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph


def settings(facts: LinearFacts, target: Target) -> list[Knobs]:
    """`values`, the columns of a state that a block of the scan keeps, and its `blocks` on a multiprocessor at a time.

    Narrow parts are more blocks, wide ones read q and k less often; of a long state a wide part spills registers,
    where registers hold the operands of products one of 32 columns as well.
    """
    assert target.sm_count is not None
    roomy = facts.key_dim <= 64 or products_of_shared_memory(target)
    narrow, wide = min(32 if roomy else 16, power(facts.value_dim)), min(64, power(facts.value_dim))
    few = facts.sequences * facts.heads * -(-facts.value_dim // narrow) <= target.sm_count
    made = [(narrow, 1), (wide, 2)] if few else [(wide, 2), (narrow, 1)]
    # One setting whatever is packed, if bits may not depend on it.
    alone = facts.batch_invariant or facts.key_dim > 128 or not products_of_shared_memory(target)
    fitting = [(narrow, 1)] if alone else made
    return [(("values", values), ("blocks", blocks)) for values, blocks in fitting]


def add_steps(builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target) -> None:
    """Appends all that gives the graph's outputs to a program."""
    _Launch(builder, graph, facts, knobs, target).add()


class _Launch(ChunkedLaunch):
    def add(self) -> None:
        facts = self.facts
        output = Array(facts.dtype, (facts.total, facts.heads * facts.value_dim)), self.given["O"][1]
        order = self.order(self.parts * facts.heads, self.knobs["blocks"])
        chunks, first_slot = self.table(output, order)
        gates, rates = self.gates(chunks)
        self._scan([first_slot, order], [gates, rates, *self.prepare(chunks, gates, rates)])

    def _scan(self, walks: Sequence[Given | None], prepared: Sequence[Given | None]) -> None:
        from cudnn_jax.engines.linear_attention import _gdn_forward_cutile as kernels

        facts, taken = self.facts, self.taken
        first_checkpoint = self.checkpoint_rows()
        self.run(
            kernels.gdn_scan,
            [
                *map(taken.get, ("q", "k", "v", "cu_seqlens")),
                *walks,
                *prepared,
                *map(taken.get, ("initial_state", "state_indices", "O", "final_state", "state_checkpoints")),
                first_checkpoint,
            ],
            [
                *(power(facts.key_dim), self.knobs["values"], *self.ratios, facts.scale, facts.use_qk_l2norm),
                *("initial_state" in self.given, facts.pool, "final_state" in taken),
                *(facts.overwrite, facts.checkpoint_every // C if first_checkpoint else 0, walks[1] is not None),
                facts.key_dim <= 64 or products_of_shared_memory(self.target),
            ],
            (self.parts, facts.heads, facts.sequences),
            occupancy=self.knobs["blocks"],
            **({} if products_of_shared_memory(self.target) else {"num_worker_warps": 8}),
        )
