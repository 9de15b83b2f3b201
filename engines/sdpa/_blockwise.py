"""Attention over tiles in plain JAX: what the forward and the backward pass share.

Heads are split into K kv heads with G query heads each, so grouped heads share keys without a copy:
q (B, K, G, T, D), k (B, K, S, D), logits (B, K, G, t, s). Accumulation is in float32 or wider. Loops are lax loops
over blocks: the program's size does not depend on the lengths, and its scratch memory is a few tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cudnn_jax.engines.sdpa._tiling import Band, Blocks
from cudnn_jax.engines.sdpa.facts import BLOCK_MASK_TILE

Array = jax.Array
ROW_AXIS, KEY_AXIS = 3, 4


@dataclass(frozen=True)
class Dropout:
    """What the probabilities are multiplied with, once they are normalised: `mask` (5-D, axes of size 1 kept) and
    `scale`; `scale_inv` is one over `scale`, if the caller says it.
    """

    mask: Array
    scale: Any
    scale_inv: Any = None


@dataclass(frozen=True)
class Problem:
    """The operands of both passes. Those over heads, rows and keys are 5-D and keep their axes of size 1.

    Attributes:
      masks: boolean, over rows and keys; an entry counts where all are true.
      block_mask: boolean, (B, K, G, tiles of rows, tiles of keys).
      slopes: (1, K, G, 1, 1), of logits that fall with the distance of row and key.
      sink: (1, K, G, 1, 1), one more logit of each head.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    masks: tuple[Array, ...]
    band: Band
    scale: Any
    block_mask: Array | None = None
    slopes: Array | None = None
    sink: Array | None = None
    dropout: Dropout | None = None

    @property
    def accumulator(self) -> Any:
        return jnp.promote_types(self.q.dtype, jnp.float32)

    @property
    def operands(self) -> tuple[Array, ...]:
        arrays = (self.q, self.k, self.v, self.bias, *self.masks, self.block_mask, self.sink, self.scale)
        if self.dropout is not None:
            arrays += (self.dropout.mask, self.dropout.scale, self.dropout.scale_inv)
        return (*(x for x in arrays if isinstance(x, jax.Array)), *self.band.operands)

    def product(self, left: Array, right: Array, contract: int) -> Array:
        """Matrices over (B, K): the last axis of `left` against axis `contract` of `right`, accumulated in full.

        One axis of each kind: XLA's CPU backend fails on 16-bit products with several.
        """
        precision = "highest" if self.q.dtype.itemsize >= 4 else None
        axes = (((3,), (contract,)), ((0, 1), (0, 1)))
        return lax.dot_general(left, right, axes, precision, preferred_element_type=self.accumulator)

    def rows_times(self, rows: Array, right: Array, contract: int) -> Array:
        """(B, K, G, t, x) against axis `contract` of (B, K, ., .): (B, K, G, t, y)."""
        return self.product(merge(rows, 2), right, contract).reshape(*rows.shape[:4], right.shape[5 - contract])

    def key_tile(self, array: Array, key_block: Any) -> Array:
        """A block of k or v. Keys that nobody sees become 0: they may hold NaN, and 0 * NaN is NaN."""
        keys = self.band.keys
        tile = cut(array, 2, keys, key_block)
        seen = self.band.valid_keys(key_block)
        for mask in self.masks:
            if mask.shape[1:4] == (1, 1, 1):
                given = cut(mask, KEY_AXIS, keys, key_block)[:, :, 0, 0, :, None]
                seen = given if seen is None else seen & given
        return tile if seen is None else jnp.where(seen, tile, 0)

    def logits(self, q: Array, k: Array, row_block: Any, key_block: Any) -> tuple[Array, Array | None]:
        """The masked logits of a tile, and the user's masks over it."""
        s = self.rows_times(q, k, 3) * jnp.asarray(self.scale, self.accumulator)
        if self.bias is not None:
            bias = self._plane_tile(self.bias, row_block, key_block).astype(s.dtype)
            valid = self.band.valid_rows(row_block) if bias.shape[ROW_AXIS] > 1 else None
            s = s + (bias if valid is None else jnp.where(valid, bias, 0))
        if self.slopes is not None:
            row, key = self._positions(row_block, key_block)
            s = s + self.slopes.astype(s.dtype) * (key - row).astype(s.dtype)
        given = self._given(row_block, key_block)
        keep = both(self.band.keep(row_block, key_block), given)
        return (s if keep is None else jnp.where(keep, s, -jnp.inf)), given

    def kept(self, p: Array, row_block: Any, key_block: Any) -> Array:
        """What the dropout's mask multiplies the probabilities of a tile with. Where there are none it may be NaN."""
        if self.dropout is None:
            raise TypeError("a problem without dropout")
        mask = self._plane_tile(self.dropout.mask, row_block, key_block).astype(p.dtype)
        return jnp.where(p == 0, 0, mask)

    def _given(self, row_block: Any, key_block: Any) -> Array | None:
        given = None
        for mask in self.masks:
            given = both(given, self._plane_tile(mask, row_block, key_block))
        if self.block_mask is not None:
            row, key = (x.reshape(-1) // BLOCK_MASK_TILE for x in self._positions(row_block, key_block))
            given = both(given, jnp.take(jnp.take(self.block_mask, row, ROW_AXIS), key, KEY_AXIS))
        return given

    def _positions(self, row_block: Any, key_block: Any) -> tuple[Array, Array]:
        return self.band.rows.positions(row_block, ROW_AXIS, 5), self.band.keys.positions(key_block, KEY_AXIS, 5)

    def _plane_tile(self, array: Array, row_block: Any, key_block: Any) -> Array:
        return cut(cut(array, ROW_AXIS, self.band.rows, row_block), KEY_AXIS, self.band.keys, key_block)


def both(one: Array | None, other: Array | None) -> Array | None:
    """The conjunction of two masks, where None is true everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def cut(array: Array, axis: int, blocks: Blocks, index: Any) -> Array:
    """One block of an axis; an axis of size 1 that stands for all of them stays."""
    if blocks.count == 1 or array.shape[axis] == 1:
        return array
    start = blocks.start(index)
    tile = lax.dynamic_slice_in_dim(stored(array), start, blocks.size, axis, allow_negative_indices=False)
    return restored(tile, array.dtype)


def put(array: Array, tile: Array, axis: int, blocks: Blocks, index: Any) -> Array:
    """The array, as `stored` holds it, with one block of an axis replaced."""
    if blocks.count == 1:
        return stored(tile)
    start = blocks.start(index)
    return lax.dynamic_update_slice_in_dim(array, stored(tile), start, axis, allow_negative_indices=False)


def stored(array: Array) -> Array:
    """The array as loops carry and cut it: 16-bit floats as their bits.

    XLA's CPU backend widens 16-bit floats around a slice or an update, which copies the whole array to touch a block.
    """
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype.itemsize == 2 else array


def restored(array: Array, dtype: Any) -> Array:
    """Undoes `stored`."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def merge(array: Array, axis: int) -> Array:
    """Two neighbouring axes as one."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def varying_like(tree: Any, references: tuple[Array, ...]) -> Any:
    """Loop carries that vary over the mesh axes over which the operands vary, as a loop in shard_map must have."""
    axes = {axis for reference in references for axis in _varying(reference)}

    def cast(x: Array) -> Array:
        missing = tuple(sorted(axes - set(_varying(x))))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def _varying(x: Array) -> Any:
    return jax.typeof(x).manual_axis_type.varying


def over_blocks(first: Any, end: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """body(index, carry) for every index, without a loop where there is one."""
    if isinstance(first, int) and isinstance(end, int) and end == first + 1:
        return body(first, carry)
    return lax.fori_loop(jnp.int32(first), jnp.int32(end), body, carry)


def over_tiles(band: Band, row_block: Callable[[Any, Any, Callable[..., Any]], Any], carry: Any) -> Any:
    """row_block(i, carry, over_keys) for the query blocks that hold anything.

    over_keys(tile, carry) runs tile(j, carry) for the key blocks that query block i sees.
    """
    ranges = band.key_ranges()

    def visit(i: Any, carry: Any) -> Any:
        def over_keys(tile: Callable[[Any, Any], Any], inner: Any) -> Any:
            first, end = (0, band.keys.count) if ranges is None else (jnp.asarray(side)[i] for side in ranges)
            return over_blocks(first, end, tile, inner)

        return row_block(i, carry, over_keys)

    return over_blocks(0, band.row_blocks(), visit, carry)
