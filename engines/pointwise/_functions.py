"""What each pointwise mode computes: mode -> function of the node's parameters and its inputs, in the ports' order.

Inputs come in the node's compute type and broadcast together; what they may be is `engines`' to say. Division and
modulo are C's: towards zero, and with the sign of the first operand.

At infinities and where an inner result overflows a mode is its limit: gelu of -inf is 0, and its slope at inf is 1.
NaN gives NaN, through the slopes as well, but in comparisons, in logic, and in pow where IEEE 754 says 1. A backward
mode is a product: an infinite loss times a slope of 0 is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Params = Mapping[str, Any]
Function = Callable[..., Array]

_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _plain(function: Callable[..., Array]) -> Function:
    """A mode without parameters."""
    return lambda params, *inputs: function(*inputs)


def _same_shape(function: Callable[[Array, Array], Array]) -> Function:
    """A mode whose function wants operands of one shape."""
    return lambda params, a, b: function(*jnp.broadcast_arrays(a, b))


def _given(params: Params, name: str, default: float) -> float:
    value = params.get(name)
    return default if value is None else float(value)


def _like(x: Array, value: float) -> Array:
    return jnp.asarray(value, x.dtype)


def _times(factor: Array, vanishing: Array) -> Array:
    """The product where `vanishing` is 0 faster than `factor` grows: 0 times inf is 0."""
    return jnp.where(vanishing == 0, _like(vanishing, 0), factor * vanishing)


def _where_nan(x: Array, value: Array) -> Array:
    """`value`, NaN where x is."""
    return jnp.where(jnp.isnan(x), x, value)


def _normal_cdf(x: Array) -> Array:
    # erfc keeps its digits where 1 + erf cancels.
    return 0.5 * lax.erfc(-x * _like(x, math.sqrt(0.5)))


def _gelu_slope(x: Array) -> Array:
    density = jnp.exp(-0.5 * x * x) * _like(x, 1 / math.sqrt(2 * math.pi))
    return _normal_cdf(x) + _times(x, density)


def _tanh_argument(x: Array) -> Array:
    return _like(x, _ROOT_2_OVER_PI) * (x + _like(x, _CUBIC) * x * x * x)


def _gelu_tanh(x: Array) -> Array:
    # (1 + tanh(u)) / 2 = sigmoid(2 u), which keeps its digits for negative u.
    return _times(x, jax.nn.sigmoid(2 * _tanh_argument(x)))


def _gelu_tanh_slope(x: Array) -> Array:
    share, left = _shares(2 * _tanh_argument(x))
    inner = _like(x, _ROOT_2_OVER_PI) * (1 + _like(x, 3 * _CUBIC) * x * x)
    return share + _times(2 * x * inner, share * left)


def _shares(u: Array) -> tuple[Array, Array]:
    """sigmoid(u) and 1 - sigmoid(u), each with its digits."""
    return jax.nn.sigmoid(u), jax.nn.sigmoid(-u)


def _rounded(params: Params, name: str, default: float, x: Array) -> float:
    """A parameter as the type of x holds it."""
    return float(np.asarray(_given(params, name, default), x.dtype))


def _bounds(params: Params, x: Array) -> tuple[float, float, float]:
    """(slope below, where the lower part ends, the upper bound) of a clipped relu."""
    names = (("negative_slope", 0.0), ("lower_clip", 0.0), ("upper_clip", math.inf))
    slope, lower, upper = (_rounded(params, name, default, x) for name, default in names)
    return slope, lower, upper


def _relu(params: Params, x: Array) -> Array:
    slope, lower, upper = _bounds(params, x)
    # A slope of 0 times -inf is NaN.
    below = lower + slope * (x - lower) if slope else _where_nan(x, _like(x, lower))
    return jnp.where(x > lower, jnp.minimum(x, upper), below)


def _relu_slope(params: Params, x: Array) -> Array:
    slope, lower, upper = _bounds(params, x)
    above = jnp.where(x < upper, _like(x, 1), _like(x, 0))
    return _where_nan(x, jnp.where(x > lower, above, _like(x, slope)))


def _swish_argument(params: Params, x: Array) -> Array:
    beta = _rounded(params, "swish_beta", 1.0, x)
    # A factor of 0 times inf is NaN.
    return beta * x if beta else _where_nan(x, _like(x, 0))


def _swish_slope(params: Params, x: Array) -> Array:
    argument = _swish_argument(params, x)
    share, left = _shares(argument)
    return share + _times(argument, share * left)


def _swish(params: Params, x: Array) -> Array:
    return _times(x, jax.nn.sigmoid(_swish_argument(params, x)))


def _index(params: Params, x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, params["axis"])


def _backward(slope: Callable[[Params, Array], Array]) -> Function:
    return lambda params, loss, x: loss * slope(params, x)


def _tanh_slope(x: Array) -> Array:
    y = jnp.tanh(x)
    return (1 - y) * (1 + y)


def _sigmoid_slope(x: Array) -> Array:
    share, left = _shares(x)
    return share * left


def _add(a: Array, b: Array) -> Array:
    return a + b


def _scale(a: Array, b: Array) -> Array:
    return a * b


FUNCTIONS: dict[str, Function] = {
    "abs": _plain(jnp.abs),
    "add": _plain(_add),
    "add_square": _plain(lambda a, b: a + b * b),
    "bias": _plain(_add),
    "binary_select": _plain(lambda input0, input1, mask: jnp.where(mask, input0, input1)),
    "ceil": _plain(jnp.ceil),
    "cmp_eq": _plain(jnp.equal),
    "cmp_ge": _plain(jnp.greater_equal),
    "cmp_gt": _plain(jnp.greater),
    "cmp_le": _plain(jnp.less_equal),
    "cmp_lt": _plain(jnp.less),
    "cmp_neq": _plain(jnp.not_equal),
    "cos": _plain(jnp.cos),
    "div": _same_shape(lax.div),
    "elu": _plain(lambda x: jnp.where(x > 0, x, jnp.expm1(jnp.minimum(x, 0)))),
    "elu_backward": _backward(lambda params, x: jnp.exp(jnp.minimum(x, 0))),
    "erf": _plain(lax.erf),
    "exp": _plain(jnp.exp),
    "floor": _plain(jnp.floor),
    "gelu": _plain(lambda x: _times(x, _normal_cdf(x))),
    "gelu_approx_tanh": _plain(_gelu_tanh),
    "gelu_approx_tanh_backward": _backward(_plain(_gelu_tanh_slope)),
    "gelu_backward": _backward(_plain(_gelu_slope)),
    "gen_index": _index,
    "identity": _plain(lambda x: x),
    "leaky_relu": _relu,
    "leaky_relu_backward": _backward(_relu_slope),
    "log": _plain(jnp.log),
    "logical_and": _plain(jnp.logical_and),
    "logical_not": _plain(jnp.logical_not),
    "logical_or": _plain(jnp.logical_or),
    "max": _plain(jnp.maximum),
    "min": _plain(jnp.minimum),
    "mod": _same_shape(lax.rem),
    "mul": _plain(_scale),
    "neg": _plain(jnp.negative),
    "pow": _plain(jnp.power),
    "reciprocal": _plain(jnp.reciprocal),
    "relu": _relu,
    "relu_backward": _backward(_relu_slope),
    "rsqrt": _plain(lax.rsqrt),
    "scale": _plain(_scale),
    "sigmoid": _plain(jax.nn.sigmoid),
    "sigmoid_backward": _backward(_plain(_sigmoid_slope)),
    "sin": _plain(jnp.sin),
    "softplus": _plain(jax.nn.softplus),
    "softplus_backward": _backward(_plain(jax.nn.sigmoid)),
    "sqrt": _plain(jnp.sqrt),
    "sub": _plain(jnp.subtract),
    "swish": _swish,
    "swish_backward": _backward(_swish_slope),
    "tan": _plain(jnp.tan),
    "tanh": _plain(jnp.tanh),
    "tanh_backward": _backward(_plain(_tanh_slope)),
}
"""Every mode of the pointwise table."""
