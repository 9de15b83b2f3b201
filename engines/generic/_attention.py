"""Attention of float8 tensors: the softmax and, in the backward, its gradient are rounded to float8 between products.

With one scale for each tensor, the order is that of the operations of which cuDNN's frontend composes these nodes (its
`sdpa_fp8` and `matmul_fp8`):

    s = attn_scale descale_q descale_k q k^T + bias, masked     p = softmax(s)            Amax_S = max |p|
    o = descale_s descale_v rounded(scale_s p) v                O = scale_o o             Amax_O = max |o|

    dV = descale_s descale_dO rounded(scale_s p)^T dO
    ds = attn_scale p (descale_dO descale_v dO v^T - descale_dO descale_o rowsum(dO o))   amax_dP = max |ds|
    dQ = descale_dP descale_k rounded(scale_dP ds) k            dK = descale_dP descale_q rounded(scale_dP ds)^T q

dQ, dK and dV are multiplied by their scales after their amax is taken. cuDNN's kernels round exp(s - the largest so
far) and divide by the sum at the end: what they make differs by roundings of the type, unless scale_s alone is past its
largest number.

With a scale for each block of 32, operands are dequantised, and the numbers inside are those of the frontend's own
reference (its `mxfp8_ref.py`, "How Scales Are Applied in MXFP8 Attention"):

    s = attn_scale q k^T, masked                                u = exp(s - max s)
    O = rounded(16 u) / 16 v / sum u                            Amax_O = max |O|

    dV = (rounded(256 p) / 256)^T dO_T                          ds = attn_scale p (dO v^T - rowsum(dO_f16 o_f16))
    dQ = in blocks along keys(ds) k_T                           dK = in blocks along queries(ds)^T q_T

p and u are rounded to q's type and ds to dO's: to the nearest, past the largest number to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cudnn_jax.engines.generic._attention_rows import (
    Cotangent,
    accumulating,
    attend,
    attend_backward,
    attn_scale,
    largest_of,
    numbers,
    problem_of,
    statistics,
)
from cudnn_jax.engines.generic._elements import quantised
from cudnn_jax.engines.generic._step import Made, Step
from cudnn_jax.engines.generic.block_scales import BLOCK, TILE, scaled_axis
from cudnn_jax.engines.pointwise.reference import convert
from cudnn_jax.engines.sdpa._blockwise import KEY_AXIS, ROW_AXIS
from cudnn_jax.graph import data_type

Array = jax.Array


def attention_fp8(step: Step) -> Made:
    step = accumulating(step)
    q, k, v = (step.wide(port) for port in "qkv")
    problem = problem_of(step, q, k, v, attn_scale(step) * numbers(step, "descale_q", "descale_k"))
    scale_s = numbers(step, "scale_s")
    rows = attend(step, problem, lambda powers, total: _rounded(step, powers / total * scale_s, "q"))
    o = rows.o * numbers(step, "descale_s", "descale_v")
    return {
        "O": o * numbers(step, "scale_o"),
        "Amax_S": rows.amax,
        "Amax_O": largest_of(o),
        **statistics(step, rows),
    }


def attention_fp8_backward(step: Step) -> Made:
    step = accumulating(step)
    q, k, v, o, d_o = (step.wide(port) for port in ("q", "k", "v", "o", "dO"))
    problem = problem_of(step, q, k, v, attn_scale(step) * numbers(step, "descale_q", "descale_k"))
    pull = jnp.sum(d_o * o, axis=-1, keepdims=True) * numbers(step, "descale_dO", "descale_o")
    scale_s, scale_d_p = numbers(step, "scale_s"), numbers(step, "scale_dP")
    sums = attend_backward(
        step,
        problem,
        Cotangent(d_o * numbers(step, "descale_dO", "descale_v"), pull, q, k, d_o),
        lambda p: _rounded(step, p * scale_s, "q"),
        lambda d_s: (_rounded(step, d_s * scale_d_p, "dO"),) * 2,
    )
    made = {"amax_dP": sums.amax, "dSink_token": sums.sink}
    for name, total, *descales in (
        ("dQ", sums.q, "descale_dP", "descale_k"),
        ("dK", sums.k, "descale_dP", "descale_q"),
        ("dV", sums.v, "descale_s", "descale_dO"),
    ):
        gradient = total * numbers(step, *descales)
        made |= {name: gradient * numbers(step, f"scale_{name}"), f"amax_{name}": largest_of(gradient)}
    return made


def attention_mxfp8(step: Step) -> Made:
    step = accumulating(step)
    q, k, v = (_dequantised(step, port) for port in "qkv")
    problem = problem_of(step, q, k, v, attn_scale(step))
    rows = attend(step, problem, lambda powers, total: _rounded(step, powers * 16, "q") / (16 * total))
    return {"O": rows.o, "Amax_O": largest_of(rows.o), **statistics(step, rows)}


def attention_mxfp8_backward(step: Step) -> Made:
    step = accumulating(step)
    q, k, v, d_o, q_t, k_t, d_o_t = (_dequantised(step, port) for port in ("q", "k", "v", "dO", "q_T", "k_T", "dO_T"))
    pull = jnp.sum(step.wide("dO_f16") * step.wide("o_f16"), axis=-1, keepdims=True)
    sums = attend_backward(
        step,
        problem_of(step, q, k, v, attn_scale(step), BLOCK),
        Cotangent(d_o, pull, q_t, k_t, d_o_t),
        lambda p: _rounded(step, p * 256, "q") / 256,
        lambda d_s: (_in_blocks(step, d_s, KEY_AXIS), _in_blocks(step, d_s, ROW_AXIS)),
    )
    made = {"dSink_token": sums.sink}
    for name, gradient in (("dQ", sums.q), ("dK", sums.k), ("dV", sums.v)):
        made |= {name: gradient, f"amax_{name}": largest_of(gradient)}
    return made


def _rounded(step: Step, x: Array, like: str) -> Array:
    """To the type of a port."""
    return convert(convert(x, step.node.inputs[like].data_type), step.compute)


def _in_blocks(step: Step, x: Array, axis: int) -> Array:
    """To the type of dO, with a scale for each block along an axis."""
    kind = step.node.inputs["dO"].data_type
    values, _, scales = quantised(x, axis, BLOCK, kind, data_type.FP8_E8M0)
    return convert(values, step.compute) * scales


def _dequantised(step: Step, port: str) -> Array:
    x, scales, axis = step.wide(port), _scales(step, f"descale_{port}"), scaled_axis(step.node, f"descale_{port}")
    return x * jnp.repeat(scales, BLOCK, axis=axis)[:, :, : x.shape[2], : x.shape[3]]


def _scales(step: Step, port: str) -> Array:
    """The scales of a port whose memory holds tiles of 128 x 4, (batch, heads, ..., ...) with padding at the ends.

    A tile's scale of row r and column c is the one at 16 (r % 32) + 4 (r // 32) + c. Columns are blocks.
    """
    tensor, scales = step.node.inputs[port], step.wide(port)
    batch, heads, *plane = tensor.dim
    turned = scaled_axis(step.node, port) == 2
    rows, columns = reversed(plane) if turned else plane
    if tensor.stride[2] < tensor.stride[3]:
        scales = scales.swapaxes(2, 3)
    tiles = scales.reshape(batch, heads, rows // TILE[0], columns // TILE[1], 32, TILE[0] // 32, TILE[1])
    whole = tiles.transpose(0, 1, 2, 5, 4, 3, 6).reshape(batch, heads, rows, columns)
    return whole.swapaxes(2, 3) if turned else whole
