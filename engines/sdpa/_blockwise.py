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

Array = jax.Array
ROW_AXIS, KEY_AXIS = 3, 4


@dataclass(frozen=True)
class Problem:
    """The operands of both passes. Bias and mask are 5-D and keep their axes of size 1."""

    q: Array
    k: Array
    v: Array
    bias: Array | None
    mask: Array | None
    band: Band
    scale: float

    @property
    def accumulator(self) -> Any:
        return jnp.promote_types(self.q.dtype, jnp.float32)

    @property
    def operands(self) -> tuple[Array, ...]:
        arrays = (self.q, self.k, self.v, self.bias, self.mask, *self.band.operands)
        return tuple(x for x in arrays if x is not None)

    def product(self, left: Array, right: Array, contract: int) -> Array:
        """Matrices over (B, K): the last axis of `left` against axis `contract` of `right`, accumulated in full.

        One axis of each kind: XLA's CPU backend fails on 16-bit products with several.
        """
        precision = "highest" if self.q.dtype.itemsize >= 4 else None
        axes = (((3,), (contract,)), ((0, 1), (0, 1)))
        return lax.dot_general(left, right, axes, precision, preferred_element_type=self.accumulator)

    def rows_times(self, rows: Array, right: Array, contract: int) -> Array:
        """(B, K, G, t, x) against axis `contract` of (B, K, ., .): (B, K, G, t, y)."""
        return self.product(merge(rows, 2), right, contract).reshape(*rows.shape[:4], -1)

    def key_tile(self, array: Array, key_block: Any) -> Array:
        """A block of k or v. Keys that nobody sees become 0: they may hold NaN, and 0 * NaN is NaN."""
        keys = self.band.keys
        tile = cut(array, 2, keys, key_block)
        seen = self.band.valid_keys(key_block)
        if self.mask is not None and self.mask.shape[1:4] == (1, 1, 1):
            given = cut(self.mask, KEY_AXIS, keys, key_block)[:, :, 0, 0, :, None]
            seen = given if seen is None else seen & given
        return tile if seen is None else jnp.where(seen, tile, 0)

    def logits(self, q: Array, k: Array, row_block: Any, key_block: Any) -> tuple[Array, Array | None]:
        """The masked logits of a tile, and the user's mask over it."""
        s = self.rows_times(q, k, 3) * jnp.asarray(self.scale, self.accumulator)
        if self.bias is not None:
            bias = self._plane_tile(self.bias, row_block, key_block).astype(s.dtype)
            valid = self.band.valid_rows(row_block) if bias.shape[ROW_AXIS] > 1 else None
            s = s + (bias if valid is None else jnp.where(valid, bias, 0))
        keep = self.band.keep(row_block, key_block)
        given = None if self.mask is None else self._plane_tile(self.mask, row_block, key_block)
        if given is not None:
            keep = given if keep is None else keep & given
        return (s if keep is None else jnp.where(keep, s, -jnp.inf)), given

    def _plane_tile(self, array: Array, row_block: Any, key_block: Any) -> Array:
        return cut(cut(array, ROW_AXIS, self.band.rows, row_block), KEY_AXIS, self.band.keys, key_block)


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
