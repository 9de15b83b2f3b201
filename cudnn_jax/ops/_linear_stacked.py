"""`vmap` of packed sequences, which become more packed sequences, and of pools of states, which become one pool.

Everything comes with the mapped axis in front. Rows past the last end of one element stand in front of the next
element's: they are made a sequence of their own, of which nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cudnn_jax.graph.linear_attention import PER_TOKEN

WITH_TOKENS = ("O", "dO", *PER_TOKEN, *PER_TOKEN.values())
"""Ports whose rows are tokens: (B, T, ...) outside a graph, (total, ...) inside."""
_PER_SEQUENCE = ("initial_state", "final_state", "d_initial_state", "d_final_state")

Arrays = Mapping[str, jax.Array]
Bind = Callable[[Any, Arrays], Arrays]


def packed(bind: Bind, config: Any, operands: Arrays) -> dict[str, jax.Array]:
    """Elements of packed sequences as one call over all of their sequences."""
    cu_seqlens = operands["cu_seqlens"]
    size, total = operands["q"].shape[:2]
    if size * total > jnp.iinfo(cu_seqlens.dtype).max:
        raise NotImplementedError(
            f"vmap of {size} elements of {total} packed rows has more rows than cu_seqlens of {cu_seqlens.dtype} "
            "counts: give it in int64, or use jax.lax.map"
        )
    starts = jnp.arange(size, dtype=cu_seqlens.dtype)[:, None] * total
    end = jnp.full((1,), size * total, cu_seqlens.dtype)
    flat = {"cu_seqlens": jnp.concatenate([(cu_seqlens + starts).ravel(), end])}
    for name, x in operands.items():
        if name in _PER_SEQUENCE:
            x = jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))
        if name != "cu_seqlens":
            flat[name] = x.reshape(-1, *x.shape[2:])
    made = bind(config, {name: flat[name] for name in operands})
    inside = jnp.arange(total) < cu_seqlens[:, -1:]

    def split(name: str, x: jax.Array) -> jax.Array:
        if name == "state_checkpoints":
            return _own_checkpoints(x, cu_seqlens, total, config.checkpoint_every_n_tokens)
        x = x.reshape(size, -1, *x.shape[1:])
        if name in WITH_TOKENS:
            return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, 0)
        return x[:, :-1]

    return {name: split(name, x) for name, x in made.items()}


def _own_checkpoints(kept: jax.Array, cu_seqlens: jax.Array, total: int, every: int) -> jax.Array:
    """Each element's states out of those of all sequences, zeros behind them."""
    ends = jnp.pad(cu_seqlens[:, 1:], ((0, 0), (0, 1)), constant_values=total)
    counts = jnp.maximum(ends - cu_seqlens - 1, 0) // every
    before = jnp.cumsum(counts.sum(axis=1)) - counts.sum(axis=1)
    rows = jnp.arange(total // every)
    own = rows < counts[:, :-1].sum(axis=1, keepdims=True)
    found = kept.at[before[:, None] + rows].get(mode="fill", fill_value=0)
    return jnp.where(own.reshape(*own.shape, *(1,) * (kept.ndim - 1)), found, 0)


def pooled(bind: Bind, config: Any, operands: Arrays) -> dict[str, jax.Array]:
    """Elements that have a pool each as one call with all pools in a row."""
    size, rows = operands["initial_state"].shape[:2]
    indices = operands["state_indices"]
    known = (indices >= 0) & (indices < rows)
    moved = jnp.where(known, indices + jnp.arange(size, dtype=indices.dtype)[:, None] * rows, size * rows)
    whole = {**operands, "state_indices": moved}
    made = bind(config, {name: x.reshape(-1, *x.shape[2:]) for name, x in whole.items()})
    return {name: x.reshape(size, -1, *x.shape[1:]) for name, x in made.items()}
