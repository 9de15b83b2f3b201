"""The plain functions over graphs of one node, and their gradients, against JAX's of the same formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from support.gradients import QUICK, Formula, close

TOLERANCE = {"float64": 1e-5, "float32": 3e-6, "bfloat16": 1e-2}
"""Statistics of norms are float32 always."""


def check(fn: Formula, formula: Formula, arrays: list[Any], rng: np.random.Generator, tolerance: float) -> None:
    """Value and gradients of all arrays, jitted, from a random cotangent."""

    def pulled(fn: Formula, cotangent: Any, arrays: Any) -> Any:
        made, pull = jax.vjp(fn, *arrays)
        return made, pull(cotangent.astype(made.dtype))

    with jax.enable_x64(True):
        arrays = [jnp.asarray(array) for array in arrays]
        like = jax.eval_shape(formula, *arrays)
        cotangent = jnp.asarray(rng.standard_normal(like.shape)).astype(jax.eval_shape(fn, *arrays).dtype)
        made = jax.jit(partial(pulled, fn), compiler_options=QUICK)(cotangent, arrays)
        wide = [array.astype(jnp.float64) for array in arrays]
        expected = jax.jit(partial(pulled, formula), compiler_options=QUICK)(cotangent, wide)
        for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
            close(x, y, tolerance)
        assert [x.dtype for x in made[1]] == [array.dtype for array in arrays]
        assert made[0].dtype == arrays[0].dtype


def normed(x: Any, scale: Any, bias: Any, axes: Any, centred: bool, epsilon: float) -> Any:
    x = x - x.mean(axes, keepdims=True) if centred else x
    dims = [size if at in axes else 1 for at, size in enumerate(x.shape)]
    return x / jnp.sqrt((x * x).mean(axes, keepdims=True) + epsilon) * scale.reshape(dims) + bias.reshape(dims)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fn", "centred", "axis"), [(cudnn_jax.rms_norm, False, -1), (cudnn_jax.layer_norm, True, (0, 2))]
)
def test_norms(fn: Any, centred: bool, axis: Any, dtype: str, rng: np.random.Generator) -> None:
    """Also over an axis in the middle, and with weights in a type of their own."""
    axes = (2,) if axis == -1 else axis
    dim = tuple((3, 4, 5)[at] for at in axes)
    arrays = [rng.standard_normal((3, 4, 5)).astype(dtype), *(rng.standard_normal(dim).astype("float32") for _ in "sb")]
    run = partial(fn, axis=axis, epsilon=0.25)
    formula = partial(normed, axes=axes, centred=centred, epsilon=0.25)
    check(lambda *each: run(*each), lambda *each: formula(*each), arrays, rng, TOLERANCE[dtype])


@pytest.mark.parametrize(("fn", "centred"), [(cudnn_jax.rms_norm, False), (cudnn_jax.layer_norm, True)])
def test_norms_without_weights(fn: Any, centred: bool, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 8)).astype("float32")
    plain = partial(normed, scale=np.ones(8), bias=np.zeros(8), axes=(2,), centred=centred, epsilon=1e-6)
    check(fn, lambda x: plain(x), [x], rng, 3e-6)
    shifted = partial(normed, scale=np.ones(8), axes=(2,), centred=centred, epsilon=1e-6)
    bias = rng.standard_normal(8).astype("float32")
    check(lambda x, b: fn(x, bias=b), lambda x, b: shifted(x, bias=b), [x, bias], rng, 3e-6)


@pytest.mark.parametrize("angles", [(2, 3, 1, 6), (3, 1, 8), (6,)])
def test_a_rotation(angles: Any, rng: np.random.Generator) -> None:
    def formula(x: Any, angles: Any) -> Any:
        width = angles.shape[-1]
        rest, low, high = jnp.split(x, [8 - width, 8 - width // 2], axis=-1)
        (c, d), (s, t) = (jnp.split(each(angles), 2, -1) for each in (jnp.cos, jnp.sin))
        return 0.5 * jnp.concatenate([rest, low * c - high * s, high * d + low * t], -1)

    arrays = [rng.standard_normal(dim).astype("float32") for dim in ((2, 3, 4, 8), angles)]
    check(partial(cudnn_jax.rope, output_scale=0.5), formula, arrays, rng, 3e-6)


@pytest.mark.parametrize(
    ("image", "weight", "options"),
    [
        ((2, 4, 6, 5), (6, 2, 3, 2), {"stride": (2, 1), "padding": ((1, 0), 1), "dilation": (1, 2)}),
        ((2, 3, 7), (4, 3, 3), {"padding": 1}),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolution(
    image: Any, weight: Any, options: dict[str, Any], channels_last: bool, rng: np.random.Generator
) -> None:
    count = len(image) - 2

    def each(value: Any) -> list[Any]:
        return list(value) if isinstance(value, tuple) else [value] * count

    def formula(x: Any, taps: Any) -> Any:
        if channels_last:
            x, taps = jnp.moveaxis(x, -1, 1), jnp.moveaxis(taps, -1, 1)
        y = jax.lax.conv_general_dilated(
            x,
            taps,
            each(options.get("stride", 1)),
            [pair if isinstance(pair, tuple) else (pair, pair) for pair in each(options["padding"])],
            rhs_dilation=each(options.get("dilation", 1)),
            feature_group_count=x.shape[1] // taps.shape[1],
        )
        return jnp.moveaxis(y, 1, -1) if channels_last else y

    arrays = [rng.standard_normal(dim).astype("float32") for dim in (image, weight)]
    arrays = [np.ascontiguousarray(np.moveaxis(x, 1, -1)) for x in arrays] if channels_last else arrays
    check(partial(cudnn_jax.conv, **options, channels_last=channels_last), formula, arrays, rng, 3e-6)


def test_a_convolution_has_second_derivatives(rng: np.random.Generator) -> None:
    x, taps = (jnp.asarray(rng.standard_normal(dim), jnp.float32) for dim in ((1, 2, 6), (2, 2, 3)))

    def penalty(fn: Formula) -> Any:
        def slope(x: Any, taps: Any) -> Any:
            return (jax.grad(lambda x: jnp.sin(fn(x, taps)).sum())(x) ** 2).sum()

        return jax.jit(jax.grad(slope, argnums=(0, 1)))(x, taps)

    def plain(x: Any, taps: Any) -> Any:
        return jax.lax.conv_general_dilated(x, taps, [1], [(0, 0)], precision="highest")

    for made, expected in zip(penalty(cudnn_jax.conv), penalty(plain), strict=True):
        close(made, expected, 1e-5)


@pytest.mark.parametrize(("axis", "size"), [(-1, 4), (0, 3)])
def test_scales_of_blocks(axis: int, size: int, rng: np.random.Generator) -> None:
    """Gradients of both, where scales are numbers; the values' through few bits, straight."""
    dims = ((7, 10), (7, 3) if axis else (3, 10))
    arrays = [rng.standard_normal(dim).astype("float32") for dim in dims]

    def formula(values: Any, scales: Any) -> Any:
        return values * jnp.repeat(scales, size, axis)[:7, :10]

    run = partial(cudnn_jax.block_scale_dequantize, block_size=size, axis=axis)
    check(run, formula, arrays, rng, 3e-6)
    values, scales = cudnn_jax.block_scale_quantize(arrays[0], block_size=size, axis=axis)
    assert (values.dtype, scales.dtype, scales.shape) == (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, dims[1])
    close(run(values, scales), arrays[0], 0.05)


