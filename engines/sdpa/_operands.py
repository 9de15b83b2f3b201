"""The arrays of an attention graph as the operands of the blockwise passes."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.sdpa import _tiling
from cudnn_jax.engines.sdpa._blockwise import Dropout, Problem

if TYPE_CHECKING:
    from cudnn_jax.engines.sdpa.facts import SdpaFacts

Array = jax.Array
Given = dict[str, Array]

_WIDE = (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16)
"""Types that products are computed on; a narrower one is widened."""


def named(facts: SdpaFacts, arrays: tuple[Array, ...]) -> Given:
    """The arrays and the graph's own numbers by port."""
    given = {port: jnp.full(number.dim, number.value, number.dtype.value) for port, number in facts.numbers.items()}
    return given | {port: arrays[position] for port, position in facts.ports.items()}


def problem(facts: SdpaFacts, given: Given, tiles: tuple[int, int]) -> Problem:
    """The operands, in tiles of at most so many rows and keys."""
    rows, keys = _tiling.Blocks.cut(facts.q_len, tiles[0]), _tiling.Blocks.cut(facts.kv_len, tiles[1])
    dtype = functools.reduce(jnp.promote_types, (_wide(given[port].dtype) for port in "qkv"))
    q, k, v = (unpaged(port, given, facts.kv_len).astype(dtype) for port in "qkv")
    bias = grouped(given["bias"], facts.kv_heads) if "bias" in given else None
    masks = [grouped(given[port] != 0, facts.kv_heads) for port in ("mask", "kv_mask") if port in given]
    scale: Any = facts.scale
    if "attn_scale" in given:
        scale = scale * given["attn_scale"].reshape(()).astype(jnp.promote_types(dtype, jnp.float32))
    return Problem(
        q=grouped(q, facts.kv_heads),
        k=k,
        v=v,
        bias=bias,
        masks=tuple(masks),
        band=_tiling.Band.of(facts, rows, keys, lengths(given, "q"), lengths(given, "kv")),
        scale=scale,
        block_mask=grouped(_bits(given["block_mask"]), facts.kv_heads) if "block_mask" in given else None,
        slopes=slopes(facts.q_heads, facts.kv_heads) if facts.alibi else None,
        sink=grouped(given["sink_token"], facts.kv_heads) if "sink_token" in given else None,
        dropout=_dropout(facts, given, dtype),
    )


def grouped(array: Array, kv_heads: int) -> Array:
    """(b, N, ...) as (b, K, G, ...); a head axis of size 1 as (b, 1, 1, ...)."""
    batch, heads, *rest = array.shape
    split = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return array.reshape(batch, *split, *rest)


def lengths(given: Given, side: str) -> Array | None:
    """The true lengths of a side's sequences, if there are any: as they are, or between where they start."""
    if f"cu_seq_len_{side}" in given:
        starts = given[f"cu_seq_len_{side}"].reshape(-1)
        return starts[1:] - starts[:-1]
    return given.get(f"seq_len_{side}")


def _wide(dtype: Any) -> Any:
    return dtype if dtype in _WIDE else jnp.float32


def unpaged(port: str, given: Given, length: int) -> Array:
    """Keys or values (B, K, S, D), also where they come in pages (P, K, page, D) with a table (B, 1, pages, 1)."""
    array, table = given[port], given.get(f"paged_attention_{port}_table")
    if table is None:
        return array
    # Behind a sequence's end the table may hold anything.
    pages = jnp.take(array, table[:, 0, :, 0], axis=0, mode="clip")
    pages = jnp.swapaxes(pages, 1, 2)
    return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])[:, :, :length]


def _bits(packed: Array) -> Array:
    """Bytes as booleans along the last axis, the lowest bit first."""
    bits = packed[..., None] >> np.arange(8, dtype=packed.dtype) & 1
    return bits.reshape(*packed.shape[:-1], -1) != 0


def slopes(heads: int, kv_heads: int) -> Array:
    """ALiBi's, (1, K, G, 1, 1): powers of 2 ** (-8 / n) for n heads, a power of two; the heads that are left take every
    second power of the slopes for twice as many (arXiv:2108.12409).
    """
    n = 1 << int(math.log2(heads))
    powers = np.concatenate([np.arange(1, n + 1), np.arange(1, 2 * (heads - n), 2) / 2])
    return jnp.asarray((2.0 ** (-8.0 * powers / n)).astype(np.float32).reshape(1, kv_heads, -1, 1, 1))


def _dropout(facts: SdpaFacts, given: Given, dtype: Any) -> Dropout | None:
    if "dropout_mask" not in given and "dropout_scale" not in given:
        return None
    number = jnp.promote_types(dtype, jnp.float32)
    mask = given.get("dropout_mask", jnp.ones((1, 1, 1, 1), number))
    scales = {port: given[port].reshape(()).astype(number) for port in given if port.startswith("dropout_scale")}
    scale = scales.get("dropout_scale", jnp.ones((), number))
    return Dropout(grouped(mask, facts.kv_heads), scale, scales.get("dropout_scale_inv"))
