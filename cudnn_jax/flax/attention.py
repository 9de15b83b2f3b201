"""`cudnn_jax.sdpa` under the calling convention of Flax's attention layers.

    from cudnn_jax.flax import attention_fn

    flax.nnx.MultiHeadAttention(..., attention_fn=attention_fn)
    flax.linen.MultiHeadDotProductAttention(..., attention_fn=attention_fn)

`functools.partial` adds what the layers have no word for:

    functools.partial(attention_fn, causal=True)
    functools.partial(attention_fn, causal=True, local_window_size=(255, 0), implementation="cudnn")

This module imports no Flax: it serves whichever of the two APIs is in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import cudnn_jax

__all__ = ["attention_fn"]

# Precisions that a float32 softmax over products accumulated in float32 is at least as good as.
_PRECISIONS = (None, *jax.lax.Precision)
_NAMED_PRECISIONS = ("default", "fastest", "high", "highest", "float32", "bfloat16", "tensorfloat32")


def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    input_positions: Any = None,
    *,
    causal: bool = False,
    causal_alignment: str | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention over `[batch..., length, heads, depth]`, giving `[batch..., q_length, heads, v_depth]`.

    The positional parameters are Flax's. An option that cannot be honoured raises NotImplementedError
    with its name: dropout that would be applied, `module` (a layer called with `sow_weights=True`), the
    replaceable einsums, `input_positions`, and a `precision` that names a dot algorithm.

    Args:
      query, key, value: any number of batch dimensions, none included. Key and value heads may divide the
        query heads (grouped queries).
      bias, mask: broadcastable to `[batch..., heads, q_length, kv_length]`; a mask of any dtype keeps where
        it is not zero. A row that keeps nothing gives 0.
      dtype, promote_dtype: the dtype that query, key and value are cast to, as in Flax.
      precision: products accumulate in float32 at least, so every `jax.lax.Precision` is met.
      force_fp32_for_softmax: the softmax is always in float32; True also returns float32, as in Flax.
      is_causal: Flax's own word, query i sees keys j <= i. NNX layers pass it at every call, so a partial
        cannot pin it there; `causal` can.
      causal: the queries are the last positions of the keys: query i sees keys j <= i + kv_length - q_length.
        One layer so trains (equal lengths) and decodes (one query against a cache, masked by the layer).
      causal_alignment: "top_left" or "bottom_right", overriding what `is_causal` and `causal` imply.
      local_window_size: w or (left, right), as in `cudnn_jax.sdpa`. Where the lengths differ the alignment
        must be given, since the position of the first query among the keys is not known.
      scale: multiplies the logits; depth ** -0.5 by default.
      implementation: as in `cudnn_jax.sdpa`.
    """
    del broadcast_dropout, dropout_rng  # They shape a dropout that is refused below.
    _refuse(
        dropout_rate=dropout_rate > 0.0 and not deterministic,
        module=module is not None,
        einsum_dot_general=einsum_dot_general is not None,
        qk_attn_weights_einsum=qk_attn_weights_einsum is not None,
        attn_weights_value_einsum=attn_weights_value_einsum is not None,
        input_positions=input_positions is not None,
        precision=not _precision_is_met(precision),
    )
    query, key, value = (promote_dtype or _promote)((query, key, value), dtype=dtype)
    batch = _batch_dims(query=query, key=key, value=value)
    alignment = _alignment(
        query.shape[-3], key.shape[-3], is_causal, causal, causal_alignment, local_window_size is not None
    )
    out = cudnn_jax.sdpa(
        *(_fold(x, batch) for x in (query, key, value)),
        None if bias is None else _fold_logits("bias", bias, batch),
        None if mask is None else _fold_logits("mask", jnp.asarray(mask) != 0, batch),
        scale=scale,
        is_causal=is_causal or causal,
        causal_alignment=alignment,
        local_window_size=local_window_size,
        implementation=implementation,
    )
    out = out.reshape(*batch, *out.shape[1:])
    return out.astype(jnp.float32) if force_fp32_for_softmax else out


_INSIDE = "the products run inside the attention engine"
_REFUSALS = {
    "dropout_rate": "attention dropout is not served; use dropout_rate=0.0 or deterministic=True",
    "module": "the attention weights are never formed and cannot be sowed; use sow_weights=False",
    "einsum_dot_general": _INSIDE,
    "qk_attn_weights_einsum": _INSIDE,
    "attn_weights_value_einsum": _INSIDE,
    "input_positions": "rotary positions are not applied here; rotate query and key before attention",
    "precision": "a jax.lax.Precision is served, a dot algorithm is not",
}


def _refuse(**options: bool) -> None:
    for name, given in options.items():
        if given:
            raise NotImplementedError(f"{name}: {_REFUSALS[name]}")


def _precision_is_met(precision: Any) -> bool:
    if isinstance(precision, tuple | list):
        return all(map(_precision_is_met, precision))
    if isinstance(precision, str):
        return precision in _NAMED_PRECISIONS
    return precision in _PRECISIONS


def _promote(arrays: tuple[Any, ...], *, dtype: Any = None) -> tuple[jax.Array, ...]:
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def _batch_dims(**arrays: jax.Array) -> tuple[int, ...]:
    """The batch dimensions that query, key and value must share."""
    query = arrays["query"]
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(f"{name} must be [batch..., length, heads, depth], but got shape {x.shape}")
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} batch dims must be query's {query.shape[:-3]}, but got shape {x.shape}")
    return tuple(query.shape[:-3])


def _alignment(q_len: int, kv_len: int, is_causal: bool, causal: bool, asked: str | None, window: bool) -> str:
    # Equal lengths make the alignments one; top_left is the one that every engine takes.
    if q_len == kv_len:
        return "top_left"
    if asked is not None:
        return asked
    if window:
        raise ValueError(
            f"local_window_size with query length {q_len} and key length {kv_len}: say where the queries lie "
            'with causal_alignment="top_left" or "bottom_right"'
        )
    if is_causal and causal:
        raise ValueError(
            f"is_causal (top_left) and causal (bottom_right) differ for query length {q_len} and key length "
            f"{kv_len}: give one of them, or causal_alignment"
        )
    return "bottom_right" if causal else "top_left"


def _fold(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    return x.reshape(math.prod(batch), *x.shape[-3:])


def _fold_logits(name: str, x: Any, batch: tuple[int, ...]) -> jax.Array:
    """Folds the batch dimensions of a bias or mask to one, leaving broadcast axes at size 1 where it can."""
    x = jnp.asarray(x)
    if x.ndim > len(batch) + 3:
        raise ValueError(
            f"{name} must broadcast to [batch..., heads, q_length, kv_length] with batch dims {batch}, "
            f"but got shape {x.shape}"
        )
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    lead, rest = x.shape[: len(batch)], x.shape[len(batch) :]
    if all(n == 1 for n in lead):
        return x.reshape(1, *rest)
    if any(n not in (1, m) for n, m in zip(lead, batch, strict=True)):
        raise ValueError(f"{name} batch dims must be 1 or query's {batch}, but got shape {x.shape}")
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(math.prod(batch), *rest)
