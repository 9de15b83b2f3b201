"""The cuTile program of Gated DeltaNet's backward: kernels of `_gdn_chunks_cutile` and `_gdn_backward_cutile`."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.linear_attention.backward_launch import BackwardLaunch, by_place
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_launch import C, ChunkedLaunch, Given, Knobs, power
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type, pygraph


def settings(facts: LinearFacts, target: Target) -> list[Knobs]:
    """`values`, the columns of a state that a block of the scans keeps, and `keys`, those of q's and k's gradients that
    are worked on at a time."""
    return [(("values", min(64, power(facts.value_dim))), ("keys", min(32, power(facts.key_dim))))]


def add_steps(builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target) -> None:
    """Appends all that gives the graph's gradients to a program."""
    _Launch(builder, graph, facts, knobs, target).add()


class _Launch(BackwardLaunch, ChunkedLaunch):
    def add(self) -> None:
        facts = self.facts
        chunks, first_slot = self.table()
        gates = self.gates(chunks)
        *squares, q_norms, k_norms = self.prepare(chunks, *gates)
        norms = [q_norms, k_norms]
        factors = self._factors(chunks, gates, norms)
        states, d_states = (
            self.scratch(facts.dtype, self.slots * facts.heads, facts.value_dim, facts.key_dim) for _ in range(2)
        )
        writes = self.scratch(facts.dtype, facts.total, facts.heads, facts.value_dim)
        made = self.of_each_head()
        self._scans([*squares, factors], first_slot, [states, writes, d_states, made[2]])
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
            (-(-facts.heads // self.gate_heads), self.slots, 1),
        )
        return factors

    def _scans(self, prepared: Sequence[Given | None], first_slot: Given, results: Sequence[Given]) -> None:
        from cudnn_jax.engines.linear_attention import _gdn_backward_cutile as kernels

        facts, given, values = self.facts, self.given, self.knobs["values"]
        parts = -(-facts.value_dim // values)
        ends = ("initial_state", "d_final_state")
        self.run(
            kernels.gdn_backward_scans,
            [
                *(given[name] for name in ("q", "k", "v", "dO")),
                *map(by_place, prepared),
                *(given["cu_seqlens"], first_slot),
                *(by_place(given.get(name)) for name in ends),
                *results,
                by_place(self.gradient("initial_state")),
            ],
            [*self.ratios, power(facts.key_dim), values, parts, *(name in given for name in ends)],
            (facts.sequences, facts.heads, 2 * parts),
        )

    def _gradients(self, rows: list[Given | None], kept: list[Given], chunks: Given, made: list[Given]) -> None:
        from cudnn_jax.engines.linear_attention import _gdn_backward_cutile as kernels

        facts, given, keys = self.facts, self.given, self.knobs["keys"]
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
                *(facts.scale, *self.ratios[:2], facts.heads, facts.sequences, power(facts.value_dim)),
                *(keys, -(-facts.key_dim // keys), facts.use_qk_l2norm, *self.gate_options()),
            ],
            (self.slots * facts.heads, 1, 1),
            num_worker_warps=4,
            occupancy=2,
        )
        for which, name in enumerate(("a_log", "dt_bias")):
            if d_gates is not None and name in parameters:
                self.add_parameter(d_gates, which, name)
