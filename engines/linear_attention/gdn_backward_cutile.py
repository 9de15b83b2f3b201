"""The cuTile program of Gated DeltaNet's backward: kernels of `_gdn_chunks_cutile` and `_gdn_backward_cutile`."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.linear_attention.backward_launch import BackwardLaunch, by_place
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
from cudnn_jax.graph import data_type, pygraph

_LATENCY = {1: 3, 2: 1}
"""Of the scans' loads, by their blocks on a multiprocessor: chunks ahead that shared memory has room for."""
_VALUES_IN_REGISTERS = 16
"""Value columns that the gradients read at a time where registers hold the operands of products."""


def settings(facts: LinearFacts, target: Target) -> list[Knobs]:
    """`values`, the columns of a state that a block of the scans keeps, its `blocks` on a multiprocessor at a time, and
    `keys`, the columns of q's and k's gradients that are worked on at a time.

    Two blocks hide each other's waits, and have room for fewer chunks ahead; of a long state one spills registers.
    Where registers hold the operands of products, there is room for narrow parts alone.
    """
    if not products_of_shared_memory(target):
        return [(("values", 16), ("blocks", 1), ("keys", 16))]
    assert target.sm_count is not None
    values, keys = min(64, power(facts.value_dim)), min(32, power(facts.key_dim))
    few = facts.sequences * facts.heads * 2 * -(-facts.value_dim // values) <= target.sm_count
    # One setting whatever is packed, if bits may not depend on it.
    alone = facts.batch_invariant or facts.key_dim > 128
    found = (1,) if alone else (1, 2) if few else (2, 1)
    return [(("values", values), ("blocks", blocks), ("keys", keys)) for blocks in found]


def add_steps(builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target) -> None:
    """Appends all that gives the graph's gradients to a program."""
    _Launch(builder, graph, facts, knobs, target).add()


class _Launch(BackwardLaunch, ChunkedLaunch):
    def add(self) -> None:
        facts = self.facts
        order = self.order(2 * self.parts * facts.heads, self.knobs["blocks"])
        chunks, first_slot = self.table(order=order)
        gates = self.gates(chunks)
        *squares, q_norms, k_norms = self.prepare(chunks, *gates)
        norms = [q_norms, k_norms]
        factors = self._factors(chunks, gates, norms)
        states, d_states = (
            self.scratch(facts.dtype, self.slots * facts.heads, facts.value_dim, facts.key_dim) for _ in range(2)
        )
        writes = self.scratch(facts.dtype, facts.total, facts.heads, facts.value_dim)
        made = self.of_each_head()
        self._scans([*squares, factors], [first_slot, order], [states, writes, d_states, made[2]])
        self._gradients([*gates, *norms], [states, writes, d_states], chunks, made)
        self.add_heads(made)

    def _factors(self, chunks: Given, gates: tuple[Given, Given], norms: list[Given | None]) -> Given:
        from cudnn_jax.engines.linear_attention import _gdn_backward_cutile as kernels

        facts = self.facts
        factors = self.scratch(data_type.FLOAT, self.slots + 1, facts.heads, 4, C)
        self.run(
            kernels.gdn_backward_factors,
            [chunks, *gates, *norms, factors],
            [self.gate_heads, facts.scale, facts.use_qk_l2norm],
            (self.slots, -(-facts.heads // self.gate_heads), 1),
        )
        return factors

    def _scans(self, prepared: Sequence[Given | None], walks: Sequence[Given | None], results: Sequence[Given]) -> None:
        from cudnn_jax.engines.linear_attention import _gdn_backward_cutile as kernels

        facts, given, blocks = self.facts, self.given, self.knobs["blocks"]
        ends = ("initial_state", "d_final_state")
        self.run(
            kernels.gdn_backward_scans,
            [
                *(given[name] for name in ("q", "k", "v", "dO")),
                *map(by_place, prepared),
                *(given["cu_seqlens"], *walks),
                *(by_place(given.get(name)) for name in ends),
                *results,
                by_place(self.gradient("initial_state")),
            ],
            [
                *(*self.ratios, power(facts.key_dim), self.knobs["values"], self.parts, _LATENCY[blocks]),
                *(*(name in given for name in ends), walks[1] is not None),
            ],
            (2 * self.parts, facts.heads, facts.sequences),
            occupancy=blocks,
            **({} if products_of_shared_memory(self.target) else {"num_worker_warps": 8}),
        )

    def _gradients(self, rows: list[Given | None], kept: list[Given], chunks: Given, made: list[Given]) -> None:
        from cudnn_jax.engines.linear_attention import _gdn_backward_cutile as kernels

        facts, given, keys = self.facts, self.given, self.knobs["keys"]
        held = products_of_shared_memory(self.target)
        width = power(facts.value_dim) if held else min(_VALUES_IN_REGISTERS, power(facts.value_dim))
        parameters = [name for name in ("a_log", "dt_bias") if name in given]
        d_gates = self.scratch(data_type.FLOAT, 2, self.slots, facts.heads) if parameters else None
        self.run(
            kernels.gdn_backward_gradients,
            [
                *map(given.get, ("q", "k", "g", "a_log", "dt_bias", "dO")),
                *map(by_place, rows),
                *kept,
                *(chunks, given["cu_seqlens"]),
                *made,
                *(self.gradient("g"), self.gradient("beta"), d_gates),
            ],
            [
                *(facts.scale, *self.ratios[:2], facts.heads, facts.sequences, width, -(-facts.value_dim // width)),
                *(keys, -(-facts.key_dim // keys), held),
                *(facts.use_qk_l2norm, *self.gate_options()),
            ],
            (self.slots * facts.heads, 1, 1),
            num_worker_warps=4 if held else 8,
            occupancy=2 if held else 1,
        )
        for which, name in enumerate(("a_log", "dt_bias")):
            if d_gates is not None and name in parameters:
                self.add_parameter(d_gates, which, name)
