"""Which tiles of the (query, key) plane attention visits, and which of their entries count.

A tile is a block of query rows against a block of keys. The last block of a side starts early enough to end
with the array, so nothing is padded; the entries that it shares with the block before are masked out.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from cudnn_jax.engines.sdpa.facts import Bounds, SdpaFacts

Array = jax.Array


@dataclass(frozen=True)
class _Budget:
    """Entries of one float32 tile: over all batches and heads, `good` and `most`; for one head, at most `head`."""

    good: int
    most: int
    head: int


# A CPU likes a tile that its caches hold, with sides of 256 while that fits: measured on two cores for 2, 4, 8, 32 and
# 128 heads over all batches, lengths of 256 to 16384. An accelerator wants to be filled, and few loop steps.
_CPU, _OTHER = _Budget(1 << 20, 1 << 21, 1 << 19), _Budget(1 << 25, 1 << 25, 1 << 22)
_GOOD_HEAD, _LEAST_HEAD = 256 * 256, 128 * 128
_GRAIN = 16


def choose(facts: SdpaFacts, platform: str) -> tuple[int, int]:
    """The most query rows and the most keys of a tile: about square, unless one side of the plane is short."""
    budget, heads = _CPU if platform == "cpu" else _OTHER, facts.batch * facts.q_heads
    entries = min(max(budget.good // heads, _GOOD_HEAD), budget.most // heads, budget.head)
    exponent = max(entries, _LEAST_HEAD).bit_length() - 1
    rows = min(facts.q_len, max(1 << (exponent + 1) // 2, (1 << exponent) // facts.kv_len))
    return rows, (1 << exponent) // rows


@dataclass(frozen=True)
class Blocks:
    """One side of the plane cut into `count` blocks of `size`, the last one ending at `length`."""

    length: int
    size: int
    count: int

    @classmethod
    def cut(cls, length: int, most: int) -> Blocks:
        """Blocks of at most `most`, even ones where a divisor is near."""
        if length <= most:
            return cls(length, length, 1)
        for size in range(most, most // 2, -1):
            if length % size == 0 and size % _GRAIN == 0:
                return cls(length, size, length // size)
        size = -(-length // -(-length // most))
        size = min(most, size + -size % _GRAIN)
        return cls(length, size, -(-length // size))

    @property
    def ragged(self) -> bool:
        """The last two blocks overlap."""
        return self.count * self.size != self.length

    def start(self, index: Any) -> Any:
        """Where a block begins."""
        if self.count == 1:
            return 0
        begin = index * self.size
        return jnp.minimum(begin, self.length - self.size) if self.ragged else begin

    def positions(self, index: Any, axis: int, rank: int) -> Array:
        """The positions that a block holds, along one axis of several."""
        shape = tuple(self.size if a == axis else 1 for a in range(rank))
        return jnp.add(lax.broadcasted_iota(jnp.int32, shape, axis), self.start(index))


@dataclass(frozen=True)
class Band:
    """The keys that each query may see: i + shift - left <= j <= i + shift + right, within the true lengths.

    Lengths and shift are (B, 1, 1, 1, 1) int32 arrays, or Python ints where every sequence has the same.
    """

    rows: Blocks
    keys: Blocks
    q_length: Any
    kv_length: Any
    shift: Any
    left: int | None
    right: int | None

    @classmethod
    def of(
        cls, facts: SdpaFacts | Bounds, rows: Blocks, keys: Blocks, seq_q: Array | None, seq_kv: Array | None
    ) -> Band:
        """The band of a graph with the arrays of true lengths that came with it."""
        q_length, kv_length = _true_length(seq_q, rows.length), _true_length(seq_kv, keys.length)
        shift = kv_length - q_length if facts.alignment == "bottom_right" else 0
        # A bound that reaches past the arrays is no bound. This also keeps the arithmetic inside int32.
        reach = rows.length + keys.length
        left = facts.left if facts.left is not None and facts.left < reach else None
        right = facts.right if facts.right is not None and facts.right < reach else None
        return cls(rows, keys, q_length, kv_length, shift, left, right)

    @property
    def operands(self) -> tuple[Array, ...]:
        """The arrays among the fields."""
        return tuple(x for x in (self.q_length, self.kv_length) if not isinstance(x, int))

    def row_blocks(self) -> Any:
        """How many query blocks hold a row inside some sequence's length."""
        if isinstance(self.q_length, int):
            return self.rows.count
        return lax.div(jnp.max(self.q_length) + (self.rows.size - 1), jnp.int32(self.rows.size))

    def key_ranges(self) -> tuple[Any, Any] | None:
        """(first, last + 1) of the key blocks that each query block sees: two int32 arrays; None if it is all."""
        rows, keys = self.rows, self.keys
        padded = not isinstance(self.kv_length, int)
        if keys.count == 1 or not (padded or self.left is not None or self.right is not None):
            return None
        top = np.minimum(np.arange(rows.count) * rows.size, rows.length - rows.size).astype(np.int32)
        nearest, furthest = _extremes(self.shift)
        longest = _extremes(self.kv_length)[1]
        xp: Any = np if isinstance(longest, int) and isinstance(nearest, int) else jnp
        first, end = xp.zeros_like(top), xp.full_like(top, longest)
        if self.left is not None:
            low = xp.maximum(top + (nearest - self.left), 0)
            first = xp.where(low < longest, low // keys.size, keys.count)
        if self.right is not None:
            end = xp.clip(top + (rows.size + furthest + self.right), 0, end)
        return xp.asarray(first, np.int32), xp.asarray(-(-end // keys.size), np.int32)

    def keep(self, row_block: Any, key_block: Any) -> Array | None:
        """The entries of a tile that count, (B, 1, 1, t, s) with axes of size 1 where they agree; None if all do."""
        keys = self.keys
        row, key = self.rows.positions(row_block, 3, 5), keys.positions(key_block, 4, 5)
        conditions = []
        if self.right is not None:
            conditions.append(key <= row + (self.shift + self.right))
        if self.left is not None:
            conditions.append(key >= row + (self.shift - self.left))
        if not isinstance(self.kv_length, int):
            conditions.append(key < self.kv_length)
        if keys.ragged:
            conditions.append(key >= key_block * keys.size)
        return functools.reduce(operator.and_, conditions) if conditions else None

    def valid_rows(self, row_block: Any = None) -> Array | None:
        """(B, 1, 1, t, 1): the rows of a block, or of all, inside their sequence's length; None if all are."""
        if isinstance(self.q_length, int):
            return None
        everything = Blocks(self.rows.length, self.rows.length, 1)
        rows, index = (everything, 0) if row_block is None else (self.rows, row_block)
        return jnp.less(rows.positions(index, 3, 5), self.q_length)

    def valid_keys(self, key_block: Any) -> Array | None:
        """(B, 1, s, 1): the keys of a block inside their sequence's length; None if all are."""
        if isinstance(self.kv_length, int):
            return None
        return jnp.less(self.keys.positions(key_block, 2, 4), self.kv_length[..., 0])


def _true_length(given: Array | None, most: int) -> Any:
    if given is None:
        return most
    return jnp.clip(given.astype(jnp.int32), 0, most).reshape(-1, 1, 1, 1, 1)


def _extremes(value: Any) -> tuple[Any, Any]:
    return (value, value) if isinstance(value, int) else (jnp.min(value), jnp.max(value))
