"""What each pointwise mode means, in float64 NumPy; a backward mode is the slope of its forward one, by differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import OPERATIONS

erf = np.vectorize(math.erf, otypes=[np.float64])
STEP = 1e-4


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def relu(x: Any, negative_slope: float = 0.0, lower_clip: float = 0.0, upper_clip: float = math.inf) -> Any:
    return np.where(x > lower_clip, np.minimum(x, upper_clip), lower_clip + negative_slope * (x - lower_clip))


def swish(x: Any, swish_beta: float = 1.0) -> Any:
    return x * sigmoid(swish_beta * x)


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORWARD: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": lambda a, b: a + b,
    "add_square": lambda a, b: a + b * b,
    "bias": lambda x, b: x + b,
    "binary_select": lambda a, b, mask: np.where(mask, a, b),
    "ceil": np.ceil,
    "cmp_eq": lambda a, b: a == b,
    "cmp_ge": lambda a, b: a >= b,
    "cmp_gt": lambda a, b: a > b,
    "cmp_le": lambda a, b: a <= b,
    "cmp_lt": lambda a, b: a < b,
    "cmp_neq": lambda a, b: a != b,
    "cos": np.cos,
    "div": lambda a, b: a / b,
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "erf": erf,
    "exp": np.exp,
    "floor": np.floor,
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_approx_tanh": gelu_tanh,
    "gen_index": lambda x, axis: np.indices(x.shape)[axis],
    "identity": lambda x: x,
    "leaky_relu": relu,
    "log": np.log,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_not": lambda a: a == 0,
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "max": np.maximum,
    "min": np.minimum,
    "mod": np.fmod,
    "mul": lambda a, b: a * b,
    "neg": lambda x: -x,
    "pow": lambda a, b: a**b,
    "reciprocal": lambda x: 1 / x,
    "relu": relu,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "scale": lambda x, s: x * s,
    "sigmoid": sigmoid,
    "sin": np.sin,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "sqrt": np.sqrt,
    "sub": lambda a, b: a - b,
    "swish": swish,
    "tan": np.tan,
    "tanh": np.tanh,
}


def slope(forward: Callable[..., Any], x: Any, **options: Any) -> Any:
    """Derivative by a five-point rule: good to about 1e-12 where the function is smooth."""
    far, near = (forward(x + k * STEP, **options) - forward(x - k * STEP, **options) for k in (2, 1))
    return (8 * near - far) / (12 * STEP)


def expected(mode: str, arrays: list[Any], options: dict[str, Any]) -> Any:
    """The answer in float64, or in booleans or integers."""
    arrays = [a.astype(np.float64) if a.dtype != np.bool_ else a for a in arrays]
    forward = FORWARD[mode.removesuffix("_backward")]
    if mode.endswith("_backward"):
        loss, x = arrays
        return loss * slope(forward, x, **options)
    return forward(*arrays, **options)


MODES = sorted(name for name, operation in OPERATIONS.items() if operation.type == "POINTWISE")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "relu": [{}, {"negative_slope": 0.3}, {"lower_clip": 0.5, "upper_clip": 1.5, "negative_slope": 0.1}],
    "leaky_relu": [{"negative_slope": 0.2}],
    "swish": [{}, {"swish_beta": 1.7}],
    "gen_index": [{"axis": 0}, {"axis": 2}],
}
CASES = [(mode, options) for mode in MODES for options in OPTIONS.get(mode.removesuffix("_backward"), [{}])]
POSITIVE = {"log", "sqrt", "rsqrt", "pow"}
AWAY_FROM_0 = {"reciprocal", "div", "mod"}
KINKS = (0.0, 0.5, 1.5)
SHAPE = (3, 5, 64)


def draw(mode: str, rng: np.random.Generator) -> list[np.ndarray]:
    """float32 operands inside the mode's domain, and a boolean mask; not next to a kink where a slope is asked for."""
    arrays = [rng.uniform(-4, 4, SHAPE).astype(np.float32) for _ in OPERATIONS[mode].inputs]
    if mode in POSITIVE:
        arrays[0] = np.abs(arrays[0]) + np.float32(0.1)
    if mode in AWAY_FROM_0:
        arrays[-1] = np.where(np.abs(arrays[-1]) < 0.5, np.float32(1.25), arrays[-1])
    if mode.endswith("_backward"):
        close = np.min([np.abs(arrays[1] - kink) for kink in KINKS], axis=0) < 0.01
        arrays[1] = np.where(close, np.float32(2.25), arrays[1])
    if mode in ("cmp_eq", "cmp_neq", "cmp_ge", "cmp_gt", "cmp_le", "cmp_lt", "max", "min"):
        arrays[1] = np.where(rng.random(SHAPE) < 0.5, arrays[0], arrays[1])
    if mode.startswith("logical_"):
        arrays = [np.where(rng.random(SHAPE) < 0.5, np.float32(0), array) for array in arrays]
    if mode == "binary_select":
        arrays[2] = arrays[2] > 0
    return arrays


def graph_of_one(mode: str, arrays: list[np.ndarray], options: dict[str, Any]) -> pygraph:
    """A float32 graph of one node over tensors like the arrays."""
    graph = pygraph(io_data_type="float32")
    tensors = [graph.tensor(array.shape, data_type=array.dtype) for array in arrays]
    getattr(graph, mode)(*tensors, **options).set_output(True)
    return graph