def test_quantising_is_straight_through(rng: np.random.Generator) -> None:
    """A cotangent of few bits, exactly."""
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32).at[0].set(0)
    values, pull, scales = jax.vjp(lambda x: cudnn_jax.block_scale_quantize(x, block_size=8), x, has_aux=True)
    cotangent = jnp.asarray(rng.integers(-8, 8, (4, 8)), values.dtype)
    spread = np.asarray(scales, np.float64)
    expected = np.where(np.abs(x).sum(1, keepdims=True) == 0, 0, np.asarray(cotangent, np.float64) / spread)
    made = pull(cotangent)[0]
    assert made.dtype == jnp.float32
    np.testing.assert_array_equal(made, expected.astype(np.float32))
    # Through both, a gradient in few bits; its scale's is none.
    back = jax.grad(lambda v: cudnn_jax.block_scale_dequantize(v, scales, block_size=8).sum())(values)
    assert back.dtype == jnp.float8_e4m3fn


X, W = np.ones((2, 3, 8), np.float32), np.ones((4, 3, 3), np.float32)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: cudnn_jax.rms_norm([1.0]), TypeError, "x is a list; the rule: an array of shape"),
    (lambda: cudnn_jax.rms_norm(X.astype(int)), TypeError, "x has dtype int.*; the rule: bfloat16 or float16"),
    (lambda: cudnn_jax.rms_norm(X, W[0, 0]), ValueError, r"scale has shape \(3,\), expected \(8\)"),
    (lambda: cudnn_jax.layer_norm(X, bias=X), ValueError, r"bias has shape \(2, 3, 8\); the rule: x's dims along"),
    (lambda: cudnn_jax.rms_norm(X, axis=3), ValueError, "axis is 3; the rule: an axis of x, -3 to 2"),
    (lambda: cudnn_jax.rms_norm(X, axis=(0, -3)), ValueError, r"axis is \(0, -3\); the rule: one axis of x, or"),
    (lambda: cudnn_jax.rms_norm(X, epsilon=-1), ValueError, "epsilon is -1.0; the rule: at least 0"),
    (lambda: cudnn_jax.rms_norm(X[..., :0]), ValueError, r"x has shape \(2, 3, 0\); the rule: axes that are norm"),
    (lambda: cudnn_jax.rope(X, X[0, :, :3]), ValueError, r"angles has shape \(3, 3\); the rule: \(..., R\), R even"),
    (lambda: cudnn_jax.rope(X, X[:, :2]), ValueError, r"angles has shape \(2, 2, 8\), which does not broadcast"),
    (lambda: cudnn_jax.conv(X, W[0]), ValueError, r"weight has shape \(3, 3\); the rule: \(K, C / groups, \*taps\)"),
    (lambda: cudnn_jax.conv(X, W[:, :2]), ValueError, r"conv_fprop: dims are image \(2, 3, 8\), filter \(4, 2, 3\)"),
    (lambda: cudnn_jax.conv(X, W, stride=0), ValueError, "stride is 0; the rule: an integer, at least 1"),
    (lambda: cudnn_jax.rms_norm(X, epsilon=10**400), ValueError, "epsilon is an integer of 1329 bits; the rule: a fin"),
    (lambda: cudnn_jax.layer_norm(X, axis=10**5000), ValueError, "axis is an integer of 16610 bits; the rule: an axis"),
    (lambda: cudnn_jax.rope(X, X, output_scale=1e39), ValueError, r"output_scale is 1e\+39; the rule: a finite number"),
    (lambda: cudnn_jax.conv(X, W, stride=2**63), ValueError, "stride is 9223372036854775808; the rule: an integer, at"),
    (lambda: cudnn_jax.conv(X, W, padding=2**62), ValueError, "conv_fprop: Y has dim .* dims, and the place of the"),
    (lambda: cudnn_jax.conv(X, W, dilation=2**63), ValueError, "dilation is 9223372036854775808; the rule: an integer"),
    (lambda: cudnn_jax.block_scale_quantize(X, block_size=2**63), ValueError, "block_size is 9223372036854775808; the"),
    (lambda: cudnn_jax.conv(X, W, stride=(1, 1)), ValueError, r"stride is \(1, 1\); the rule: an integer, or one"),
    (lambda: cudnn_jax.conv(X, W, padding=((1, 2, 3),)), ValueError, r"padding is .*; the rule: an integer, or for"),
    (lambda: cudnn_jax.conv(X, W.astype(np.float16)), TypeError, "weight has dtype float16; the rule: image's dtype"),
    (lambda: cudnn_jax.block_scale_quantize(X, block_size=0), ValueError, "block_size is 0; the rule: an integer, at"),
    (lambda: cudnn_jax.block_scale_quantize(X, dtype="int8"), TypeError, "dtype is 'int8'; the rule: float8_e4m3fn"),
    (
        lambda: cudnn_jax.block_scale_dequantize(X, X[..., :2], block_size=3),
        ValueError,
        r"scales has shape \(2, 3, 2\), expected \(2, 3, 3\); the rule: values' shape with one for each block of 3",
    ),
    (
        lambda: jax.vmap(partial(cudnn_jax.rms_norm, implementation="cudnn"))(X, X[:, 0]),
        NotImplementedError,
        "no vmap rule here on 'cudnn': rmsnorm reads scale whole, .*; implementation='xla' and None have one",
    ),
]


