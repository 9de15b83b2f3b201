"""Gradients of graphs, against those that JAX finds of the same formula in float64, with random cotangents."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.scipy.special import erf

import cudnn_jax
from cudnn_jax.graph import OPERATIONS
from support.gradients import QUICK, Array, Formula, check, close, double, draw, given_of, in_order, outputs

sys.path.append(str(Path(__file__).parents[1] / "graph"))
import random_graphs

# Pointwise


def _normal_cdf(x: Any) -> Any:
    return (1 + erf(x / np.sqrt(2))) / 2


def _clipped(x: Any) -> Any:
    return jnp.where(x > 0.25, jnp.minimum(x, 0.75), 0.25 + 0.5 * (x - 0.25))


def _number(condition: Formula) -> Formula:
    return lambda *taken: condition(*taken).astype(jnp.float64)


OPTIONS: dict[str, dict[str, Any]] = {
    "gen_index": {"axis": 1},
    "leaky_relu": {"negative_slope": 0.25},
    "relu": {"negative_slope": 0.5, "lower_clip": 0.25, "upper_clip": 0.75},
    "swish": {"swish_beta": 0.5},
}
FORMULAS: dict[str, Formula] = {
    "abs": jnp.abs,
    "add": jnp.add,
    "add_square": lambda a, b: a + b * b,
    "bias": jnp.add,
    "binary_select": lambda a, b, mask: jnp.where(mask != 0, a, b),
    "ceil": jnp.ceil,
    "cmp_eq": _number(jnp.equal),
    "cmp_ge": _number(jnp.greater_equal),
    "cmp_gt": _number(jnp.greater),
    "cmp_le": _number(jnp.less_equal),
    "cmp_lt": _number(jnp.less),
    "cmp_neq": _number(jnp.not_equal),
    "cos": jnp.cos,
    "div": jnp.divide,
    "elu": jax.nn.elu,
    "erf": erf,
    "exp": jnp.exp,
    "floor": jnp.floor,
    "gelu": lambda x: x * _normal_cdf(x),
    "gelu_approx_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gen_index": lambda x: jnp.broadcast_to(jnp.arange(x.shape[1], dtype=x.dtype), x.shape),
    "identity": lambda x: x,
    "leaky_relu": lambda x: jnp.where(x > 0, x, 0.25 * x),
    "log": jnp.log,
    "logical_and": _number(jnp.logical_and),
    "logical_not": _number(jnp.logical_not),
    "logical_or": _number(jnp.logical_or),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mod": jnp.fmod,
    "mul": jnp.multiply,
    "neg": jnp.negative,
    "pow": jnp.power,
    "reciprocal": lambda x: 1 / x,
    "relu": _clipped,
    "rsqrt": lambda x: x**-0.5,
    "scale": jnp.multiply,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "softplus": jax.nn.softplus,
    "sqrt": jnp.sqrt,
    "sub": jnp.subtract,
    "swish": lambda x: x * jax.nn.sigmoid(0.5 * x),
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}
POINTWISE = {name: operation for name, operation in OPERATIONS.items() if operation.type == "POINTWISE"}
POSITIVE = ("log", "pow", "rsqrt", "sqrt")


def _pointwise(rng: np.random.Generator) -> tuple[cudnn_jax.pygraph, Formula, list[Array]]:
    """All modes in one graph, over inputs of their own, of which the last is broadcast."""
    graph, arrays, formulas = double(), [], []
    for name, formula in FORMULAS.items():
        ports = POINTWISE[name].inputs
        dims = [(2, 3)] * (len(ports) - 1) + [(1, 3) if len(ports) > 1 else (2, 3)]
        outputs(getattr(graph, name)(*map(graph.tensor, dims), **OPTIONS.get(name, {})))
        formulas.append((len(arrays), len(arrays) + len(dims), formula))
        for dim in dims:
            x = rng.standard_normal(dim)
            arrays.append(np.abs(x) + 0.1 if name in POSITIVE else x)
    return graph, lambda *given: tuple(fn(*given[start:stop]) for start, stop, fn in formulas), arrays


def test_every_pointwise_mode(rng: np.random.Generator) -> None:
    """Values, gradients, and the gradients of gradients by the inputs and by the cotangents of the first.

    The gradients of some are the backward modes, whose gradients are then the second ones.
    """
    assert set(FORMULAS) == {name for name in POINTWISE if not name.endswith("_backward")}
    check(*_pointwise(rng), rng, 1e-9, twice=True)


def test_where_a_slope_is_not_unique(rng: np.random.Generator) -> None:
    """Equal ones share what the larger gets, |x| is flat at 0, and 0 ** y and x ** 0 are as far as they are finite."""
    graph = double()
    x, y = graph.tensor((4,)), graph.tensor((4,))
    outputs((graph.max(x, y), graph.min(x, y), graph.abs(x), graph.pow(x, y)))
    first, second = np.array([1.0, 2.0, 0.0, 0.0]), np.array([1.0, 1.0, 0.0, 2.0])
    with jax.enable_x64(True):
        made, pull = jax.vjp(graph.as_jax(), jnp.asarray(first), jnp.asarray(second))
        cotangents = draw(made, rng)
        d_first, d_second = pull(cotangents)
    high, low, size, power = map(np.asarray, cotangents)
    shares = np.array([0.5, 1.0, 0.5, 0.0])
    slope = np.array([1.0, 1.0, 0.0, 0.0])
    close(d_first, high * shares + low * (1 - shares) + size * (first > 0) + power * slope, 1e-12)
    exponent = np.array([0.0, 2 * np.log(2), 0.0, 0.0])
    close(d_second, high * (1 - shares) + low * shares + power * exponent, 1e-12)


# Structured


@settings(deadline=None, max_examples=12)
@given(random_graphs.smooth)
def test_random_graphs(recipe: list[random_graphs.Step]) -> None:
    graph, rng = double(), np.random.default_rng(len(recipe))
    random_graphs.build(recipe, graph)
    arrays = [rng.standard_normal(dim) for dim in random_graphs.SHAPES]
    graph.freeze()
    place = {id(tensor): at for at, tensor in enumerate(graph.tensors)}
    used, made = ([place[id(tensor)] for tensor in side] for side in (graph.inputs, graph.outputs))

    def formula(*given: Any) -> tuple[Any, ...]:
        whole = [jnp.asarray(array) for array in arrays]
        for at, x in zip(used, given, strict=True):
            whole[at] = x
        values = random_graphs.value(recipe, whole, jnp)
        return tuple(values[at] for at in made)

    check(graph, formula, [arrays[at] for at in used], rng, 1e-9)


def test_every_fold(rng: np.random.Generator) -> None:
    folds: dict[str, Formula] = {
        "ADD": jnp.sum,
        "MUL": jnp.prod,
        "MIN": jnp.min,
        "MAX": jnp.max,
        "AMAX": lambda x, **along: jnp.max(x * jnp.sign(x), **along),
        "AVG": jnp.mean,
        "NORM1": lambda x, **along: jnp.sum(x * jnp.sign(x), **along),
        "NORM2": lambda x, **along: jnp.sqrt(jnp.sum(x * x, **along)),
        "MUL_NO_ZEROS": lambda x, **along: jnp.prod(jnp.where(x == 0, 1, x), **along),
    }
    graph = double()
    x = graph.tensor((3, 5, 2))
    outputs([graph.reduction(x, mode=mode).set_dim((3, 1, 2)) for mode in folds])
    value = rng.standard_normal((3, 5, 2))
    value[0, 1] = 0  # a product of one 0, and of two
    value[1, 1:3] = 0
    value[2, 0] = value[2, 1] = 5.0  # equal extremes
    check(graph, lambda x: [fold(x, axis=1, keepdims=True) for fold in folds.values()], [value], rng, 1e-9, twice=True)


def test_what_a_sum_repeats_counts_as_often(rng: np.random.Generator) -> None:
    """A sum's cotangent is the same all along its axes, over which other operands are broadcast too."""
    graph = double()
    x, y, z = graph.tensor((2, 3, 4)), graph.tensor((3, 1)), graph.tensor((2, 1, 1))
    whole = graph.add(graph.mul(z, z), graph.bias(x, y))
    outputs(
        (graph.reduction(whole, mode="ADD").set_dim((1, 3, 1)), graph.reduction(whole, mode="AVG").set_dim((1,) * 3))
    )

    def formula(x: Any, y: Any, z: Any) -> Any:
        whole = z * z + (x + y)
        return whole.sum((0, 2), keepdims=True), whole.mean(keepdims=True)

    arrays = [rng.standard_normal(each.dim) for each in (x, y, z)]
    check(graph, in_order(graph, formula, x, y, z), given_of(graph, (x, y, z), arrays), rng, twice=True)


