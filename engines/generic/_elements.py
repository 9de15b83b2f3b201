"""Pointwise nodes, nodes that move elements, rotation, and block scales."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cudnn_jax.engines.generic._step import Made, Step
from cudnn_jax.engines.pointwise.reference import convert, largest, pointwise_node
from cudnn_jax.graph import data_type
from cudnn_jax.graph.block_scale import blocks_of, quantised_axis
from cudnn_jax.graph.rope import rotated
from cudnn_jax.graph.shape_ops import bounds

Array = jax.Array


def pointwise(step: Step) -> Made:
    return {"OUT_0": pointwise_node(step.node, step.compute, step.given)}


def reshape(step: Step) -> Made:
    return {"OUT_0": step.given["input"].reshape(step.node.outputs["OUT_0"].dim)}


def slice_(step: Step) -> Made:
    return {"OUT_0": step.given["input"][tuple(slice(*each) for each in bounds(step.node))]}


def transpose(step: Step) -> Made:
    return {"OUT_0": step.given["input"].transpose(step.node.params["permutation"])}


def concatenate(step: Step) -> Made:
    return {"OUT_0": jnp.concatenate(list(step.given.values()), axis=step.node.params["axis"])}


def rope(step: Step) -> Made:
    x = step.wide("input")
    half = rotated(step.node) // 2
    sines = jnp.sin(step.wide("freqs"))
    return {"OUT_0": _rotate(step, x, sines[..., :half], sines[..., half:])}


def rope_backward(step: Step) -> Made:
    x = step.wide("dY")
    half = rotated(step.node) // 2
    sines = -jnp.sin(step.wide("freqs"))
    return {"OUT_0": _rotate(step, x, sines[..., half:], sines[..., :half])}


def _rotate(step: Step, x: Array, low_sine: Array, high_sine: Array) -> Array:
    width = rotated(step.node)
    half = width // 2
    rest, low, high = jnp.split(x, [x.shape[-1] - width, x.shape[-1] - half], axis=-1)
    cosines = jnp.cos(step.wide("freqs"))
    turned = [low * cosines[..., :half] - high * low_sine, high * cosines[..., half:] + low * high_sine]
    whole: Array = jnp.concatenate([rest, *turned], axis=-1)
    return whole * jnp.asarray(step.node.params["output_scale"], whole.dtype)


def _spread(scales: Array, blocks: tuple[int, ...], dim: tuple[int, ...]) -> Array:
    """Each scale for all of its block."""
    for axis, (block, size) in enumerate(zip(blocks, dim, strict=True)):
        block = min(block, max(size, 1))
        scales = jnp.repeat(scales, block, axis=axis) if block > 1 else scales
    return scales[tuple(slice(size) for size in dim)]


def dequantize(step: Step) -> Made:
    x = step.wide("input")
    return {"OUT_0": x * _spread(step.wide("descale"), blocks_of(step.node), x.shape)}


def quantize(step: Step) -> Made:
    """Derivatives are straight through: rounding has the slope 1, and scales are constants."""
    y, scale = (step.node.outputs[port].data_type for port in ("Y", "scale"))
    made = quantised(step.wide("input"), quantised_axis(step.node), step.node.params["block_size"], y, scale)
    return {"Y": made[0], "scale": made[1]}


def quantised(x: Array, axis: int, block: int, kind: data_type, scale: data_type) -> tuple[Array, Array, Array]:
    """Values of the type `kind`, scales of the type `scale`, and each scale for all of its block."""
    block = min(block, max(x.shape[axis], 1))
    count = -(-x.shape[axis] // block)
    padding = [(0, count * block - size if at == axis else 0) for at, size in enumerate(x.shape)]
    cut = jnp.pad(jnp.abs(x), padding).reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :])
    scales = jax.lax.stop_gradient(_rounded_up(jnp.max(cut, axis=axis + 1) / largest(kind), scale))
    spread = _spread(scales.astype(x.dtype), tuple(block if at == axis else 1 for at in range(x.ndim)), x.shape)
    return _scaled_down(x, spread, kind), scales, spread


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _scaled_down(x: Array, scales: Array, kind: data_type) -> Array:
    # The least scale of float8_e8m0fnu is subnormal in float32, which XLA may take for 0 in the quotient alone.
    return convert(jnp.where((scales == 0) | (x == 0), 0, x / scales), kind)


@_scaled_down.defjvp
def _scaled_down_jvp(kind: data_type, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, scales = primals
    slope = jnp.where(scales <= 2.0**-126, 0, 1 / scales)  # as the graph's own derivative has it
    return _scaled_down(x, scales, kind), (tangents[0] * slope).astype(jnp.dtype(kind.value))


def _rounded_up(x: Array, kind: data_type) -> Array:
    """The least number of the type that is not below x."""
    if kind is data_type.FLOAT:
        return x.astype(jnp.float32)
    if kind is data_type.FP8_E8M0:
        # 2 ** (exponent - 1) <= x < 2 ** exponent, of which the lower is x itself only where the fraction is 1/2.
        fraction, exponent = jnp.frexp(x)
        power = jnp.clip(jnp.where(fraction == 0.5, exponent - 1, exponent), -127, 127)
        exponents = jnp.where(x == 0, -127, power) + 127  # all that a number of the type is
        return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint8), jnp.dtype(kind.value))
    near = jnp.minimum(x, largest(kind)).astype(kind.value)
    bits = jax.lax.bitcast_convert_type(near, jnp.uint8)
    return jax.lax.bitcast_convert_type(
        bits + (near.astype(x.dtype) < x) * (near.astype(x.dtype) < largest(kind)), near.dtype
    )
