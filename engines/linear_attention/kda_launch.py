"""What the cuTile programs of Kimi Delta Attention and Gated DeltaNet 2 begin with, each direction alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention.gdn_launch import C, ChunkedLaunch, Given, power
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type

_KEYS = 64
"""Key channels of a chunk that are prepared at a time: an image for 128 was wrong on an H200."""
_LEAST_MILD = -5.0
"""A log gate: e^(5 * 16) is finite, also times a key."""


class Prepared(NamedTuple):
    """What `kda_prepare` writes, the norms None without use_qk_l2norm; and `places` of `kda_strong_places`, None where
    no gate may be strong."""

    inverse: Given
    attention: Given
    erase: Given
    read: Given
    keep: Given
    decay: Given
    q_norms: Given | None
    k_norms: Given | None
    strong: Given
    places: Given | None


class KdaLaunch(ChunkedLaunch):
    """Chunks, and what prepares each one, where every key channel has a gate of its own."""

    @property
    def by_channel(self) -> bool:
        """Whether beta has a value for each key channel, and w one for each value column."""
        return self.facts.operation == "gdn2"

    def channel_options(self) -> tuple[bool | float, ...]:
        """What the kernels do to g: whether it is safe, has a_log, dt_bias, is linear, and its lower bound."""
        _, _, safe, a_log, dt_bias, linear = self.gate_options()
        return safe, a_log, dt_bias, linear, self.facts.gate_lower_bound or 0.0

    @property
    def mild(self) -> bool:
        """Whether a bound of the gates promises that none is strong."""
        bound = self.facts.gate_lower_bound if self.facts.safe_gate else None
        return bound is not None and bound >= _LEAST_MILD

    def blocks(self, places: int) -> int:
        """Of a kernel that has one on a multiprocessor and takes turns at what is strong, at most so many places."""
        assert self.target.sm_count is not None
        return min(places, self.target.sm_count)

    def tables(self, prefixes: Given | None = None) -> Given:
        """The sums of gates that products with `kda_tables` make."""
        from cudnn_jax.engines.linear_attention import _kda_chunks_cutile as kernels

        tables = self.scratch(data_type.HALF, kernels.TABLES, C, C)
        self.run(kernels.kda_tables, [tables, prefixes], [prefixes is not None], (kernels.TABLES, 1, 1))
        return tables

    def prepare_channels(self, chunks: Given, first_slot: Given, tables: Given) -> Prepared:
        from cudnn_jax.engines.linear_attention import _kda_chunks_cutile as kernels

        facts = self.facts
        places = self.slots * facts.heads
        by_row = (self.slots, facts.heads, C)
        by_column = (*by_row, facts.key_dim)
        norms = [self.scratch(data_type.FLOAT, *by_row) if facts.use_qk_l2norm else None for _ in range(2)]
        made = Prepared(
            inverse=self.scratch(facts.dtype, *by_row, C),
            attention=self.scratch(facts.dtype, *by_row, C),
            erase=self.scratch(facts.dtype, *by_column),
            read=self.scratch(facts.dtype, *by_column),
            keep=self.scratch(facts.dtype, *by_column),
            decay=self.scratch(data_type.FLOAT, self.slots, facts.heads, 1, facts.key_dim),
            q_norms=norms[0],
            k_norms=norms[1],
            strong=self.scratch(data_type.INT32, self.slots, facts.heads),
            places=None if self.mild else self.scratch(data_type.INT32, 1 + places),
        )
        keys = min(_KEYS, power(facts.key_dim))
        operands = [*map(self.given.get, ("q", "k", "g", "beta", "a_log", "dt_bias")), chunks, tables]
        constants = (
            *(keys, -(-facts.key_dim // keys), facts.heads, *self.ratios[:2], facts.scale, facts.use_qk_l2norm),
            *(self.by_channel, facts.use_beta_sigmoid, facts.allow_neg_eigval, *self.channel_options()),
        )
        self.run(
            kernels.kda_prepare,
            [*operands, *made[:9]],
            constants,
            (places, 1, 1),
            **_hints(self._works_more(), self.target),
        )
        if made.places is not None:
            self._list_strong(first_slot, made)
            self._prepare_strong(operands, constants, made)
        return made

    def _works_more(self) -> bool:
        """Whether `kda_prepare` does so much that it would keep registers in local memory with two blocks."""
        facts = self.facts
        beta = self.given["beta"][0].dtype
        rates = beta is data_type.FLOAT or facts.use_beta_sigmoid or facts.gate_domain == "linear"
        return facts.dtype is data_type.HALF or (self.by_channel and rates)

    def _list_strong(self, first_slot: Given, made: Prepared) -> None:
        from cudnn_jax.engines.linear_attention import _kda_strong_cutile as kernels

        array, memory = made.strong
        places = self.slots * self.facts.heads
        marks = Array(array.dtype, (places,)), memory
        grid = -(-places // kernels.TILE), 1, 1
        self.run(kernels.kda_strong_places, [first_slot, marks, made.places], [self.facts.heads], grid)

    def _prepare_strong(
        self, operands: list[Given | None], constants: Sequence[bool | int | float], made: Prepared
    ) -> None:
        from cudnn_jax.engines.linear_attention import _kda_strong_cutile as kernels

        self.run(
            kernels.kda_strong_prepare,
            [*operands, made.places, made.inverse, made.attention, made.q_norms, made.k_norms],
            constants,
            (self.blocks(self.slots * self.facts.heads), 1, 1),
            **_hints(True, self.target),
        )


def _hints(more: bool, target: Target) -> dict[str, int]:
    """Of `kda_prepare`, which may have `more` to do, and of what prepares strong gates, which has."""
    if more or target.sm != 90:
        return {"num_worker_warps": 8, "occupancy": 1}
    return {"num_worker_warps": 4, "occupancy": 2}