def test_products_whose_axes_are_broadcast(rng: np.random.Generator) -> None:
    """A product's cotangent that a sum made narrow, and operands of different ranks."""
    graph = double()
    x, y = graph.tensor((2, 1, 3, 4)), graph.tensor((5, 4, 2))
    product = graph.matmul(x, y)
    outputs((graph.reduction(product, mode="ADD").set_dim((2, 5, 3, 1)), graph.exp(product)))
    arrays = [rng.standard_normal(each.dim) for each in (x, y)]
    check(graph, lambda x, y: ((x @ y).sum(-1, keepdims=True), jnp.exp(x @ y)), arrays, rng, twice=True)


def test_moved_elements(rng: np.random.Generator) -> None:
    graph = double()
    x, y = graph.tensor((3, 8)), graph.tensor((3, 2))
    flat = graph.reshape(graph.tanh(x)).set_dim((4, 6))
    part = graph.slice(flat, [(1, 3), (1, 6, 2)])
    outputs(
        (
            flat,
            graph.slice(x, [(2, 3), (0, 8, 3)]),
            graph.slice(x, [(0, 3), (2, 5)]),
            graph.reduction(graph.transpose(part, (1, 0)), mode="ADD").set_dim((1, 2)),
            graph.reduction(graph.concatenate([y, x, y], 1), mode="AVG").set_dim((3, 1)),
            graph.concatenate([y, x], 1),
        )
    )

    def formula(x: Any, y: Any) -> Any:
        flat = jnp.tanh(x).reshape(4, 6)
        part = flat[1:3, 1:6:2].T.sum(0, keepdims=True)
        whole = jnp.concatenate([y, x, y], 1).mean(1, keepdims=True)
        return flat, x[2:3, 0:8:3], x[:, 2:5], part, whole, jnp.concatenate([y, x], 1)

    arrays = [rng.standard_normal(each.dim) for each in graph.inputs]
    check(graph, in_order(graph, formula, x, y), arrays, rng, twice=True)