@pytest.mark.parametrize(("bad", "error", "words"), BAD, ids=[words[:40] for _, _, words in BAD])
def test_what_breaks_a_rule_is_named_in_one_line(bad: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        bad()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("block_size", [8, 2**31, 2**63 - 1])
def test_a_block_longer_than_the_axis_is_the_whole_axis(block_size: int) -> None:
    values, scales = cudnn_jax.block_scale_quantize(X, block_size=block_size)
    assert scales.shape == (2, 3, 1)
    made = cudnn_jax.block_scale_dequantize(values, scales, block_size=block_size)
    np.testing.assert_array_equal(made, X)


def test_a_number_that_float64_holds_serves_float64() -> None:
    with jax.enable_x64(True):
        assert cudnn_jax.rms_norm(jnp.ones(4, jnp.float64), epsilon=1e60)[0] == pytest.approx(1e-30, rel=1e-12)


def test_the_reference_has_every_transformation(rng: np.random.Generator) -> None:
    x, scale = (jnp.asarray(rng.standard_normal(dim), jnp.float32) for dim in ((2, 3, 8), (8,)))
    fn = partial(cudnn_jax.rms_norm, implementation="xla")
    gradients = jax.vmap(jax.grad(lambda x, scale: fn(x, scale).sum(), argnums=(0, 1)), in_axes=(0, None))(x, scale)
    for at in range(2):
        each = jax.grad(lambda x, scale: cudnn_jax.rms_norm(x, scale).sum(), argnums=(0, 1))(x[at], scale)
        for made, expected in zip(gradients, each, strict=True):
            close(made[at], expected, 1e-5)
    _, tangent = jax.jvp(fn, (x, scale), (x, scale))
    step = 1e-2
    ahead, behind = (fn(x * (1 + sign * step), scale * (1 + sign * step)) for sign in (1, -1))
    close(tangent, (ahead - behind) / (2 * step), 1e-3)


def test_a_norm_has_second_derivatives_in_the_reference(rng: np.random.Generator) -> None:
    x, direction = (jnp.asarray(rng.standard_normal((2, 8)), jnp.float32) for _ in range(2))

    def slope(norm: Any) -> Any:
        return jax.jit(jax.grad(lambda x: (jax.grad(lambda x: (norm(x) ** 3).sum())(x) * direction).sum()))

    with pytest.raises(NotImplementedError, match="rmsnorm_backward has no derivative; .* or use implementation='xla'"):
        slope(cudnn_jax.rms_norm)(x)
    plain = slope(lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))(x)
    close(slope(partial(cudnn_jax.rms_norm, implementation="xla"))(x), plain, 1e-4)


