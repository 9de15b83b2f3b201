"""Packed sequences cut into chunks: what the chunked reference engines share.

A chunk of C tokens never straddles sequences. `total // C + sequences` slots hold the chunks of any lengths, so that
shapes are static: a sequence's slots are consecutive and in order, unused ones are last. Rows of a slot past its
chunk's tokens are 0, which leaves the state as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from cudnn_jax.engines.linear_attention.facts import LinearFacts

Array = jax.Array
Rows = dict[str, Array]
Step = Callable[[Array, Rows], tuple[Array, Rows]]
_LONGEST_CHUNK = 32
"""Took a CPU the least time of 16, 32 and 64 in `python -m benchmarks gdn_reference`. Rounding grows with it where keys
repeat and beta is near 2, so that the state is reflected and not forgotten."""
_LANES = {"cpu": 1}
"""Lanes are of use where there are cores for them, and cost the scan up to as many times the work at worst."""
_OTHER_LANES = 64


@dataclass(frozen=True)
class Slots:
    """Where each chunk, token and sequence is.

    Attributes:
      chunk: tokens of a slot.
      lengths: (n,) tokens of each sequence.
      first: (n + 1,) each sequence's first slot, and the number of used ones.
      sequence: (slots,) the slot's sequence.
      opens, closes: (slots,) whether the slot is its sequence's first, or last.
      rows: (slots, C) the token of each row, out of range where there is none.
      token_rows: (total,) where each token's row is in (slots * C,), out of range for tokens of no sequence.
      lanes: (lanes + 1,) bounds of slot ranges that hold whole sequences, about as many slots each.
    """

    chunk: int
    lengths: Array
    first: Array
    sequence: Array
    opens: Array
    closes: Array
    rows: Array
    token_rows: Array
    lanes: Array

    @classmethod
    def of(cls, cu_seqlens: Array, total: int, chunk: int, lanes: int) -> Slots:
        cu = cu_seqlens.astype(jnp.int32)
        lengths = jnp.diff(cu)
        sequences = lengths.shape[0]
        counts = -(-lengths // chunk)
        first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        slot = jnp.arange(total // chunk + sequences, dtype=jnp.int32)
        sequence = jnp.clip(jnp.searchsorted(first, slot, side="right") - 1, 0, sequences - 1)
        start = (slot - first[sequence]) * chunk
        used = slot < first[-1]
        inside = jnp.arange(chunk, dtype=jnp.int32)
        there = used[:, None] & (start[:, None] + inside < lengths[sequence][:, None])
        rows = jnp.where(there, cu[sequence][:, None] + start[:, None] + inside, total)

        place = jnp.arange(rows.size, dtype=jnp.int32)
        token_rows = jnp.full(total, rows.size, jnp.int32).at[rows.reshape(-1)].set(place, mode="drop")
        return cls(
            chunk=chunk,
            lengths=lengths,
            first=first,
            sequence=sequence,
            opens=slot == first[sequence],
            closes=slot == first[sequence + 1] - 1,
            rows=rows,
            token_rows=token_rows,
            lanes=_lanes(first, lanes),
        )

    def cut(self, x: Array) -> Array:
        """(total, heads, ...) as (slots, heads, C, ...), rows of no token 0."""
        return jnp.moveaxis(x.at[self.rows].get(mode="fill", fill_value=0), 2, 1)

    def joined(self, x: Array) -> Array:
        """(slots, heads, C, ...) as (total, heads, ...), tokens of no sequence 0."""
        slots, heads, chunk, *rest = x.shape
        rows = jnp.moveaxis(x, 1, 2).reshape(slots * chunk, heads, *rest)
        return rows.at[self.token_rows].get(mode="fill", fill_value=0)

    def checkpoints(self, every: int, rows: int) -> tuple[Array, Array]:
        """(sequence, tokens of it) behind which each kept state stands; sequence n where there is no more."""
        counts = jnp.maximum(self.lengths - 1, 0) // every
        ends = jnp.cumsum(counts)
        row = jnp.arange(rows, dtype=jnp.int32)
        sequence = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
        before = (ends - counts).at[sequence].get(mode="fill", fill_value=0)
        return sequence, (row - before + 1) * every

    def place(self, sequence: Array, tokens: Array) -> tuple[Array, Array]:
        """(slot, row) of the last of a sequence's first `tokens`, of which there is at least one."""
        return self.first[sequence] + (tokens - 1) // self.chunk, (tokens - 1) % self.chunk

    def scan(self, step: Step, carry: Array, arrays: Rows, reverse: bool = False) -> Rows:
        """Runs `step` over the slots of every lane in turn, lanes beside each other.

        Args:
          step: takes the carry (lanes, ...) and the slots' rows of `arrays`; returns the next carry and what is kept.
          carry: what the first slot of every lane gets.
          arrays: (slots, ...) each.
          reverse: from the last slot of each lane to its first.

        Returns:
          What was kept of each slot, (slots, ...); anything for slots that are not used.
        """
        if self.lanes.shape[0] == 2:
            return self._scan_one(step, carry, arrays, reverse)
        low, high = self.lanes[:-1], self.lanes[1:]
        beyond = self.sequence.shape[0]
        shapes = jax.eval_shape(step, carry, jax.tree.map(lambda x: x[: low.shape[0]], arrays))[1]
        blank = jax.tree.map(lambda x: jnp.zeros((beyond, *x.shape[1:]), x.dtype), shapes)

        def body(i: Any, state: tuple[Array, Rows]) -> tuple[Array, Rows]:
            carry, kept = state
            slot = high - 1 - i if reverse else low + i
            carry, made = step(carry, jax.tree.map(lambda x: x[jnp.clip(slot, 0, beyond - 1)], arrays))
            where = jnp.where((low <= slot) & (slot < high), slot, beyond)
            return carry, jax.tree.map(lambda x, y: x.at[where].set(y, mode="drop"), kept, made)

        made: Rows = lax.fori_loop(0, jnp.max(high - low), body, (carry, blank))[1]
        return made

    def _scan_one(self, step: Step, carry: Array, arrays: Rows, reverse: bool) -> Rows:
        """`scan` of one lane, over slots that are not used too: it has a derivative in reverse mode."""

        def body(carry: Array, rows: Rows) -> tuple[Array, Rows]:
            carry, made = step(carry, jax.tree.map(lambda x: x[None], rows))
            return carry, jax.tree.map(lambda x: x[0], made)

        made: Rows = lax.scan(body, carry, arrays, reverse=reverse)[1]
        return made


def _lanes(first: Array, count: int) -> Array:
    if count == 1:
        return first[jnp.array([0, -1])]
    targets = -(-jnp.arange(count + 1, dtype=jnp.int32) * first[-1] // count)
    return first[jnp.searchsorted(first, targets, side="left")]


def slots_of(facts: LinearFacts, cu_seqlens: Array, platform: str, chunk: int | None) -> Slots:
    """The slots of a graph that has tokens, in chunks of `chunk` tokens or of what the sequences fill on average."""
    average = -(-facts.total // facts.sequences)
    lanes = min(facts.sequences, _LANES.get(platform, _OTHER_LANES))
    return Slots.of(cu_seqlens, facts.total, chunk or min(_LONGEST_CHUNK, 1 << (average - 1).bit_length()), lanes)