@pytest.mark.parametrize(
    ("name", "weight", "axes"),
    [
        ("rmsnorm", (1, 1, 4), (2,)),
        ("layernorm", (1, 3, 4), (1, 2)),
        ("adalayernorm", (2, 1, 4), (2,)),
        ("instancenorm", (1, 3, 1), (2,)),
        ("batchnorm", (1, 3, 1), (0, 2)),
    ],
)
def test_a_norm_and_its_statistics(name: str, weight: Any, axes: Any, rng: np.random.Generator) -> None:
    """Also of an input of a norm that another node makes, and where the phase alone would make no statistics."""
    graph = double()
    x, scale, bias = (graph.tensor(dim) for dim in ((2, 3, 4), weight, weight))
    phase = {} if name == "batchnorm" else {"norm_forward_phase": "TRAINING"}
    y, *statistics = getattr(graph, name)(x, scale, bias, epsilon=0.25, **phase)
    outputs((graph.sin(y), *statistics))
    if phase:
        outputs(getattr(graph, name)(graph.cos(x), scale, bias, epsilon=0.5, norm_forward_phase="INFERENCE")[0])

    def normed(x: Any, scale: Any, bias: Any, epsilon: float) -> Any:
        mean = 0 if name == "rmsnorm" else jnp.mean(x, axis=axes, keepdims=True)
        r = jax.lax.rsqrt(jnp.mean((x - mean) ** 2, axis=axes, keepdims=True) + epsilon)
        return (x - mean) * r * scale + bias, mean, r

    def formula(x: Any, scale: Any, bias: Any) -> Any:
        y, mean, r = normed(x, scale, bias, 0.25)
        made = [each.astype(jnp.float32) for each in ([r] if name == "rmsnorm" else [mean, r])]
        return [*made, jnp.sin(y), *([normed(jnp.cos(x), scale, bias, 0.5)[0]] if phase else [])]

    arrays = [rng.standard_normal(dim) for dim in ((2, 3, 4), weight, weight)]
    check(graph, formula, arrays, rng, 1e-5)  # statistics are float32


