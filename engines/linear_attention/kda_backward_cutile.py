"""The cuTile program of Kimi Delta Attention's and Gated DeltaNet 2's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention.backward_launch import BackwardLaunch, by_place
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_launch import C, Given, Knobs, power
from cudnn_jax.engines.linear_attention.kda_launch import KdaLaunch, Prepared
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type, pygraph

FEWEST_KEYS = 32
"""At a time, of those of chunks with strong gates: more do not compile with tileiras 13.4."""
_PAIRS_HINTS = {"num_worker_warps": 4, "occupancy": 3}
_HINTS = {"num_worker_warps": 8, "occupancy": 1}


def settings(facts: LinearFacts, target: Target) -> list[Knobs]:
    """`values`, the columns of a state that a block of the scans keeps; `keys`, those of q's and k's gradients that are
    worked on at a time, fewer where there is more to do for each."""
    more = facts.safe_gate or facts.operation == "gdn2" or facts.key_dim % 64 or facts.key_dim > 128
    keys = min(32 if more else 64, power(facts.key_dim))
    return [(("values", min(64, power(facts.value_dim))), ("keys", keys))]


def add_steps(builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target) -> None:
    """Appends all that gives the graph's gradients to a program."""
    _Launch(builder, graph, facts, knobs, target).add()


class _Partial(NamedTuple):
    """What `kda_backward_gradients` leaves to `kda_backward_finish`; d_query is dq itself, None, without norms."""

    d_query: Given | None
    sums: Given
    d_rates: Given | None


