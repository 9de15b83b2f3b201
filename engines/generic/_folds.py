"""Reductions, and norms other than the RMS norm."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cudnn_jax.engines.generic._step import Made, Step
from cudnn_jax.graph import data_type
from cudnn_jax.graph.normalised import epsilon_of, normalised_axes, number_of

Array = jax.Array
Axes = tuple[int, ...]


class Fold(NamedTuple):
    """What is folded of x, how, and what becomes of the result of `count` elements; `neutral` changes nothing."""

    of: Callable[[Array], Array]
    fold: Callable[..., Array]
    neutral: float
    after: Callable[[Array, Array], Array] = lambda folded, count: folded


def _same(x: Array) -> Array:
    return x


FOLDS = {
    "ADD": Fold(_same, jnp.sum, 0.0),
    "MUL": Fold(_same, jnp.prod, 1.0),
    "MIN": Fold(_same, jnp.min, float("inf")),
    "MAX": Fold(_same, jnp.max, float("-inf")),
    "AMAX": Fold(jnp.abs, jnp.max, 0.0),
    "AVG": Fold(_same, jnp.sum, 0.0, lambda folded, count: folded / count.astype(folded.dtype)),
    "NORM1": Fold(jnp.abs, jnp.sum, 0.0),
    "NORM2": Fold(jnp.square, jnp.sum, 0.0, lambda folded, count: jnp.sqrt(folded)),
    "MUL_NO_ZEROS": Fold(lambda x: jnp.where(x == 0, 1, x), jnp.prod, 1.0),
}


def reduction(step: Step) -> Made:
    x, made = step.wide("input"), step.node.outputs["OUT_0"].dim
    entry = FOLDS[step.node.params["mode"]]
    neutral = _held(entry.neutral, x.dtype)
    counts = jnp.ones((1,) * x.ndim, bool)
    values = entry.of(x)
    if "group_offset" in step.given:
        starts = step.given["group_offset"].reshape(-1)
        group = jnp.searchsorted(starts, jnp.arange(x.shape[1]), side="right") - 1
        counts = (group == jnp.arange(starts.shape[0])[:, None])[:, :, None]
        values = jnp.where(counts, values, neutral)
    axes = tuple(axis for axis, size in enumerate(made) if size == 1)
    count = jnp.sum(jnp.broadcast_to(counts, values.shape), axis=axes, keepdims=True)
    folded = entry.fold(values, axis=axes, keepdims=True, initial=neutral)
    return {"OUT_0": entry.after(folded, count)}


def _held(value: float, dtype: jnp.dtype) -> float | int:
    """A number, or for an infinity the integer that is as far as the type reaches."""
    if jnp.issubdtype(dtype, jnp.floating):
        return value
    integers = data_type.of(dtype).integers
    return int(max(integers[0], min(integers[-1], value)))


def genstats(step: Step) -> Made:
    x = step.wide("input")
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    return {"SUM": jnp.sum(x, axis=axes, keepdims=True), "SQ_SUM": jnp.sum(x * x, axis=axes, keepdims=True)}


def norm(step: Step) -> Made:
    x, axes = step.wide("input"), normalised_axes(step.node)
    mean = jnp.mean(x, axis=axes, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)
    epsilon = epsilon_of(step.node)
    assert epsilon is not None
    made = {"mean": mean, "inv_var": jax.lax.rsqrt(variance + jnp.asarray(epsilon, x.dtype))}
    made["Y"] = (x - mean) * made["inv_var"] * step.maybe("scale", 1.0) + step.maybe("bias", 0.0)
    if "in_running_mean" in step.given:
        count = prod(x.shape[axis] for axis in axes)
        momentum = number_of(step.node, "momentum")
        assert momentum is not None
        for name, value in (("mean", mean), ("var", variance * (count / max(count - 1, 1)))):
            made[f"next_running_{name}"] = (1 - momentum) * step.wide(f"in_running_{name}") + momentum * value
    return made


def norm_inference(step: Step) -> Made:
    x, mean, r, scale, bias = (step.wide(port) for port in ("input", "mean", "inv_variance", "scale", "bias"))
    return {"Y": (x - mean) * r * scale + bias}


def norm_backward(step: Step) -> Made:
    grad, x, mean, r = (step.wide(port) for port in ("grad", "input", "mean", "inv_variance"))
    axes = normalised_axes(step.node)
    normal = (x - mean) * r
    inner = grad * step.maybe("scale", 1.0)
    along = jnp.mean(inner * normal, axis=axes, keepdims=True)
    made = {"DX": r * (inner - jnp.mean(inner, axis=axes, keepdims=True) - normal * along)}
    for port, value in (("DScale", grad * normal), ("DBias", grad)):
        if port in step.node.outputs:
            dim = step.node.outputs[port].dim
            made[port] = jnp.sum(value, axis=tuple(at for at, size in enumerate(dim) if size == 1), keepdims=True)
    return made
