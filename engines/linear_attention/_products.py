"""Products and inverses of float32 matrices, as exact as float32 is, for the chunked reference engines."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
_FLOAT32 = lax.DotAlgorithmPreset.F32_F32_F32
"""As exact as `Precision.HIGHEST`, which a CPU's fast library for products declines."""
product = partial(jnp.einsum, precision=_FLOAT32)
_matmul = partial(jnp.matmul, precision=_FLOAT32)
_BLOCK = 16
"""Rows of the blocks on the diagonal below which halving an inverse costs more calls than it saves arithmetic."""


def inverse(lower: Array) -> Array:
    """(I + lower)^-1 of strictly lower triangular (..., C, C), C a power of two, from those of the halves.

    A triangular solve would be a call of LAPACK on a CPU, whose own threads stall where there are no cores for them.
    """
    half = lower.shape[-1] // 2
    if half < _BLOCK:
        return _block_inverse(lower)
    first, last = inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    left = -_matmul(last, _matmul(lower[..., half:, :half], first))
    rows = [first, jnp.zeros_like(first)], [left, last]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def _block_inverse(lower: Array) -> Array:
    """`inverse` by blocks merged in pairs, in products of the whole: of small ones the cheaper way."""
    chunk = lower.shape[-1]
    row, column = jnp.arange(chunk)[:, None], jnp.arange(chunk)
    made = jnp.broadcast_to(jnp.eye(chunk, dtype=jnp.float32), lower.shape)
    size = 1
    while size < chunk:
        # The block left of the diagonal in each pair of blocks on it.
        left = (row // size == column // size + 1) & (row // size % 2 == 1)
        block = jnp.where(left, lower, 0)
        made -= block if size == 1 else product("...ij,...jk->...ik", made, product("...ij,...jk->...ik", block, made))
        size *= 2
    return made
