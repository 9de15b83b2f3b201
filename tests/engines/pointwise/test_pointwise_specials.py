"""Infinities, the largest numbers and NaN through every pointwise mode, against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import OPERATIONS
from support.pointwise import FORWARD, MODES, OPTIONS

TYPES = ["float32", "float16", "bfloat16"]
ROUGH = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}
NEGATIVE, POSITIVE = -math.inf, math.inf
TINY = 1e-60
"""0 in every type that is tested."""
OPTIONS = {
    **OPTIONS,
    "relu": [
        *OPTIONS["relu"],
        {"lower_clip": 0.5},
        {"upper_clip": 1.5},
        {"lower_clip": -1.5, "upper_clip": 1.5},
        {"negative_slope": TINY},
    ],
    "leaky_relu": [{"negative_slope": 0.2}, {"negative_slope": 0.0}],
    "swish": [{}, {"swish_beta": -1.7}, {"swish_beta": 0.0}],
    "gen_index": [{"axis": 0}],
}
CASES = [(mode, options) for mode in MODES for options in OPTIONS.get(mode.removesuffix("_backward"), [{}])]


def below_and_above(below: float, above: float) -> Callable[..., Any]:
    """A function's limits at both ends."""
    return lambda x, **options: np.where(x > 0, above, below)


def relu(x: Any, negative_slope: float = 0.0, lower_clip: float = 0.0, upper_clip: float = math.inf) -> Any:
    below = lower_clip + negative_slope * (x - lower_clip) if negative_slope > TINY else np.full(x.shape, lower_clip)
    return np.where(x > lower_clip, np.minimum(x, upper_clip), below)


def relu_slope(x: Any, negative_slope: float = 0.0, lower_clip: float = 0.0, upper_clip: float = math.inf) -> Any:
    return np.where(
        x > lower_clip, np.where(x < upper_clip, 1.0, 0.0), negative_slope if negative_slope > TINY else 0.0
    )


def swish(x: Any, swish_beta: float = 1.0) -> Any:
    return np.where(swish_beta * np.sign(x) < 0, 0.0, x if swish_beta else x / 2)


def swish_slope(x: Any, swish_beta: float = 1.0) -> Any:
    return np.where(swish_beta * np.sign(x) < 0, 0.0, 1.0 if swish_beta else 0.5)


def rectified(x: Any) -> Any:
    return np.where(x > 0, x, 0.0)


# What the formulas tend to where |x| is large, where these themselves say inf - inf or 0 * inf in float64.
LIMITS: dict[str, Callable[..., Any]] = {
    "elu_backward": below_and_above(0, 1),
    "gelu": rectified,
    "gelu_backward": below_and_above(0, 1),
    "gelu_approx_tanh": rectified,
    "gelu_approx_tanh_backward": below_and_above(0, 1),
    "leaky_relu": relu,
    "leaky_relu_backward": relu_slope,
    "relu": relu,
    "relu_backward": relu_slope,
    "sigmoid_backward": below_and_above(0, 0),
    "softplus": rectified,
    "softplus_backward": below_and_above(0, 1),
    "swish": swish,
    "swish_backward": swish_slope,
    "tanh_backward": below_and_above(0, 0),
}


def large(dtype: str) -> list[float]:
    most = float(jnp.finfo(dtype).max)
    return [NEGATIVE, -most, -most / 64, most / 64, most, POSITIVE, math.nan]


def operands(mode: str, dtype: str) -> list[np.ndarray]:
    """Large numbers for the only operand, and beside each other and ordinary ones for two."""
    values = large(dtype)
    count = len(OPERATIONS[mode].inputs)
    if mode == "binary_select":
        rows = [(a, b, mask) for a, b in itertools.product(values, values) for mask in (0.0, 1.0)]
    elif mode.endswith("_backward"):
        rows = list(itertools.product([1.0, -2.5, *values], values))
    elif count == 1:
        rows = [(x,) for x in values]
    else:
        ordinary = [-2.5, -1.0, 0.5, 3.0]
        rows = list(itertools.product([*values, *ordinary], [*values, *ordinary]))
    if mode == "add_square":
        # -inf and a square that leaves the type: NaN or -inf, as the compiler fuses.
        rows = [(a, b) for a, b in rows if a != NEGATIVE or b in ordinary]
    arrays = [np.array(column) for column in zip(*rows, strict=True)]
    if mode == "binary_select":
        arrays[2] = arrays[2] > 0
    return [array if array.dtype == bool else array.astype(jnp.dtype(dtype)) for array in arrays]


def answer(mode: str, given: list[np.ndarray], options: dict[str, Any]) -> np.ndarray:
    wide = [array if array.dtype == bool else array.astype(np.float64) for array in given]
    if mode.endswith("_backward"):
        slope = LIMITS[mode](wide[1], **options)
        return wide[0] * np.where(np.isnan(wide[1]), math.nan, slope)
    made = np.asarray(LIMITS.get(mode, FORWARD[mode])(*wide, **options))
    if mode in LIMITS:
        made = np.where(np.isnan(wide[0]), math.nan, made)
    return made.astype(np.float64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode, options", CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_large_numbers_and_nan(mode: str, options: dict[str, Any], dtype: str) -> None:
    given = operands(mode, dtype)
    graph = pygraph(io_data_type=dtype, compute_data_type=dtype)
    tensors = [graph.tensor(array.shape, data_type=array.dtype) for array in given]
    getattr(graph, mode)(*tensors, **options).set_output(True).set_data_type("float32")
    graph.create_execution_plans(target=CPU)
    got = np.asarray(jax.jit(graph.build_plans()[1].fn)(*given)[0])
    # Both as the type holds them: what exceeds it is infinite.
    want = answer(mode, given, options).astype(jnp.dtype(dtype)).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=ROUGH[dtype], atol=ROUGH[dtype])


@pytest.mark.parametrize("options", [{}, {"upper_clip": 1.5}, {"negative_slope": TINY}], ids=str)
def test_relu_has_no_negative_zero(options: dict[str, Any]) -> None:
    x = np.float32([-math.inf, -3e38, -2.0, -1e-30, -0.0, 0.0])
    graph = pygraph(io_data_type="float32")
    graph.relu(graph.tensor(x.shape), **options).set_output(True)
    graph.create_execution_plans(target=CPU)
    got = np.asarray(graph.build_plans()[1].fn(x)[0])
    np.testing.assert_array_equal(got.view(np.uint32), np.zeros(x.shape, np.uint32))


@pytest.mark.parametrize("dtype, far", [("float32", 1e20), ("float16", 800.0), ("bfloat16", 1e20)])
def test_the_slope_of_gelu_far_from_zero(dtype: str, far: float) -> None:
    x = jnp.asarray([-far, -20, 20, far], dtype)
    for mode in ("gelu_approx_tanh_backward", "gelu_backward", "swish_backward"):
        graph = pygraph(io_data_type=dtype, compute_data_type=dtype)
        getattr(graph, mode)(graph.tensor(x.shape), graph.tensor(x.shape)).set_output(True)
        graph.create_execution_plans(target=CPU)
        got = graph.build_plans()[1].fn(jnp.ones_like(x), x)[0]
        np.testing.assert_allclose(np.asarray(got, np.float64), [0, 0, 1, 1], atol=1e-6)