class _Launch(BackwardLaunch, KdaLaunch):
    def add(self) -> None:
        facts = self.facts
        order = self.order(2 * self.parts * facts.heads, 1)
        chunks, first_slot = self.table(order=order)
        prefixes = self.scratch(data_type.BFLOAT16, C, C)
        tables = self.tables(prefixes)
        prepared = self.prepare_channels(chunks, first_slot, tables)
        places = self.slots * facts.heads
        states, d_states = (self.scratch(facts.dtype, places, facts.value_dim, facts.key_dim) for _ in range(2))
        writes = self.scratch(facts.dtype, places, C, facts.value_dim)
        made = self.of_each_head()
        d_writes = self.scratch(facts.dtype, *made[2][0].shape) if self.by_channel else made[2]
        kept = [states, writes, d_states, d_writes]
        self._scans(prepared, [first_slot, order], kept)
        d_parameters = self._d_parameters()
        partial = self._gradients(prepared, (tables, prefixes), kept, chunks, made, d_parameters)
        self._finish(prepared, partial, chunks, d_writes, made, d_parameters)
        self.add_heads(made)

    def _scans(self, prepared: Prepared, walks: Sequence[Given | None], results: list[Given]) -> None:
        from cudnn_jax.engines.linear_attention import _kda_backward_cutile as kernels

        facts, given = self.facts, self.given
        ends = ("initial_state", "d_final_state")
        self.run(
            kernels.kda_backward_scans,
            [
                *map(given.get, ("v", "w", "dO")),
                *map(by_place, prepared[:5]),
                *(self._by_place_row(prepared.decay), given["cu_seqlens"], *walks),
                *(by_place(given.get(name)) for name in ends),
                *results,
                by_place(self.gradient("initial_state")),
            ],
            [
                *(self.ratios[2], power(facts.key_dim), self.knobs["values"], self.parts, self.by_channel),
                *(*(name in given for name in ends), walks[1] is not None),
            ],
            (2 * self.parts, facts.heads, facts.sequences),
        )

    def _d_parameters(self) -> tuple[Given | None, Given | None]:
        """Room for each chunk's part of the gradients of a_log and dt_bias."""
        facts, places = self.facts, self.slots * self.facts.heads
        d_a_log = self.scratch(data_type.FLOAT, places) if "a_log" in self.given else None
        d_bias = self.scratch(data_type.FLOAT, places, facts.key_dim) if "dt_bias" in self.given else None
        return d_a_log, d_bias

    def _pairs(self, prepared: Prepared, kept: list[Given], chunks: Given) -> tuple[Given, Given]:
        """What pairs of a chunk's tokens give, the same for all key columns: pairs and numbers."""
        from cudnn_jax.engines.linear_attention import _kda_backward_cutile as kernels

        facts, given = self.facts, self.given
        places = self.slots * facts.heads
        made = self.scratch(data_type.BFLOAT16, 2 * places, C, C), self.scratch(data_type.FLOAT, places, 2, C)
        self.run(
            kernels.kda_backward_pairs,
            [
                *map(given.get, ("v", "w", "dO")),
                *map(by_place, (prepared.q_norms, prepared.k_norms)),
                *(kept[1], kept[3], chunks, *made),
            ],
            [
                *(facts.scale, self.ratios[2], facts.heads, power(facts.value_dim)),
                *(facts.use_qk_l2norm, self.by_channel),
            ],
            (places, 1, 1),
            **_PAIRS_HINTS,
        )
        return made

    def _gradients(
        self,
        prepared: Prepared,
        tables: tuple[Given, Given],
        kept: list[Given],
        chunks: Given,
        made: Sequence[Given],
        d_parameters: tuple[Given | None, Given | None],
    ) -> _Partial:
        from cudnn_jax.engines.linear_attention import _kda_backward_cutile as kernels

        facts, given, places = self.facts, self.given, self.slots * self.facts.heads
        dq, dk, _ = made
        rows = places * self.sums
        partial = _Partial(
            self.scratch(facts.dtype, *dq[0].shape) if facts.use_qk_l2norm else None,
            self.scratch(data_type.FLOAT, rows, 2, C),
            self.scratch(data_type.FLOAT, rows) if "a_log" in given else None,
        )
        pairs = self._pairs(prepared, kept, chunks)
        for strong in (False,) if prepared.places is None else (False, True):
            keys = min(FEWEST_KEYS, self.knobs["keys"]) if strong else self.knobs["keys"]
            parts = -(-facts.key_dim // keys)
            self.run(
                kernels.kda_backward_gradients,
                [
                    *map(given.get, ("q", "k", "g", "beta", "a_log", "dt_bias", "dO")),
                    *(*tables, *map(by_place, (prepared.q_norms, prepared.k_norms))),
                    *((None, prepared.places) if strong else (prepared.strong, None)),
                    *(self._by_place_row(prepared.decay), *kept, *pairs, chunks),
                    *(partial.d_query or dq, dk, self.gradient("g"), partial.sums, self.gradient("beta")),
                    *(partial.d_rates, d_parameters[1]),
                ],
                [
                    *(facts.scale, *self.ratios[:2], facts.heads, power(facts.value_dim)),
                    *(keys, parts, self.sums // parts),
                    *(facts.use_qk_l2norm, self.by_channel, facts.use_beta_sigmoid, facts.allow_neg_eigval),
                    *(*self.channel_options(), strong),
                ],
                (self.blocks(places * parts) if strong else places * parts, 1, 1),
                **_HINTS,
            )
        return partial

    def _finish(
        self,
        prepared: Prepared,
        partial: _Partial,
        chunks: Given,
        d_writes: Given,
        made: Sequence[Given],
        d_parameters: tuple[Given | None, Given | None],
    ) -> None:
        from cudnn_jax.engines.linear_attention import _kda_backward_cutile as kernels

        facts, given = self.facts, self.given
        places = self.slots * facts.heads
        self.run(
            kernels.kda_backward_finish,
            [
                *map(given.get, ("q", "v", "beta", "w")),
                *(by_place(prepared.q_norms), d_writes, *partial, chunks, given["cu_seqlens"], *made),
                *(*map(self.gradient, ("g", "beta", "w")), *d_parameters),
            ],
            [
                *(self.ratios[0], self.ratios[2], facts.heads, facts.sequences),
                *(power(facts.key_dim), power(facts.value_dim), self.sums),
                *(facts.use_qk_l2norm, self.by_channel, facts.use_beta_sigmoid, facts.allow_neg_eigval),
                *self.channel_options()[1:3],
            ],
            (places, 1, 1),
        )
        for name, parts, columns in zip(("a_log", "dt_bias"), d_parameters, (1, facts.key_dim), strict=True):
            if parts is not None:
                array, memory = parts
                flat = Array(array.dtype, (1, self.slots, facts.heads * columns)), memory
                self.add_parameter(flat, 0, name)

    @property
    def sums(self) -> int:
        """Places for sums over some key columns of a chunk."""
        return -(-self.facts.key_dim // min(FEWEST_KEYS, self.knobs["keys"]))

    def _by_place_row(self, decay: Given) -> Given:
        array, memory = decay
        return Array(array.dtype, (self.slots * self.facts.heads, self.facts.key_dim)), memory
