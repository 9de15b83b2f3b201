"""Matmul, convolution and the grouped matmul of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from cudnn_jax.engines.generic._step import Made, Step
from cudnn_jax.graph.convolution import window_of

Array = jax.Array
_HIGHEST = lax.Precision.HIGHEST


def matmul(step: Step) -> Made:
    return {"C": jnp.matmul(step.wide("A"), step.wide("B"), precision=_HIGHEST)}


def conv_fprop(step: Step) -> Made:
    return {"Y": _convolve(step, step.wide("image"), step.wide("weight"))}


def conv_dgrad(step: Step) -> Made:
    taps = step.wide("filter")
    return {"DX": _transposed(step, "DX", lambda image: _convolve(step, image, taps))}


def conv_wgrad(step: Step) -> Made:
    image = step.wide("image")
    return {"DW": _transposed(step, "DW", lambda taps: _convolve(step, image, taps))}


def _transposed(step: Step, output: str, forward: Callable[[Array], Array]) -> Array:
    """The gradient of what a linear function takes, from that of what it makes."""
    taken = jnp.zeros(step.node.outputs[output].dim, step.compute.value)
    made: Array = jax.linear_transpose(forward, taken)(step.wide("loss"))[0]
    return made


def _convolve(step: Step, image: Array, taps: Array) -> Array:
    window = window_of(step.node)
    if step.node.params["convolution_mode"] == "CONVOLUTION":
        taps = jnp.flip(taps, tuple(range(2, taps.ndim)))
    axes = "NC" + "DHW012345"[: image.ndim - 2]
    return lax.conv_general_dilated(
        image,
        taps,
        window_strides=window.stride,
        padding=list(zip(window.pre_padding, window.post_padding, strict=True)),
        rhs_dilation=window.dilation,
        dimension_numbers=(axes, "OI" + axes[2:], axes),
        feature_group_count=image.shape[1] // taps.shape[1],
        precision=_HIGHEST,
    )


def _group_sizes(step: Step, rows: int) -> Array:
    starts = step.given["first_token_offset"].reshape(-1)
    return jnp.diff(starts, append=jnp.asarray([rows], starts.dtype))


def _grouped(rows: Array, weights: Array, sizes: Array) -> Array:
    """(R, K) times (groups, K, N), rows by group."""
    return lax.ragged_dot(rows, weights, sizes, precision=_HIGHEST)


def grouped_matmul(step: Step) -> Made:
    (token,), weight = step.wide("token"), step.wide("weight")
    index, ks = (step.given[port].reshape(-1) if port in step.given else None for port in ("token_index", "token_ks"))
    mode, top_k = step.node.params["mode"], step.node.params["top_k"]
    rows = token[index] if mode == "GATHER" else token
    sizes = _group_sizes(step, rows.shape[0])
    # Offsets of several batches of experts follow each other.
    weights = jnp.tile(weight, (sizes.shape[0] // weight.shape[0], 1, 1))
    made = _grouped(rows, weights, sizes)
    if mode == "SCATTER":
        made = jnp.zeros_like(made).at[index * top_k + ks].set(made)
    if mode == "COMBINE":
        scored = made * step.wide("top_k_scores").reshape(-1, 1)
        made = jnp.zeros((rows.shape[0] // top_k, made.shape[1]), made.dtype).at[index].add(scored)
    return {"OUT_0": made[None]}


def grouped_matmul_backward(step: Step) -> Made:
    (token,), (loss,) = step.wide("token"), step.wide("doutput")
    sizes = _group_sizes(step, token.shape[0])
    weights = jnp.zeros(step.node.outputs["dweight"].dim, token.dtype)
    _, back = jax.vjp(lambda each: _grouped(token, each, sizes), weights)
    return {"dweight": back(loss)[0]}