def test_norms_without_weights_and_with_running_statistics(rng: np.random.Generator) -> None:
    graph = double()
    x, bias, kept = graph.tensor((4, 3)), graph.tensor((1, 3)), graph.tensor((1, 3), data_type="float32")
    outputs(
        (
            graph.layernorm(x, None, bias, epsilon=0.25, norm_forward_phase="TRAINING")[0],
            graph.rmsnorm(x, epsilon=0.25, norm_forward_phase="TRAINING")[0],
            graph.batchnorm(x, bias, bias, kept, kept, epsilon=0.25, momentum=0.5)[3],
            graph.batchnorm_inference(x, bias, graph.exp(bias), bias, bias),
            *graph.genstats(x),
        )
    )

    def formula(x: Any, bias: Any, kept: Any) -> Any:
        centred = x - x.mean(1, keepdims=True)
        layer = centred * jax.lax.rsqrt((centred**2).mean(1, keepdims=True) + 0.25) + bias
        rms = x * jax.lax.rsqrt((x * x).mean(1, keepdims=True) + 0.25)
        running = 0.5 * kept + 0.5 * jax.lax.stop_gradient(x).mean(0, keepdims=True)
        known = (x - bias) * jnp.exp(bias) * bias + bias
        sums = [each.sum(0, keepdims=True).astype(jnp.float32) for each in (x, x * x)]
        return layer, rms, running.astype(jnp.float32), known, *sums

    value, weight = rng.standard_normal((4, 3)), rng.standard_normal((1, 3))
    arrays = {id(x): value, id(bias): weight, id(kept): weight.astype(np.float32)}

    def stopped(x: Any, bias: Any, kept: Any) -> Any:
        return formula(x, bias, jax.lax.stop_gradient(kept))

    given = [arrays[id(tensor)] for tensor in graph.inputs]
    check(graph, in_order(graph, stopped, x, bias, kept), given, rng, 1e-5)


@pytest.mark.parametrize("mode", ["CROSS_CORRELATION", "CONVOLUTION"])
def test_convolutions(mode: str, rng: np.random.Generator) -> None:
    """Each of the three, whose gradients are the two others."""
    graph = double()
    window = {"pre_padding": (1, 0), "post_padding": (0, 2), "stride": (2, 1), "dilation": (1, 2)}
    window = window | {"convolution_mode": mode}
    image, taps, loss = graph.tensor((2, 4, 5, 4)), graph.tensor((4, 2, 2, 2)), graph.tensor((2, 4, 3, 4))
    made = (
        graph.conv_fprop(image, taps, **window),
        graph.conv_dgrad(loss, taps, **window).set_dim(image.dim),
        graph.conv_wgrad(image, loss, **window).set_dim(taps.dim),
    )
    outputs(made)

    def convolve(image: Any, taps: Any) -> Any:
        taps = taps[:, :, ::-1, ::-1] if mode == "CONVOLUTION" else taps
        return jax.lax.conv_general_dilated(
            image, taps, (2, 1), [(1, 0), (0, 2)], rhs_dilation=(1, 2), feature_group_count=2
        )

    def formula(image: Any, taps: Any, loss: Any) -> Any:
        y, pull = jax.vjp(convolve, image, taps)
        return y, *pull(loss)

    check(graph, formula, [rng.standard_normal(each.dim) for each in (image, taps, loss)], rng, twice=True)


def test_rotations(rng: np.random.Generator) -> None:
    graph = double()
    x, freqs, grad = graph.tensor((2, 3, 8)), graph.tensor((1, 3, 6)), graph.tensor((2, 3, 8))
    options = {"output_scale": 0.5, "rope_dim": 6}
    outputs((graph.rope(x, freqs, **options), graph.rope_backward(grad, freqs, **options)))

    def rotate(x: Any, freqs: Any) -> Any:
        rest, low, high = x[..., :2], x[..., 2:5], x[..., 5:]
        (c, d), (s, t) = (jnp.split(each(freqs), 2, -1) for each in (jnp.cos, jnp.sin))
        return 0.5 * jnp.concatenate([rest, low * c - high * s, high * d + low * t], -1)

    def formula(x: Any, freqs: Any, grad: Any) -> Any:
        return rotate(x, freqs), jax.vjp(lambda x: rotate(x, freqs), x)[1](grad)[0]

    check(graph, formula, [rng.standard_normal(each.dim) for each in (x, freqs, grad)], rng, twice=True)


