"""The generic reference engine, operation by operation, against numpy in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from cudnn_jax.engines import planning
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import GraphNotSupportedError

sys.path.append(str(Path(__file__).parents[2] / "graph"))
import random_graphs

Array = np.ndarray[Any, Any]


def double(**options: Any) -> pygraph:
    return pygraph(
        **{"io_data_type": "float64", "intermediate_data_type": "float64"} | options, compute_data_type="float64"
    )


def run(graph: pygraph, *arrays: Array, jitted: bool = True) -> list[Array]:
    """The outputs, of the text of the graph: what is written comes back and is what runs."""
    graph.freeze()
    back = pygraph.from_json(graph.to_json())
    planned = planning.plan(back, CPU, "xla")
    assert planned.plan.engine_id == 21_999
    with jax.enable_x64(True):
        fn = jax.jit(planned.artifact.fn) if jitted else planned.artifact.fn
        return [np.asarray(made) for made in fn(*(jnp.asarray(array) for array in arrays))]


def close(made: Array, expected: Array, tolerance: float = 1e-12) -> None:
    assert made.shape == expected.shape
    np.testing.assert_allclose(np.asarray(made, np.float64), np.asarray(expected, np.float64), tolerance, tolerance)


FOLDS: dict[str, Callable[..., Array]] = {
    "ADD": np.sum,
    "MUL": np.prod,
    "MIN": np.min,
    "MAX": np.max,
    "AMAX": lambda x, **along: np.max(np.abs(x), **along),
    "AVG": np.mean,
    "NORM1": lambda x, **along: np.sum(np.abs(x), **along),
    "NORM2": lambda x, **along: np.sqrt(np.sum(x * x, **along)),
    "MUL_NO_ZEROS": lambda x, **along: np.prod(np.where(x == 0, 1, x), **along),
}


def test_every_fold(rng: np.random.Generator) -> None:
    graph = double()
    x = graph.tensor((2, 3, 4))
    for mode in FOLDS:
        graph.reduction(x, mode=mode).set_output(True).set_dim((2, 1, 4))
    value = rng.standard_normal((2, 3, 4))
    value[0, 1] = 0
    for made, fold in zip(run(graph, value), FOLDS.values(), strict=True):
        close(made, fold(value, axis=1, keepdims=True))


def test_folds_within_groups_of_rows(rng: np.random.Generator) -> None:
    graph = double()
    x, starts = graph.tensor((1, 7, 2)), graph.tensor((3, 1, 1), data_type="int32")
    modes = [mode for mode in FOLDS if mode != "MIN"]
    for mode in modes:
        graph.reduction(x, group_offset=starts, mode=mode).set_output(True).set_dim((3, 1, 2))
    value, offsets = rng.standard_normal((1, 7, 2)), np.array([0, 2, 3], np.int32).reshape(3, 1, 1)
    for made, mode in zip(run(graph, value, offsets), modes, strict=True):
        parts = np.split(value[0], [2, 3])
        close(made, np.stack([FOLDS[mode](part, axis=0, keepdims=True) for part in parts]))


def test_folds_of_integers_and_of_nothing(rng: np.random.Generator) -> None:
    graph = pygraph(io_data_type="int32", compute_data_type="int32")
    x, empty = graph.tensor((2, 3)), graph.tensor((2, 0))
    graph.reduction(x, mode="MAX").set_output(True).set_dim((2, 1))
    graph.reduction(empty, mode="ADD").set_output(True).set_dim((2, 1))
    value = rng.integers(-9, 0, (2, 3), np.int32)
    largest, nothing = run(graph, value, np.zeros((2, 0), np.int32))
    np.testing.assert_array_equal(largest, value.max(1, keepdims=True))
    np.testing.assert_array_equal(nothing, np.zeros((2, 1), np.int32))


# (operation, dims of scale and bias, normalised axes) of an input (2, 3, 4)
NORMS = [
    ("layernorm", (1, 3, 4), (1, 2)),
    ("layernorm", (1, 1, 4), (2,)),
    ("adalayernorm", (2, 1, 4), (2,)),
    ("instancenorm", (1, 3, 1), (2,)),
    ("batchnorm", (1, 3, 1), (0, 2)),
]


def normed(x: Any, scale: Any, bias: Any, axes: tuple[int, ...], xp: Any = np) -> tuple[Any, Any, Any]:
    mean = xp.mean(x, axis=axes, keepdims=True)
    r = 1 / xp.sqrt(xp.mean((x - mean) ** 2, axis=axes, keepdims=True) + 0.25)
    return (x - mean) * r * scale + bias, mean, r


@pytest.mark.parametrize(("name", "weight", "axes"), NORMS)
def test_a_norm_and_its_gradients(name, weight, axes, rng: np.random.Generator) -> None:
    graph = double()
    dim = (2, 3, 4)
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(dim))
    x, scale, bias, grad = (graph.tensor(each) for each in (dim, weight, weight, dim))
    statistics = [graph.tensor(kept, data_type="float32") for _ in range(2)]
    phase = {} if name == "batchnorm" else {"norm_forward_phase": "TRAINING"}
    made = getattr(graph, name)(x, scale, bias, epsilon=0.25, **phase)[:3]
    back = getattr(graph, f"{name}_backward")(grad, x, scale, *statistics)
    for tensor in (*made, *back):
        tensor.set_output(True)
    arrays = [rng.standard_normal(each) for each in (dim, weight, weight)]
    cotangent = rng.standard_normal(dim)
    expected = normed(*arrays, axes)
    given = {x: arrays[0], scale: arrays[1], bias: arrays[2], grad: cotangent}
    given |= dict(zip(statistics, (each.astype(np.float32) for each in expected[1:]), strict=True))
    results = run(graph, *(given[tensor] for tensor in graph.inputs))
    for result, wanted, tolerance in zip(results[:3], expected, (1e-12, 1e-6, 1e-6), strict=True):
        close(result, wanted, tolerance)
    with jax.enable_x64(True):
        _, vjp = jax.vjp(lambda *taken: normed(*taken, axes, jnp)[0], *map(jnp.asarray, arrays))
        for result, wanted in zip(results[3:], vjp(jnp.asarray(cotangent)), strict=True):
            close(result, np.asarray(wanted), 1e-5)  # the statistics are float32


def test_a_batch_norms_running_statistics_and_inference(rng: np.random.Generator) -> None:
    graph = double()
    x = graph.tensor((5, 3))
    weights = [graph.tensor((1, 3)) for _ in range(2)]
    running = [graph.tensor((1, 3), data_type="float32") for _ in range(2)]
    made = graph.batchnorm(x, *weights, *running, epsilon=0.25, momentum=graph.scalar(0.125, "float32", rank=2))
    means = [graph.tensor((1, 3)) for _ in range(2)]
    for tensor in (*made[3:], graph.batchnorm_inference(x, *means, *weights)):
        tensor.set_output(True)
    value, scale, bias = rng.standard_normal((5, 3)), rng.standard_normal((1, 3)), rng.standard_normal((1, 3))
    old = rng.random((2, 1, 3)).astype(np.float32)
    mean, r = rng.standard_normal((1, 3)), rng.random((1, 3))
    next_mean, next_var, y = run(graph, value, scale, bias, *old, mean, r)
    close(next_mean, 0.875 * old[0] + 0.125 * value.mean(0, keepdims=True), 1e-6)
    close(next_var, 0.875 * old[1] + 0.125 * value.var(0, ddof=1, keepdims=True), 1e-6)
    close(y, (value - mean) * r * scale + bias)


def test_statistics_of_channels(rng: np.random.Generator) -> None:
    graph = double()
    for tensor in graph.genstats(graph.tensor((2, 3, 4))):
        tensor.set_output(True)
    value = rng.standard_normal((2, 3, 4))
    total, squares = run(graph, value)
    close(total, value.sum((0, 2), keepdims=True), 1e-6)
    close(squares, (value**2).sum((0, 2), keepdims=True), 1e-6)


class Window:
    """A convolution of two spatial axes, one product at a time."""

    def __init__(
        self, image: tuple[int, ...], taps: tuple[int, ...], pre: Any, post: Any, step: Any, wide: Any
    ) -> None:
        self.image, self.taps, self.pre, self.step, self.wide = image, taps, pre, step, wide
        room = [image[2 + at] + pre[at] + post[at] - wide[at] * (taps[2 + at] - 1) - 1 for at in range(2)]
        self.out = (image[0], taps[0], *(1 + room[at] // step[at] for at in range(2)))

    def products(self, mirrored: bool) -> Any:
        """(index of Y, of the image, of the filter) of each product that is not with padding."""
        groups = self.image[1] // self.taps[1]
        for n, k, p, q in product(*map(range, self.out)):
            for c, r, s in product(*map(range, self.taps[1:])):
                at = [o * self.step[i] + t * self.wide[i] - self.pre[i] for i, (o, t) in enumerate(((p, r), (q, s)))]
                if all(0 <= at[i] < self.image[2 + i] for i in range(2)):
                    channel = k // (self.taps[0] // groups) * self.taps[1] + c
                    taken = (k, c, self.taps[2] - 1 - r, self.taps[3] - 1 - s) if mirrored else (k, c, r, s)
                    yield (n, k, p, q), (n, channel, *at), taken


@pytest.mark.parametrize(
    ("taps", "options", "mirrored"),
    [
        ((4, 4, 2, 3), {"padding": (1, 0)}, False),
        ((4, 2, 2, 2), {"pre_padding": (1, 2), "stride": (2, 1), "dilation": (1, 2)}, True),
    ],
)
def test_a_convolution_and_its_gradients(taps, options, mirrored, rng: np.random.Generator) -> None:
    shape = (2, 4, 5, 4)
    both = options.get("padding", (0, 0))
    window = Window(
        shape,
        taps,
        options.get("pre_padding", both),
        options.get("post_padding", both),
        options.get("stride", (1, 1)),
        options.get("dilation", (1, 1)),
    )
    options = options | {"convolution_mode": "CONVOLUTION" if mirrored else "CROSS_CORRELATION"}
    graph = double()
    image, weight, loss = (graph.tensor(each) for each in (shape, taps, window.out))
    graph.conv_fprop(image, weight, **options).set_output(True)
    graph.conv_dgrad(loss, weight, **options).set_output(True).set_dim(shape)
    graph.conv_wgrad(image, loss, **options).set_output(True).set_dim(taps)
    x, w, dy = (rng.standard_normal(each) for each in (shape, taps, window.out))
    y, dx, dw = np.zeros(window.out), np.zeros(shape), np.zeros(taps)
    for out, at, tap in window.products(mirrored):
        y[out] += x[at] * w[tap]
        dx[at] += dy[out] * w[tap]
        dw[tap] += dy[out] * x[at]
    for made, expected in zip(run(graph, x, w, dy), (y, dx, dw), strict=True):
        close(made, expected)


def test_what_moves_elements(rng: np.random.Generator) -> None:
    graph = pygraph(io_data_type="int8")
    x, y = graph.tensor((2, 6)), graph.tensor((2, 3))
    graph.reshape(x).set_output(True).set_dim((3, 4))
    graph.slice(x, [(0, 1), (1, 6, 2)]).set_output(True)
    graph.transpose(x, (1, 0)).set_output(True)
    graph.concatenate([x, y, x], 1).set_output(True)
    a, b = (rng.integers(-128, 127, dim).astype(np.int8) for dim in ((2, 6), (2, 3)))
    made = run(graph, a, b)
    for result, expected in zip(made, (a.reshape(3, 4), a[:1, 1:6:2], a.T, np.concatenate([a, b, a], 1)), strict=True):
        assert result.dtype == np.int8
        np.testing.assert_array_equal(result, expected)


def test_rotation_and_its_gradient(rng: np.random.Generator) -> None:
    graph = double()
    x, freqs, grad = graph.tensor((2, 3, 8)), graph.tensor((1, 3, 6)), graph.tensor((2, 3, 8))
    options = {"output_scale": 0.5, "rope_dim": 6}
    graph.rope(x, freqs, **options).set_output(True)
    graph.rope_backward(grad, freqs, **options).set_output(True)
    value, angles, cotangent = (rng.standard_normal(tensor.dim) for tensor in (x, freqs, grad))

    def rotate(each: Any, xp: Any = np) -> Any:
        rest, low, high = each[..., :2], each[..., 2:5], each[..., 5:]
        c, s = xp.cos(angles), xp.sin(angles)
        turned = [low * c[..., :3] - high * s[..., :3], high * c[..., 3:] + low * s[..., 3:]]
        return 0.5 * xp.concatenate([rest, *turned], -1)

    made, back = run(graph, value, angles, cotangent)
    close(made, rotate(value))
    with jax.enable_x64(True):
        _, vjp = jax.vjp(lambda each: rotate(each, jnp), jnp.asarray(value))
        close(back, np.asarray(vjp(jnp.asarray(cotangent))[0]))


def test_scales_spread_over_their_blocks(rng: np.random.Generator) -> None:
    graph = pygraph(io_data_type="float32", intermediate_data_type="float32")
    x, scales, square, few = (
        graph.tensor(dim, data_type=kind)
        for dim, kind in (
            ((3, 40), "float8_e4m3fn"),
            ((3, 3), "float8_e8m0fnu"),
            ((4, 6), "float8_e5m2"),
            ((2, 2), "float32"),
        )
    )
    graph.block_scale_dequantize(x, scales, block_size=16).set_output(True)
    graph.block_scale_dequantize(square, few, block_size=(2, 3)).set_output(True)
    values = rng.standard_normal((3, 40)).astype(ml_dtypes.float8_e4m3fn)
    powers = (2.0 ** rng.integers(-5, 5, (3, 3))).astype(ml_dtypes.float8_e8m0fnu)
    others, wide = rng.standard_normal((4, 6)).astype(ml_dtypes.float8_e5m2), rng.random((2, 2)).astype(np.float32)
    first, second = run(graph, values, powers, others, wide)
    close(first, values.astype(np.float64) * np.repeat(powers.astype(np.float64), 16, 1)[:, :40], 1e-7)
    close(second, others.astype(np.float64) * np.kron(wide, np.ones((2, 3))), 1e-7)


def every(kind: Any) -> Array:
    """The finite numbers of an 8-bit type that are not negative, rising."""
    values = np.arange(256, dtype=np.uint8).view(kind).astype(np.float64)
    return np.unique(values[np.isfinite(values) & (values >= 0)])


@pytest.mark.parametrize(
    ("y", "scale", "axis", "largest"),
    [
        ("float8_e4m3fn", "float8_e8m0fnu", 1, 448.0),
        ("float8_e5m2", "float32", 0, 57344.0),
        ("float4_e2m1fn", "float8_e4m3fn", 1, 6.0),
    ],
)
def test_scales_are_rounded_up_and_values_to_the_nearest(y, scale, axis, largest, rng: np.random.Generator) -> None:
    dim, block = (4, 20), (2, 16)[axis]
    graph = pygraph(io_data_type="float32", compute_data_type="float64")
    made = graph.block_scale_quantize(graph.tensor(dim, data_type="float64"), block_size=block, axis=axis)
    for tensor, kind in zip(made, (y, scale), strict=True):
        tensor.set_output(True).set_data_type(kind)
    x = rng.standard_normal(dim) * 10.0 ** rng.integers(-2, 3, dim)
    x[:2] = 0
    x[2, 0] = largest  # a scale of 1 exactly, or nearly
    values, scales = run(graph, x)
    assert (values.dtype, scales.dtype) == (jnp.dtype(y), jnp.dtype(scale))
    size = -(-dim[axis] // block)
    padded = np.pad(np.abs(x), [(0, size * block - dim[at] if at == axis else 0) for at in range(2)])
    most = np.stack([part.max(axis) for part in np.split(padded, size, axis)], axis) / largest
    if scale == "float32":
        close(scales, most, 1e-7)
    else:
        numbers = every(jnp.dtype(scale))
        expected = numbers[np.minimum(np.searchsorted(numbers, most), len(numbers) - 1)]
        np.testing.assert_array_equal(scales.astype(np.float64), expected)
    spread = np.repeat(scales.astype(np.float64), block, axis)[: dim[0], : dim[1]]
    quotients = np.divide(x, spread, out=np.zeros(dim), where=spread != 0)
    np.testing.assert_array_equal(values.astype(np.float64), np.clip(quotients, -largest, largest).astype(jnp.dtype(y)))


def test_a_block_of_zeros_is_zeros_in_single_precision() -> None:
    """Its scale, the least of the type, is subnormal there."""
    graph = pygraph(io_data_type="float32")
    made = graph.block_scale_quantize(graph.tensor((2, 8)), block_size=8)
    for tensor, kind in zip(made, ("float8_e4m3fn", "float8_e8m0fnu"), strict=True):
        tensor.set_output(True).set_data_type(kind)
    values, scales = run(graph, np.array([[0.0] * 8, [448.0] * 8], np.float32))
    np.testing.assert_array_equal(values.astype(np.float32), [[0.0] * 8, [448.0] * 8])
    np.testing.assert_array_equal(scales.astype(np.float64), [[2.0**-127], [1.0]])


@pytest.mark.parametrize("mode", ["NONE", "GATHER", "SCATTER", "COMBINE"])
def test_rows_meet_the_weights_of_their_expert(mode, rng: np.random.Generator) -> None:
    rows, tokens, top_k = 6, 3, 2
    starts = np.array([0, 2, 2], np.int32)
    index = np.array([2, 0, 1, 0, 2, 1], np.int32)
    ks = np.array([0, 0, 0, 1, 1, 1], np.int32)
    graph = double()
    token = graph.tensor((1, tokens if mode == "GATHER" else rows, 4))
    weight, offsets = graph.tensor((3, 4, 5)), graph.tensor((3, 1, 1), data_type="int32")
    wanted = {"NONE": 0, "GATHER": 1, "SCATTER": 2, "COMBINE": 3}[mode]
    ports = dict(zip(("token_index", "token_ks"), (index, ks), strict=True))
    routed = {name: graph.tensor((1, rows, 1), data_type="int32") for name in list(ports)[:wanted]}
    more = {"top_k_scores": graph.tensor((1, rows, 1))} if mode == "COMBINE" else {}
    options = {"top_k": top_k} if wanted > 1 else {}
    graph.moe_grouped_matmul(token, weight, offsets, **routed, **more, mode=mode, **options).set_output(True)
    x, w, scores = (rng.standard_normal(dim) for dim in (token.dim, weight.dim, (1, rows, 1)))
    arrays = [x, w, starts.reshape(3, 1, 1), *(ports[name].reshape(1, rows, 1) for name in routed)]
    (made,) = run(graph, *arrays, *([scores] if more else []))
    taken = x[0][index] if mode == "GATHER" else x[0]
    expert = np.searchsorted(starts, np.arange(rows), side="right") - 1
    expected = np.stack([row @ w[at] for row, at in zip(taken, expert, strict=True)])
    if mode == "SCATTER":
        scattered = np.zeros_like(expected)
        scattered[index * top_k + ks] = expected
        expected = scattered
    if mode == "COMBINE":
        summed = np.zeros((tokens, 5))
        np.add.at(summed, index, expected * scores[0])
        expected = summed
    close(made, expected[None])


def test_the_gradient_of_experts_weights(rng: np.random.Generator) -> None:
    graph = double()
    loss, token = graph.tensor((1, 6, 5)), graph.tensor((1, 6, 4))
    graph.moe_grouped_matmul_bwd(loss, token, graph.tensor((3, 1, 1), data_type="int32")).set_output(True)
    dy, x = rng.standard_normal((1, 6, 5)), rng.standard_normal((1, 6, 4))
    (made,) = run(graph, dy, x, np.array([0, 2, 2], np.int32).reshape(3, 1, 1))
    parts = zip(np.split(x[0], [2, 2]), np.split(dy[0], [2, 2]), strict=True)
    close(made, np.stack([rows.T @ losses for rows, losses in parts]))


@settings(deadline=None, max_examples=20)
@given(random_graphs.recipes)
def test_random_graphs_are_numpys(recipe) -> None:
    graph = double()
    random_graphs.build(recipe, graph)
    arrays = [np.random.default_rng(len(recipe)).standard_normal(dim) for dim in random_graphs.SHAPES]
    expected = random_graphs.value(recipe, arrays)
    graph.freeze()
    used = [arrays[graph.tensors.index(tensor)] for tensor in graph.inputs]
    generic = any(step.kind != "unary" and step.kind != "binary" for step in recipe)
    planned = planning.plan(graph, CPU, "xla")
    assert (planned.plan.engine_id == 21_999) == generic
    with jax.enable_x64(True):
        made = planned.artifact.fn(*map(jnp.asarray, used))
    for result, tensor in zip(made, graph.outputs, strict=True):
        close(np.asarray(result), expected[graph.tensors.index(tensor)], 1e-9)


def test_nodes_of_families_are_run_by_their_own_references(rng: np.random.Generator) -> None:
    """A norm, attention over what it makes, and a product with the result."""
    graph = double()
    x, weight = graph.tensor((1, 2, 3, 4)), graph.tensor((1, 1, 4, 5))
    y, _ = graph.rmsnorm(x, graph.tensor((1, 1, 1, 4)), epsilon=0.25, norm_forward_phase="INFERENCE")
    o, _ = graph.sdpa(y, y, x, attn_scale=0.5)
    graph.matmul(o, weight).set_output(True)
    value, scale, w = (rng.standard_normal(tensor.dim) for tensor in graph.inputs)
    (made,) = run(graph, value, scale, w)
    normal = value / np.sqrt((value**2).mean(-1, keepdims=True) + 0.25) * scale
    p = np.exp(0.5 * normal @ normal.swapaxes(-1, -2))
    close(made, p / p.sum(-1, keepdims=True) @ value @ w, 1e-5)  # attention computes in float32


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda graph: graph.block_scale_dequantize(
                graph.tensor((2, 4)), graph.tensor((2, 1)), block_size=4, is_negative_scale=True
            ),
            "block_scale_dequantize: is_negative_scale: what a negative scale is, the backend alone says",
        ),
        (
            lambda graph: graph.batchnorm(
                *(graph.tensor(dim) for dim in ((2, 3), (1, 3), (1, 3))), epsilon=0.1, peer_stats=[graph.tensor((2, 3))]
            )[0],
            r"batchnorm: peer_stats\[0\]: sums are exchanged between devices",
        ),
        (
            lambda graph: graph.conv_fprop(*(graph.tensor((1, 1, 2)) for _ in "xw"), compute_data_type="int32"),
            "conv_fprop: compute type int32, needs a floating type",
        ),
        (
            lambda graph: graph.block_scale_quantize(graph.tensor((2, 4)), block_size=4)[0],
            "block_scale_quantize: Y of type float32, one of float4_e2m1fn, float8_e4m3fn, float8_e5m2",
        ),
        (
            lambda graph: graph.exp(
                graph.sdpa(
                    *(graph.tensor((1, 1, 4, 4)) for _ in "qkv"),
                    dropout=(0.5, *(graph.tensor((1, 1, 1, 1), data_type="int32") for _ in range(2))),
                )[0]
            ),
            "sdpa: cannot express dropout 0.5, whose random numbers are those of cuDNN's kernels",
        ),
    ],
)
def test_what_is_the_backends_alone_is_declined_by_name(build, reason) -> None:
    graph = pygraph(io_data_type="float32")
    build(graph).set_output(True)
    with pytest.raises(GraphNotSupportedError, match=reason):
        planning.plan(graph, CPU)


def test_a_plan_is_found_again_by_its_identity() -> None:
    graph = pygraph(io_data_type="float32")
    graph.transpose(graph.tensor((2, 3)), (1, 0)).set_output(True)
    graph.create_execution_plan(21_999)
    assert [plan.name for plan in graph.plans] == ["xla"]
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.empty((2, 3), np.float32)
    graph.execute({graph.inputs[0]: x, graph.outputs[0]: y.T})
    np.testing.assert_array_equal(y, x)
    assert prod(y.shape) == 6