@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "float32"])
def test_forward_mode_of_quantising_is_straight_through(scale_dtype: str, rng: np.random.Generator) -> None:
    quantise = partial(cudnn_jax.block_scale_quantize, scale_dtype=scale_dtype, implementation="xla")
    x = jnp.asarray(rng.uniform(0.5, 1, (2, 32)), jnp.float32).at[:, 0].set(2.0).at[:, 1].set(0.0)
    (_, scales), (values, _) = jax.jvp(quantise, (x,), (jnp.ones_like(x),))
    _, back = jax.jvp(
        lambda x: cudnn_jax.block_scale_dequantize(*quantise(x), implementation="xla"), (x,), (jnp.ones_like(x),)
    )
    for tangent in (values.astype(jnp.float32) * scales.astype(jnp.float32), back):
        close(tangent, np.ones((2, 32)), 2**-4)


@pytest.mark.parametrize(("dtype", "scale_dtype"), [("float8_e4m3fn", "float32"), ("float4_e2m1fn", "float8_e8m0fnu")])
def test_both_modes_of_quantising_are_transposes(dtype: str, scale_dtype: str, rng: np.random.Generator) -> None:
    """In numbers that the few bits hold: at the largest of a block, of either sign, at 0 and in a block of zeros."""
    options = {"block_size": 8, "dtype": dtype, "scale_dtype": scale_dtype, "implementation": "xla"}
    quantise = partial(cudnn_jax.block_scale_quantize, **options)
    x = jnp.asarray(rng.uniform(-1, 1, (4, 8)), jnp.float32)
    x = x.at[:, 0].set(2.0).at[1, 0].set(-2.0).at[2, 3].set(0).at[3].set(0)
    values, pull, scales = jax.vjp(quantise, x, has_aux=True)
    spread = np.asarray(scales, np.float64)
    steps, cotangent = (rng.integers(1, 4, (4, 8)) * rng.choice([-1, 1], (4, 8)) for _ in range(2))
    tangent = np.where(spread > 2.0**-126, steps * spread, 1.0)
    pushed = jax.jvp(lambda x: quantise(x)[0], (x,), (jnp.asarray(tangent, jnp.float32),))[1]
    pulled = pull(jnp.asarray(cotangent, values.dtype))[0]
    np.testing.assert_array_equal(np.asarray(pushed, np.float64), np.where(np.arange(4)[:, None] < 3, steps, 0))
    ahead = (np.asarray(pushed, np.float64) * cotangent).sum(1)
    np.testing.assert_allclose(ahead, (np.asarray(pulled, np.float64) * tangent).sum(1), rtol=1e-6, atol=1e-5)