def test_block_scales(rng: np.random.Generator) -> None:
    """Dequantising is linear in both; quantising is straight through, whatever the rounding."""
    graph = double()
    x, scales, square, few = (graph.tensor(dim) for dim in ((3, 10), (3, 3), (4, 6), (2, 2)))
    y, scale = graph.block_scale_quantize(graph.exp(x), block_size=4)
    y.set_data_type("float8_e4m3fn"), scale.set_data_type("float8_e8m0fnu")
    outputs(
        (
            graph.block_scale_dequantize(x, scales, block_size=4),
            graph.block_scale_dequantize(square, few, block_size=(2, 3)),
            graph.block_scale_dequantize(y, scale, block_size=4),
        )
    )

    def formula(x: Any, scales: Any, square: Any, few: Any) -> Any:
        wide = jnp.repeat(scales, 4, 1)[:, :10]
        value = jnp.exp(x)
        most = jnp.pad(value, ((0, 0), (0, 2))).reshape(3, 3, 4).max(-1) / 448
        power = jnp.repeat(2.0 ** jnp.ceil(jnp.log2(most)), 4, 1)[:, :10]
        rounded = (value / power).astype(jnp.float8_e4m3fn).astype(x.dtype) * power
        straight = value + jax.lax.stop_gradient(rounded - value)
        return x * wide, square * jnp.kron(few, jnp.ones((2, 3))), straight

    arrays = [rng.standard_normal(each.dim) for each in (x, scales, square, few)]
    check(
        graph, in_order(graph, formula, x, scales, square, few), given_of(graph, (x, scales, square, few), arrays), rng
    )


def test_rows_and_their_experts(rng: np.random.Generator) -> None:
    """The grouped product, whose offsets follow each other for two batches of experts, and its weights' gradient."""
    graph = double()
    token, weight = graph.tensor((1, 7, 4)), graph.tensor((2, 4, 3))
    offsets, loss = graph.tensor((4, 1, 1), data_type="int32"), graph.tensor((1, 7, 3))
    starts = np.array([0, 2, 2, 5], np.int32)
    tensors = (token, weight, offsets, loss)
    outputs((graph.moe_grouped_matmul(token, weight, offsets), graph.moe_grouped_matmul_bwd(loss, token, offsets)))
    expert = np.searchsorted(starts, np.arange(7), side="right") - 1

    def formula(token: Any, weight: Any, offsets: Any, loss: Any) -> Any:
        rows = jnp.einsum("rk,rkn->rn", token[0], weight[expert % 2])
        chosen = jnp.asarray(np.arange(4)[:, None] == expert, token.dtype)
        return rows[None], jnp.einsum("er,rk,rn->ekn", chosen, token[0], loss[0])

    arrays = [rng.standard_normal(each.dim) for each in tensors]
    arrays[2] = starts.reshape(4, 1, 1)
    check(graph, in_order(graph, formula, *tensors), given_of(graph, tensors, arrays), rng, twice=True)


def test_attention_between_other_nodes(rng: np.random.Generator) -> None:
    graph = double()
    q, k, v = (graph.tensor((1, 2, 4, 8)) for _ in "qkv")
    bias = graph.tensor((1, 1, 4, 4))
    out, _ = graph.sdpa(graph.sin(q), k, v, attn_scale=0.5, bias=bias, use_causal_mask=True)
    outputs(graph.exp(out))

    def formula(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = 0.5 * jnp.sin(q) @ k.swapaxes(-1, -2) + bias
        p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((4, 4), bool)), scores, -jnp.inf), axis=-1)
        return (jnp.exp(p @ v),)

    tensors = (q, k, v, bias)
    arrays = [rng.standard_normal(each.dim) for each in tensors]
    check(graph, in_order(graph, formula, *tensors), given_of(graph, tensors, arrays), rng, 1e-5)


def test_attention_with_a_sink_slopes_and_a_callers_dropout(rng: np.random.Generator) -> None:
    graph = double()
    q, k, v = (graph.tensor((1, 2, 4, 8)) for _ in "qkv")
    sink, kept = graph.tensor((1, 2, 1, 1), data_type="float32"), graph.tensor((1, 2, 4, 4), data_type="int8")
    out, stats = graph.sdpa(
        q,
        graph.sin(k),
        v,
        attn_scale=graph.scalar(0.5, "float32"),
        use_alibi_mask=True,
        diagonal_band_right_bound=0,
        sink_token=sink,
        dropout=(kept, graph.scalar(1.5, "float32")),
        generate_stats=True,
    )
    outputs((out, stats))

    def formula(q: Any, k: Any, v: Any, sink: Any, kept: Any) -> Any:
        distance = jnp.arange(4) - jnp.arange(4)[:, None]
        scores = 0.5 * q @ jnp.sin(k).swapaxes(-1, -2) + jnp.array([2.0**-4, 2.0**-8])[:, None, None] * distance
        scores = jnp.where(distance <= 0, scores, -jnp.inf)
        whole = jnp.concatenate([scores, jnp.broadcast_to(sink, (1, 2, 4, 1))], axis=-1)
        p = jax.nn.softmax(whole, axis=-1)[..., :4]
        return (1.5 * kept * p) @ v, jax.nn.logsumexp(whole, axis=-1, keepdims=True).astype(jnp.float32)

    tensors = (q, k, v, sink, kept)
    arrays = [rng.standard_normal(each.dim) for each in tensors]
    arrays[3], arrays[4] = arrays[3].astype(np.float32), np.asarray(arrays[4] > 0, np.int8)
    check(graph, in_order(graph, formula, *tensors), given_of(graph, tensors, arrays), rng, 1e-5)