def test_a_norm_and_its_gradient_are_the_norms_of_the_family() -> None:
    x, scale = jnp.ones((4, 8, 16), jnp.bfloat16), jnp.ones((16,), jnp.float32)
    told = cudnn_jax.explain(jax.grad(lambda *each: cudnn_jax.rms_norm(*each).sum(), argnums=(0, 1)), x, scale)
    assert [row["facts"] for row in told.rows] == [
        "rmsnorm fwd bfloat16 (32, 16) over axes (1,) inv_var",
        "rmsnorm bwd bfloat16 (32, 16) over axes (1,)",
    ]


def test_gradients_of_what_every_device_has_whole_are_summed(rng: np.random.Generator) -> None:
    x, scale = (jnp.asarray(rng.standard_normal(dim), jnp.float32) for dim in ((4, 3, 8), (8,)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    spread, whole = jax.P("data"), jax.P()
    split = jax.shard_map(cudnn_jax.rms_norm, mesh=mesh, in_specs=(spread, whole), out_specs=spread)

    def gradients(fn: Formula) -> Any:
        return jax.jit(jax.grad(lambda *each: jnp.sin(fn(*each)).sum(), argnums=(0, 1)))(x, scale)

    for made, expected in zip(gradients(split), gradients(cudnn_jax.rms_norm), strict=True):
        close(made, expected, 1e-5)