def test_linear_attention_is_its_own_functions(rng: np.random.Generator) -> None:
    """Over packed tokens, of the output and of the final state, which are the caller's without being asked for."""
    graph = cudnn_jax.pygraph(io_data_type="float32")
    q, k, v = (graph.tensor((6, 2, 4)) for _ in "qkv")
    g, beta, starts = graph.tensor((6, 2)), graph.tensor((6, 2)), graph.tensor((3,), data_type="int32")
    graph.gdn(graph.sin(q), k, v, graph.neg(g), beta, starts, output_final_state=True)
    tensors = (q, k, v, g, beta, starts)
    arrays = [np.asarray(rng.random(each.dim), np.float32) for each in tensors]
    arrays[5] = np.array([0, 2, 6], np.int32)

    def formula(q: Any, k: Any, v: Any, g: Any, beta: Any, starts: Any) -> Any:
        return cudnn_jax.gdn(jnp.sin(q), k, v, -g, beta, cu_seqlens=starts, output_final_state=True)

    check(graph, in_order(graph, formula, *tensors), given_of(graph, tensors, arrays), rng, 1e-6)


# Further derivatives


def test_further_derivatives_of_a_layer(rng: np.random.Generator) -> None:
    """Two gradients deep through a product, a convolution, a rotation and folds; forward mode where JAX itself runs."""
    graph = double()
    image, taps, weight = graph.tensor((1, 2, 4, 4)), graph.tensor((2, 2, 3, 3)), graph.tensor((4, 4))
    y = graph.gelu(graph.conv_fprop(image, taps, padding=(1, 1)))
    z = graph.rope(graph.matmul(y, weight), graph.slice(image, [(0, 1), (0, 1)]))
    outputs(graph.reduction(z, mode="NORM2").set_dim((1, 2, 1, 1)))

    def formula(image: Any, taps: Any, weight: Any) -> Any:
        y = jax.lax.conv_general_dilated(image, taps, (1, 1), [(1, 1), (1, 1)])
        z = (y * _normal_cdf(y)) @ weight
        low, high, (c, s) = z[..., :2], z[..., 2:], (f(image[:, :1]) for f in (jnp.cos, jnp.sin))
        z = jnp.concatenate([low * c[..., :2] - high * s[..., :2], high * c[..., 2:] + low * s[..., 2:]], -1)
        return (jnp.sqrt((z * z).sum((2, 3), keepdims=True)),)

    arrays = [rng.standard_normal(each.dim) for each in (image, taps, weight)]
    with jax.enable_x64(True):
        given = list(map(jnp.asarray, arrays))
        direction = draw(given, rng)

        def deep(fn: Formula) -> Any:
            def slope(given: Any) -> Any:
                inner = jax.grad(lambda given: jnp.sin(fn(*given)[0]).sum())(given)
                return sum((x * y).sum() for x, y in zip(inner, direction, strict=True))

            return jax.jit(jax.grad(slope), compiler_options=QUICK)(given)

        def ahead(fn: Formula) -> Any:
            return jax.jit(partial(jax.jvp, lambda given: fn(*given)[0]))((given,), (direction,))

        def ordered(implementation: str | None) -> Formula:
            fn = graph.as_jax(implementation)
            return lambda *given: fn(*given_of(graph, (image, taps, weight), list(given)))

        for made, expected in (
            (deep(ordered(None)), deep(formula)),
            (ahead(ordered("xla")), ahead(formula)),
        ):
            for x, y in zip(made, expected, strict=True):
                close(x, y, 1e-9)
